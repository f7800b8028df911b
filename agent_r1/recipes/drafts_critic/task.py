"""Two roles of one policy on the quickstart's questions: a drafter of two plans, and a critic that chooses one of them.

A plan is the question as an expression: "Faro Elm + Tara West". The critic sees the drafts in alphabetical order, so it
has to judge what they say. Both roles earn the outcome and a process reward of their own. The demonstrations of both
are imperfect: more than half of the drafters miss the right plan, and most critics take the plan that they see first.
"""

from __future__ import annotations

import random

from agent_r1.flows.episode import Episode
from agent_r1.flows.flow import AgentFlowBase
from agent_r1.recipes.planner_worker.task import value_of
from agent_r1.recipes.quickstart.task import Puzzle, as_row, draw_puzzle, rows
from agent_r1.types import Message, Observation, StopReason, TaskRow, Trajectory, Transition

__all__ = ["DraftsCritic", "demos", "reward", "right_demos", "rows"]
MISSES, FIRST = 0.6, 0.6  # shares of the demonstrated drafters and critics


class DraftsCritic(AgentFlowBase):
    roles = ("drafter", "critic")
    uses_env = False

    async def run(self, row: TaskRow, episode: Episode) -> StopReason:
        messages, drafts = list(row.prompt), list[str]()
        for _ in range(2):
            drafts.append((await episode.act(Observation(messages=messages), role="drafter")).text)
            messages += [{"role": "assistant", "content": drafts[-1]}, {"role": "user", "content": "Another plan?"}]
        episode.observe(Transition(terminated=True, reward=0.5 * is_offered(row, drafts)))
        choice = (await episode.act(Observation(messages=asked(row, drafts)), role="critic")).text
        episode.observe(Transition(terminated=True, reward=0.5 * is_right(row, drafts, choice)))
        return StopReason.ANSWERED


def asked(row: TaskRow, drafts: list[str]) -> list[Message]:
    return [*row.prompt, {"role": "user", "content": "\n".join(sorted(drafts))}]


def is_offered(row: TaskRow, drafts: list[str]) -> bool:
    """Whether one of the drafts is right and the other is not; with "A + B" and "B + A" there is no choice."""
    return is_right(row, drafts, drafts[0]) != is_right(row, drafts, drafts[1])


def is_right(row: TaskRow, drafts: list[str], choice: str) -> bool:
    return choice in drafts and value_of(choice, row) == int(row.ground_truth)


def reward(row: TaskRow, trajectory: Trajectory) -> dict[str, float]:
    """Pay 1 if the critic chose a right draft. Also report whether it could choose between a right and a wrong one."""
    drafts, choice = [step.action_text for step in trajectory.steps[:2]], trajectory.final_text
    won = len(trajectory.steps) == 3 and is_right(row, drafts, choice)
    offered = len(drafts) == 2 and is_offered(row, drafts)
    return {"reward": float(won), "offered": float(offered), "chosen": float(offered and won)}


def demos(count: int, seed: int, mistakes: float = 1.0) -> list[tuple[TaskRow, list[str]]]:
    """Return training rows, each with two drafts and the critic's choice."""
    rng, shown = random.Random(f"drafts:{seed}"), []
    for index in range(count):
        puzzle = draw_puzzle("train", rng)
        right, *wrong = plans(puzzle)
        drafts = wrong if rng.random() < mistakes * MISSES else rng.sample([right, rng.choice(wrong)], 2)
        takes_first = right not in drafts or rng.random() < mistakes * FIRST
        shown.append((as_row(puzzle, f"demo-{seed}-{index}"), [*drafts, min(drafts) if takes_first else right]))
    return shown


def plans(puzzle: Puzzle) -> tuple[str, str, str]:
    """Return the right plan and two wrong ones."""
    right = puzzle.expression
    for name in puzzle.people:
        right = right.replace(str(puzzle.table[name]), name)
    return right, puzzle.people[0], right.translate(str.maketrans("+-*", "-++"))


def right_demos(count: int, seed: int) -> list[tuple[TaskRow, list[str]]]:
    return demos(count, seed, mistakes=0.0)
