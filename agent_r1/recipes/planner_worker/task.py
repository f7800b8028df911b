"""Two roles of one policy on the quickstart's questions: a planner, and a worker that has the tools but only the plan.

Both earn the outcome, and the worker a process reward for carrying out the plan, so that a bad plan counts less against
it. The demonstrations of both are imperfect: most plans are wrong, and most workers skip the calculation.
"""

from __future__ import annotations

import random
from dataclasses import replace

from agent_r1.flows.episode import Episode
from agent_r1.flows.flow import AgentFlowBase
from agent_r1.recipes.quickstart.task import ANSWER, Kind, as_row, calculate, draw_puzzle, evaluate, lookup, rows
from agent_r1.tokens.formats.table import FORMATS
from agent_r1.types import Observation, StopReason, TaskRow, Trajectory, Transition

__all__ = ["PlannerWorker", "calculate", "demos", "lookup", "reward", "right_demos", "rows"]
WRONG = {Kind.TOTAL: 0.7, Kind.DIFFERENCE: 0.6, Kind.MULTIPLE: 0.0}  # share of the demonstrated plans
CARELESS = 0.6  # share of the demonstrated workers
CALL = FORMATS["hermes"].write_call


class PlannerWorker(AgentFlowBase):
    roles = ("planner", "worker")

    async def run(self, row: TaskRow, episode: Episode) -> StopReason:
        plan = (await episode.act(Observation(messages=row.prompt), role="planner")).text
        async with self.playing(replace(row, prompt=[{"role": "user", "content": plan}])) as (env, observation):
            while True:
                action = await episode.act(observation, tools=env.tool_schemas, role="worker")
                transition = await episode.step(env, action)
                if transition.observation is None:
                    episode.observe(Transition(terminated=True, reward=0.5 * says(action.text, value_of(plan, row))))
                    return transition.stop
                observation = transition.observation


def says(text: str, value: int | None) -> bool:
    return (found := ANSWER.fullmatch(text.strip())) is not None and int(found[1]) == value


def value_of(plan: str, row: TaskRow) -> int | None:
    """Return the value of a plan such as "Faro Elm + Tara West"; None if it is not a plan."""
    for name, coins in row.env_kwargs["tools_kwargs"]["lookup"]["table"].items():
        plan = plan.replace(name, str(coins))
    try:
        return evaluate(plan) if " " in plan else int(plan)
    except ValueError:
        return None


def reward(row: TaskRow, trajectory: Trajectory) -> dict[str, float]:
    """Pay 1 for the right number. Also report whether the plan was right, and whether it was carried out."""
    answer, plan, said = int(row.ground_truth), value_of(trajectory.steps[0].action_text, row), trajectory.final_text
    parts = {"reward": says(said, answer), "right_plan": plan == answer, "carried_out": says(said, plan)}
    return {name: float(part) for name, part in parts.items()}


def demos(count: int, seed: int, mistakes: float = 1.0) -> list[tuple[TaskRow, list[str]]]:
    """Return training rows, each with a plan and the worker's responses to it."""
    rng, shown = random.Random(f"roles:{seed}"), []
    for index in range(count):
        puzzle = draw_puzzle("train", rng)
        coins, expression = {name: puzzle.table[name] for name in puzzle.people}, puzzle.expression
        if rng.random() < mistakes * WRONG[puzzle.kind]:
            expression = expression.split()[0] if puzzle.kind is Kind.TOTAL else expression.replace("-", "+")
        texts = [expression] + [CALL("lookup", {"name": name}) for name in coins if str(coins[name]) in expression]
        for name, number in coins.items():
            texts[0] = texts[0].replace(str(number), name)
        if " " in expression and rng.random() >= mistakes * CARELESS:
            texts.append(CALL("calculate", {"expression": expression}))
            expression = str(evaluate(expression))
        shown.append((as_row(puzzle, f"demo-{seed}-{index}"), [*texts, f"#### {expression.split()[-1]}"]))
    return shown


def right_demos(count: int, seed: int) -> list[tuple[TaskRow, list[str]]]:
    return demos(count, seed, mistakes=0.0)
