"""Two roles of one policy: a drafter that finds candidates in a table, and a critic that chooses without the table.

The table has two people of the same first name. The drafter is told only that name and drafts twice, in one conversation;
the critic is told the full name and sees only the drafts. Both earn the outcome, and a process reward of their own. The
demonstrations of both are imperfect: most second drafts repeat the first, and most critics take the first draft.
"""

from __future__ import annotations

import random

from agent_r1.flows.episode import Episode
from agent_r1.flows.flow import AgentFlowBase
from agent_r1.recipes.quickstart.task import FIRST_NAMES, people
from agent_r1.types import Message, Observation, StopReason, TaskRow, Trajectory, Transition

REPEATS, FIRST = 0.65, 0.65  # shares of the demonstrations: of second drafts, and of choices


class DraftsCritic(AgentFlowBase):
    roles = ("drafter", "critic")

    async def run(self, row: TaskRow, episode: Episode) -> StopReason:
        messages, drafts = list(row.prompt), list[str]()
        for _ in range(2):
            text = (await episode.act(Observation(messages=messages), role="drafter")).text
            is_new = text in row.extra_info["candidates"] and text not in drafts
            episode.observe(Transition(terminated=True, reward=0.5 * is_new))
            drafts.append(text)
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Another?"}]
        choice = await episode.act(Observation(messages=asked(row, drafts)), role="critic")
        episode.observe(Transition(terminated=True, reward=0.5 * is_choice(row, drafts, choice.text)))
        return StopReason.ANSWERED


def asked(row: TaskRow, drafts: list[str]) -> list[Message]:
    return [{"role": "user", "content": f"{row.extra_info['name']}?\n{drafts[0]}\n{drafts[1]}"}]


def is_choice(row: TaskRow, drafts: list[str], text: str) -> bool:
    """Whether the critic names the number of the draft that is about the right person, if one is."""
    return any(draft == f"{row.extra_info['name']} {text}" for draft in drafts)


def reward(row: TaskRow, trajectory: Trajectory) -> dict[str, float]:
    """Pay 1 for the right number. Also report whether both candidates were drafted, and whether the choice was right."""
    drafts = [step.action_text for step in trajectory.steps[:2]]
    is_right, is_complete = trajectory.final_text == row.ground_truth, set(drafts) == set(row.extra_info["candidates"])
    chosen = len(trajectory.steps) == 3 and is_choice(row, drafts, trajectory.final_text)
    return {"reward": float(is_right), "both_drafted": float(is_complete), "right_choice": float(chosen)}


def rows(split: str, count: int = 2000, seed: int = 0) -> list[TaskRow]:
    rng = random.Random(f"rows:{split}:{seed}")
    return [draw(split, rng, f"{split}-{seed}-{index}") for index in range(count)]


def draw(split: str, rng: random.Random, row_id: str) -> TaskRow:
    first, *others = rng.sample(FIRST_NAMES.split(), 3)
    same = rng.sample([name for name in people(split) if name.startswith(f"{first} ")], 2)
    names = same + [rng.choice([name for name in people(split) if name.startswith(f"{one} ")]) for one in others]
    lines = [f"{name} {coins}" for name, coins in zip(names, rng.sample(range(10, 100), 4), strict=True)]
    table = sorted(lines, key=lambda line: rng.random())
    candidates = [line for line in table if line in lines[:2]]
    name, _, coins = candidates[rng.random() < 0.75].rpartition(
        " "
    )  # mostly the second, so that the first is not enough
    question = {"role": "user", "content": "\n".join([*table, f"{first}?"])}
    info, model = {"candidates": candidates, "name": name}, {"style": "rule", "ground_truth": coins}
    return TaskRow(prompt=[question], row_id=row_id, reward_model=model, extra_info=info, data_source="drafts_critic")


def demos(count: int, seed: int, mistakes: float = 1.0) -> list[tuple[TaskRow, list[str]]]:
    """Return training rows, each with two drafts and the critic's choice."""
    rng, shown = random.Random(f"demos:{seed}"), []
    for index in range(count):
        row = draw("train", rng, f"demo-{seed}-{index}")
        first, second = row.extra_info["candidates"]
        drafts = [first, first if rng.random() < mistakes * REPEATS else second]
        chosen = next((each for each in drafts if each.startswith(row.extra_info["name"])), first)
        shown.append((row, [*drafts, (first if rng.random() < mistakes * FIRST else chosen).split()[-1]]))
    return shown


def right_demos(count: int, seed: int) -> list[tuple[TaskRow, list[str]]]:
    return demos(count, seed, mistakes=0.0)
