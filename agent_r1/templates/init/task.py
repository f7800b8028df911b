"""A small shop. The agent is asked what an order costs: it has to look up every price and add them up.

    user   What does an order of Coral Lamp and Jade Vase cost?
    agent  <tool_call>{"name": "price", "arguments": {"item": "Coral Lamp"}}</tool_call>
    tool   17
    agent  <tool_call>{"name": "price", "arguments": {"item": "Jade Vase"}}</tool_call>
    tool   25
    agent  <tool_call>{"name": "total", "arguments": {"prices": [17, 25]}}</tool_call>
    tool   42
    agent  42

A task consists of tools, rows, a reward and, if you like, demonstrations. base.yaml names them.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from agent_r1 import FromRow, TaskRow, ToolError, Trajectory, tool

COLORS = (
    "Amber Azure Beige Black Blue Bronze Coral Cream Cyan Gold Gray Green Indigo Ivory Jade Khaki Lemon Lilac Lime "
    "Mint Navy Ochre Olive Orange Peach Pink Plum Red Ruby Silver Teal White"
)
THINGS = (
    "Basket Bell Bench Bottle Bowl Brush Candle Chair Clock Cup Desk Drum Fan Fork Frame Hook Jar Kite Knife Ladder "
    "Lamp Mirror Mug Pan Pillow Plate Rug Shelf Sofa Spoon Table Vase"
)
ITEMS = [f"{color} {thing}" for color in COLORS.split() for thing in THINGS.split()]
random.Random(0).shuffle(ITEMS)
SPLITS = {"train": ITEMS[200:], "test": ITEMS[:200]}  # the test asks about items that training never mentions

HURRY = 0.7  # how often the demonstrator forgets the second item


# 1. Tools. The model sees the name, the docstring and the arguments, except for those marked FromRow.


@tool
async def price(item: str, prices: FromRow[dict[str, int]]) -> str:
    """Look up the price of one item."""
    if item not in prices:
        raise ToolError(f"we do not sell {item!r}")  # the model reads this and may try again
    return str(prices[item])


@tool
async def total(prices: list[int]) -> str:
    """Add up prices."""
    return str(sum(prices))


# 2. Rows: what is asked, the data its tools need, and the right answer, which the agent never sees.


def rows(split: str, count: int = 1000) -> list[TaskRow]:
    rng = random.Random(split)
    return [draw_row(split, f"{split}-{index}", rng) for index in range(count)]


def draw_row(split: str, row_id: str, rng: random.Random) -> TaskRow:
    order = rng.sample(SPLITS[split], k=rng.choice([1, 2, 2]))
    prices = {item: rng.randint(10, 99 // len(order)) for item in order}
    return TaskRow(
        prompt=[{"role": "user", "content": f"What does an order of {' and '.join(order)} cost?"}],
        row_id=row_id,
        reward_model={"ground_truth": str(sum(prices.values()))},
        env_kwargs={"tools_kwargs": {"price": {"prices": prices}}},
    )


# 3. Reward: a number for the whole episode.


def reward(row: TaskRow, trajectory: Trajectory) -> float:
    """1 if the agent's last words are the right number, else 0."""
    return float(trajectory.final_text.strip() == row.ground_truth)


# 4. Demonstrations: rows, each with the texts that an expert would write. They teach the model to call tools.
#    Ours are imperfect on purpose: the demonstrator is often in a hurry and prices only the first item. The model
#    imitates that, until reinforcement learning shows that only complete orders earn the reward.


def demos(count: int, seed: int) -> list[tuple[TaskRow, list[str]]]:
    rng = random.Random(f"demos-{seed}")
    drawn = [draw_row("train", f"demo-{index}", rng) for index in range(count)]
    return [(row, demonstrate(row, hurry=rng.random() < HURRY)) for row in drawn]


def demonstrate(row: TaskRow, *, hurry: bool = False) -> list[str]:
    """The agent's side of an episode, one text per turn."""
    prices = dict(row.env_kwargs["tools_kwargs"]["price"]["prices"])
    if hurry and len(prices) == 2:
        prices.popitem()
    texts = [write_call("price", item=item) for item in prices]
    if len(prices) == 2:
        texts.append(write_call("total", prices=list(prices.values())))
    return [*texts, str(sum(prices.values()))]


def write_call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


# 5. Model: a tiny one, created in seconds, that knows the words of this task and nothing else.
#    To train a real model, replace model.make in base.yaml by model.path.


def make_model(directory: Path, seed: int) -> None:
    from agent_r1.recipes.quickstart.tiny import make_tiny_model

    make_tiny_model(directory, seed, demos=demos(2000, seed=0), tools=[price, total])
