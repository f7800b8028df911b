"""Questions that take several searches: rows, rewards and demonstrations. See README.md; `data.py` has the data.

Train on `reward_f1` or `reward_em`; both report all components:
em, f1, substring    the answer against the accepted ones (`scores.py`); 0 if the episode was cut off before it answered
format               1 if the episode ended with one `<answer>...</answer>` alone and none of its calls failed
num_searches         searches that were made
gold_found           the share of the gold pages among all that were shown
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from agent_r1.data.downloads import data_folder
from agent_r1.data.rows import Demo
from agent_r1.errors import DataError
from agent_r1.recipes.hotpotqa.data import FOLDER, SPLITS, Question, index_folder, questions
from agent_r1.recipes.hotpotqa.expert import demonstrate
from agent_r1.recipes.hotpotqa.scores import exact_match, f1, substring_match
from agent_r1.tools.search.tool import SearchTool
from agent_r1.types import StopReason, TaskRow, Trajectory

INSTRUCTION = "Search until you know the answer, then write it as <answer>...</answer>."
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def rows(split: str, count: int | None = None, path: str | None = None) -> list[TaskRow]:
    """Return the first `count` questions of a split: train, test, 2wiki, 2wiki_train, musique, musique_train."""
    asked = questions(split, data_folder(FOLDER, path))[:count]
    return [as_row(question, row_id=f"{split}-{question.key}", source=SPLITS[split][0]) for question in asked]


def as_row(question: Question, *, row_id: str, source: str) -> TaskRow:
    truth = {"answers": list(question.answers), "gold": list(question.gold)}
    return TaskRow(
        prompt=[{"role": "user", "content": f"{question.text}\n{INSTRUCTION}"}],
        row_id=row_id,
        reward_model={"style": "rule", "ground_truth": truth},
        data_source=source,
        extra_info={"kind": question.kind},
    )


async def reward_f1(row: TaskRow, trajectory: Trajectory) -> dict[str, float]:
    """Pay the F1 score: partial credit makes attempts of a group differ more often than exact match."""
    return {"reward": (parts := parts_of(row, trajectory))["f1"], **parts}


async def reward_em(row: TaskRow, trajectory: Trajectory) -> dict[str, float]:
    """Pay 1 for an exact match, as published."""
    return {"reward": (parts := parts_of(row, trajectory))["em"], **parts}


def parts_of(row: TaskRow, trajectory: Trajectory) -> dict[str, float]:
    accepted, gold = row.ground_truth["answers"], set(row.ground_truth["gold"])
    # A guess next to a call, in an episode that then ran out of steps, does not count as an answer.
    found = ANSWER.findall(trajectory.final_text) if trajectory.stop is StopReason.ANSWERED else []
    answer = found[-1].strip() if found else ""
    calls = [call for step in trajectory.steps for call in step.calls]
    alone = len(found) == 1 and ANSWER.fullmatch(trajectory.final_text.strip()) is not None
    shown = {title for call in calls for title in call.info.get("titles", ())}
    return {
        "em": exact_match(answer, accepted),
        "f1": f1(answer, accepted),
        "substring": substring_match(answer, accepted),
        "format": float(alone and bool(answer) and all(call.error is None for call in calls)),
        "num_searches": float(len(calls)),
        "gold_found": len(gold & shown) / len(gold),
    }


def demos(count: int, seed: int, path: str | None = None) -> list[Demo]:
    """Return up to `count` of HotpotQA's training questions with the expert's responses, for those it can answer.

    Runs on other splits use these too: the other two sets have too few questions to learn to search from.
    """
    asked = questions("train", data_folder(FOLDER, path))
    return expert_demos(SearchTool(index=index_folder(path)), asked, count, seed)


def expert_demos(tool: SearchTool, asked: Sequence[Question], count: int, seed: int) -> list[Demo]:
    order = list(asked)
    random.Random(f"demos:{seed}").shuffle(order)
    shown: list[Demo] = []
    for question in order:
        if len(shown) == count:
            break
        texts = demonstrate(question, tool)
        if texts is not None:
            shown.append((as_row(question, row_id=f"demo-{question.key}", source="demo"), texts))
    if not shown:
        raise DataError(f"the expert can answer none of {len(asked)} questions; do they belong to this index?")
    return shown
