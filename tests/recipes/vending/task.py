"""A vending machine that gives no change: pay for a tea, then for a cake, to the penny and with few coins."""

import random

from agent_r1 import Reply, TextEnv
from agent_r1.types import TaskRow, Trajectory

COINS = {"5": 5, "2": 2, "1": 1}


class Machine(TextEnv):
    def __init__(self, tea: int, cake: int) -> None:
        self.left, self.cake = tea, cake

    def begin(self, row: TaskRow) -> str:
        return f"A tea and a cake. The tea: {self.left} to pay"

    def reply(self, said: str) -> Reply:
        self.left -= COINS.get(said.strip(), 0)
        if self.left == 0 and self.cake:
            self.left, self.cake = self.cake, 0
            return Reply(text=f"The cake: {self.left} to pay")
        if self.left > 0:
            return Reply(text=f"{self.left} to pay")
        paid = self.left == 0
        return Reply(text="Enjoy!" if paid else "Too much!", done=True, info={"paid": paid})


def rows(split: str, count: int = 81) -> list[TaskRow]:
    prices = [{"tea": tea, "cake": cake} for tea in range(1, 10) for cake in range(1, 10)]
    random.Random(0).shuffle(prices)
    chosen = prices[:41] if split == "train" else prices[41:]
    return [TaskRow(prompt=[], row_id=f"{split}-{i}", env_kwargs=price) for i, price in enumerate(chosen[:count])]


def reward(row: TaskRow, trajectory: Trajectory) -> float:
    return float(trajectory.steps[-1].info.get("paid", False))


def demos(count: int, seed: int) -> list[tuple[TaskRow, list[str]]]:
    """Pay in a hurry: often insert a random coin without checking the remaining price."""
    chance, shown = random.Random(seed), list[tuple[TaskRow, list[str]]]()
    for row in chance.choices(rows("train"), k=count):
        machine, said = Machine(**row.env_kwargs), list[str]()
        while machine.left > 0 and len(said) < 8:
            fitting = [coin for coin, worth in COINS.items() if worth <= machine.left]
            said.append(chance.choice(list(COINS) if chance.random() < 0.3 else fitting))
            machine.reply(said[-1])
        shown.append((row, said))
    return shown
