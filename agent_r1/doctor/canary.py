"""Does the policy see the ground truth? A canary takes its place wherever the row has it, and must not be shown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agent_r1.doctor.finding import Finding, green, red, yellow
from agent_r1.doctor.players import Shown, play, read
from agent_r1.envs.check import canary_like, find_canary
from agent_r1.types import Group, TaskRow

PLAYED = 4  # rows
COMPARED = 64  # rows that tell which fields hold the answer
MIN_ANSWER = 6  # characters; shorter answers occur elsewhere by accident
OFTEN = 0.9  # share of rows

Field = tuple[str | int, ...]  # the way to a value inside a row


async def check_canary(shown: Shown) -> list[Finding]:
    name = "ground truth is never shown"
    fields = answer_fields(shown.plan.train_rows[:COMPARED])
    rows = [with_canary(row, fields) for row in shown.rows[:PLAYED] if row.ground_truth is not None]
    if not rows:
        return [green(name, "rows have none (reward_model.ground_truth)")]
    groups: list[Group] = []
    for agent in ("empty", "random"):
        groups += await play(shown.config, shown.plan, shown.renderer, agent, rows)
    for group in groups:
        for step in group.trajectories[0].steps:
            for text in (read(shown.renderer, step.prompt_ids), step.feedback):
                if (canary := find_canary(text)) is None:
                    continue
                around = text.partition(canary)[0][-60:]
                return [
                    red(
                        name,
                        f"the policy sees the ground truth of row {group.row.row_id!r} after {around!r}",
                        "Keep the answer out of env_kwargs, extra_info and everything that the env or a tool shows",
                    )
                ]
    played = sum(bool(group.trajectories[0].steps) for group in groups)  # an env may refuse such a row
    return [green(name, f"a canary in its place was not seen in {played} episodes")]


def with_canary(row: TaskRow, fields: set[Field]) -> TaskRow:
    """Put the canary wherever the row has the answer, except where the policy may read it: in its prompt."""
    truth = row.ground_truth

    def put(value: Any, place: Field) -> Any:
        if is_answer(value, truth) and (place in fields or is_long(value)):
            return canary_like(value)
        if isinstance(value, Mapping):
            return {key: put(each, (*place, key)) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(put(each, (*place, index)) for index, each in enumerate(value))
        return value

    return replace(
        row,
        reward_model={**row.reward_model, "ground_truth": canary_like(truth)},
        env_kwargs=put(dict(row.env_kwargs), ("env_kwargs",)),
        extra_info=put(dict(row.extra_info), ("extra_info",)),
    )


def answer_fields(rows: Sequence[TaskRow]) -> set[Field]:
    """The fields that equal the ground truth in most rows. In a single row, a short answer may equal any number or
    word, such as the size of a board."""
    known = [row for row in rows if row.ground_truth is not None]
    if len({str(row.ground_truth) for row in known}) < 2:  # equal everywhere, so nothing can be told
        return set()
    counts: Counter[Field] = Counter()
    for row in known:
        parts = {"env_kwargs": row.env_kwargs, "extra_info": row.extra_info}
        counts.update(place for place, value in _values(parts, ()) if is_answer(value, row.ground_truth))
    return {place for place, count in counts.items() if count >= OFTEN * len(known)}


def _values(value: Any, place: Field) -> Iterator[tuple[Field, Any]]:
    yield place, value
    inner = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, each in inner:
        yield from _values(each, (*place, key))


def is_answer(value: Any, truth: Any) -> bool:
    """Whether they are equal, also if one is a number and the other its text."""
    if isinstance(value, bool) or value is None or truth is None:
        return False
    if isinstance(value, str | int | float) and isinstance(truth, str | int | float):
        return str(value).strip() == str(truth).strip()
    return type(value) is type(truth) and bool(value == truth)


def is_long(value: Any) -> bool:
    return len(value) >= MIN_ANSWER if isinstance(value, str) else isinstance(value, list | tuple | Mapping)


def check_answer_in_prompt(shown: Shown) -> list[Finding]:
    name = "prompt does not tell the answer"
    answers = [(row, row.ground_truth) for row in shown.rows if isinstance(row.ground_truth, str)]
    long = [(row, answer) for row, answer in answers if len(answer.strip()) >= MIN_ANSWER]
    told = [row for row, answer in long if any(answer.strip() in str(each.get("content")) for each in row.prompt)]
    if len(long) > 1 and len(told) >= OFTEN * len(long):
        evidence = f"{len(told)} of {len(long)} prompts contain the row's ground truth"
        return [yellow(name, evidence, "Remove it from the prompt, unless the task is to choose from what is given")]
    return [green(name, f"{len(told)} of {len(shown.rows)} prompts contain the row's ground truth")]
