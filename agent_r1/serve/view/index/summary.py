"""One line of a trajectory file, summarised for the table of episodes: numbers, a preview, and the text to search.

Most of a record is lists of token ids and log-probs. Only their lengths matter here, so each list is replaced by its
length before the JSON is parsed, which is several times as fast.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from agent_r1.data.files import read_json
from agent_r1.runs.trajectories import FORMAT
from agent_r1.vision.contents import text_of

PREVIEW_CHARS = 160
SEARCHED_CHARS = 4_000  # of each message; longer tool results are searched only up to here
UNREADABLE = "unreadable"  # the stop reason of a record that cannot be read

# A quote inside a JSON string is escaped, so these keys cannot be confused with text. A tool argument that has one of
# these names and a bracket in its value makes the JSON invalid; such lines are parsed as they are.
_LIST = re.compile(
    rb'(?<!\\)"(?:(?:prompt|response|next_prompt)_ids|response_logprobs|advantages|ratios|entropies)":\s*\['
)


class Summary(NamedTuple):
    """A row of the table of episodes."""

    row: str
    id: str
    reward: float  # total
    outcome: float
    stop: str
    steps: int
    calls: int
    bad_calls: int
    tokens: int  # sampled
    prompt_tokens: int
    seconds: float
    sampling: float  # seconds
    waiting: float  # seconds for tools and the environment
    tools: tuple[str, ...]
    roles: tuple[str, ...]
    question: str
    answer: str


def summarize(line: bytes) -> tuple[Summary, bytes]:
    """Return the summary of a record and its text in lower case. Never raises: a damaged record has a row too."""
    try:
        record = _parse(line)
        if record.get("format", 1) > FORMAT:
            raise ValueError(f"format {record['format']} is newer than this version of agent-r1 (up to {FORMAT})")
        summary = _summary(record)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        reason = f"this record cannot be read: {error}"[:PREVIEW_CHARS]
        return _unreadable(reason), reason.casefold().encode("utf-8", "replace")
    text = "\n".join(part[:SEARCHED_CHARS] for part in _texts(record))
    return summary, text.casefold().replace("\0", " ").encode("utf-8", "replace")


def _parse(line: bytes) -> dict[str, Any]:
    try:
        record = read_json(_shorten(line).decode("utf-8", "replace"))
    except ValueError:
        record = read_json(line.decode("utf-8", "replace"))
    if not isinstance(record, dict):
        raise ValueError("it is not an object")
    return record


def _shorten(line: bytes) -> bytes:
    """Replace lists of tokens by their lengths. Only the rest is searched with a regular expression."""
    parts, at = list[bytes](), 0
    while (match := _LIST.search(line, at)) is not None:
        start, end = match.end(), line.find(b"]", match.end())
        if end < 0:
            break
        count = line.count(b",", start, end) + 1 if line[start:end].strip() else 0
        parts += (line[at : start - 1], str(count).encode())
        at = end + 1
    return b"".join((*parts, line[at:]))


def _summary(record: Mapping[str, Any]) -> Summary:
    steps = record["steps"]
    calls = [call for step in steps for call in step["calls"]]
    outcome = float(record["outcome_reward"])
    last = next((step["action_text"] for step in reversed(steps) if step.get("summary") is None), "")
    return Summary(
        row=str(record["row_id"]),
        id=str(record["trajectory_id"]),
        reward=float(record.get("total_reward", outcome + sum(float(step["reward"]) for step in steps))),
        outcome=outcome,
        stop=str(record["stop"]),
        steps=sum(step.get("summary") is None for step in steps),
        calls=len(calls),
        bad_calls=sum(call["error"] is not None for call in calls),
        tokens=sum(_count(step["response_ids"]) for step in steps),
        prompt_tokens=sum(_count(step["prompt_ids"]) for step in steps),
        seconds=float(record["seconds"]),
        sampling=sum(float(step.get("generate_seconds", 0.0)) for step in steps),
        waiting=sum(float(step.get("env_seconds", 0.0)) for step in steps),
        tools=tuple(sorted({str(call["name"]) for call in calls})),
        roles=tuple(sorted({str(step.get("role", "")) for step in steps} - {""})),
        question=_preview(_question(record)),
        answer=_preview(last or record.get("error") or ""),
    )


def _count(value: int | Sequence[int]) -> int:
    return value if isinstance(value, int) else len(value)


def _unreadable(reason: str) -> Summary:
    return Summary("", "", 0.0, 0.0, UNREADABLE, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0, (), (), reason, "")


def opening_messages(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the first messages of the episode: those of the environment, or the prompt of its row."""
    found = record.get("opening") or (record.get("row") or {}).get("prompt") or []
    return [message for message in found if isinstance(message, dict)] if isinstance(found, list) else []


def _question(record: Mapping[str, Any]) -> str:
    texts = [text_of(m.get("content")) for m in opening_messages(record) if m.get("role") != "system"]
    return texts[-1] if texts else ""


def _preview(text: str) -> str:
    return " ".join(text[: 4 * PREVIEW_CHARS].split())[:PREVIEW_CHARS]


def _texts(record: Mapping[str, Any]) -> Iterator[str]:
    yield f"{record['row_id']}\n{record['trajectory_id']}"
    yield from (text_of(message.get("content")) for message in opening_messages(record))
    for step in record["steps"]:
        yield str(step["action_text"])
        yield str(step.get("feedback", ""))
    yield str((record.get("row") or {}).get("ground_truth") or "")
    yield str(record.get("error") or "")


class StepTimes(NamedTuple):
    """When a step was sampled and answered, in seconds from the start of its episode."""

    start: float
    sampling: float
    waiting: float  # for tools and the environment
    what: str  # it waited for
    role: str


class EpisodeTimes(NamedTuple):
    started: float | None  # Unix time; None: not recorded
    seconds: float
    steps: list[StepTimes]


def times(line: bytes) -> EpisodeTimes | None:
    """Return the times of a record, or None if they cannot be read. Steps of older records, which have no start, follow
    each other without a gap."""
    try:
        record, end, found = _parse(line), 0.0, list[StepTimes]()
        for step in record["steps"]:
            start = end if step.get("start_seconds") is None else _seconds(step["start_seconds"])
            sampling, waiting = (_seconds(step.get(f"{name}_seconds", 0.0)) for name in ("generate", "env"))
            what = ", ".join(dict.fromkeys(str(call["name"]) for call in step["calls"])) or "environment"
            found.append(StepTimes(start, sampling, waiting, what, str(step.get("role", ""))))
            end = start + sampling + waiting
        started = None if record.get("started") is None else _seconds(record["started"])
        return EpisodeTimes(started, _seconds(record["seconds"]), found)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None  # the table of episodes says why


def _seconds(value: Any) -> float:
    if not math.isfinite(seconds := float(value)):
        raise ValueError(f"{seconds} is not a time")
    return seconds
