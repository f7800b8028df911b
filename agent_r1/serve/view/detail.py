"""One episode as the page shows it, and the times of a whole batch.

Long texts and token lists are cut; the page asks for the rest in parts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agent_r1.data.files import dump_json
from agent_r1.errors import AgentR1Error, DataError
from agent_r1.runs.reader import RunReader
from agent_r1.runs.trajectories import FORMAT, Record, RecordFile
from agent_r1.serve.view.index.summary import UNREADABLE, EpisodeTimes, opening_messages, times
from agent_r1.serve.view.library import NotFound, OpenRun
from agent_r1.serve.view.picture_names import names_added, names_in, spell_pictures
from agent_r1.vision.contents import text_of as content_text

TEXT_CHARS = 16_000  # of a text in one answer
TOKENS = 2_000  # of a list of tokens in one answer
_NAMES = {"response_logprobs": "logprob", "advantages": "advantage", "ratios": "ratio", "entropies": "entropy"}
_PARTIAL = re.compile("[\udc80-\udcff]")  # bytes of a character, see agent_r1/tokens/vocabulary.py


def open_file(run: RunReader, name: str) -> RecordFile:
    """Return a file of trajectories by its stem. Only names that the run lists are opened, so none leads elsewhere."""
    for file in run.files():
        if file.path.name.split(".")[0] == name:
            return file
    raise NotFound(f"{run} has no episodes {name!r}")


def read_record(run: RunReader, name: str, position: int) -> tuple[Record, int]:
    """Return a record and how many there are in its file."""
    file = open_file(run, name)
    try:
        if position < 0:
            raise IndexError("episodes are counted from 0")
        record, count = file[position], len(file)
    except (IndexError, OSError) as error:
        raise NotFound(f"there is no episode {position} in {name}: {error}") from error
    if record.get("format", 1) > FORMAT:
        raise DataError(f"the episode has format {record['format']}; this version of agent-r1 reads up to {FORMAT}")
    return record, count


def episode_page(run: RunReader, name: str, position: int) -> dict[str, Any]:
    record, count = read_record(run, name, position)
    try:
        kind, _, step = name.rpartition("_")
        row = record.get("row") or {}
        opening = "opening" if record.get("opening") else "row/prompt"
        return {
            "file": name,
            "n": position,
            "count": count,
            "kind": kind,
            "step": int(step) if step.isdecimal() else 0,
            "row": str(record["row_id"]),
            "id": str(record["trajectory_id"]),
            "stop": str(record["stop"]),
            "reward": record.get("total_reward", record["outcome_reward"]),
            "outcome": record["outcome_reward"],
            "components": {str(key): value for key, value in record["reward_components"].items()},
            "error": record.get("error"),
            "log": _clip(record.get("log", ""), "log"),
            "seconds": record["seconds"],
            "ground_truth": _clip(_plain(row.get("ground_truth")), "row/ground_truth"),
            "messages": [
                {
                    "role": str(message.get("role")),
                    "text": _clip(content_text(message.get("content")), f"{opening}/{index}/content"),
                    "pictures": names_in(message.get("content")),
                }
                for index, message in enumerate(opening_messages(record))
            ],
            "steps": [_step(run, record, index) for index in range(len(record["steps"]))],
            "unanswered": len(record.get("next_prompt_ids") or []),
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"episode {position} of {name} is damaged: {type(error).__name__}: {error}") from error


def _step(run: RunReader, record: Record, index: int) -> dict[str, Any]:
    steps = record["steps"]
    step = steps[index]
    at = f"steps/{index}"
    prompt = step["prompt_ids"]
    before, _ = seen_before(steps, index)
    shared = common(before, prompt)
    return {
        "text": _clip(str(step["action_text"]), f"{at}/action_text"),
        "role": str(step.get("role", "")),
        "feedback": _clip(str(step.get("feedback", "")), f"{at}/feedback"),
        "pictures": names_added(record, index),  # of the answer, where they are not those of a call
        "calls": [_call(call, f"{at}/calls/{number}") for number, call in enumerate(step["calls"])],
        "reward": step["reward"],
        "prompt_tokens": len(prompt),
        "shared_tokens": shared,  # of the prompt: seen before, in the same places
        "kept_all": shared == len(before),
        "sampled_tokens": len(step["response_ids"]),
        "tokens": token_page(run, step, "response", 0),
        "temperature": step.get("temperature"),
        "top_p": step.get("top_p", 1.0),
        "top_k": step.get("top_k", 0),
        "versions": step.get("versions", [[step.get("policy_version", 0), len(step["response_ids"])]]),
        "is_cut": bool(step.get("is_cut")),
        "sampling": step.get("generate_seconds", 0.0),
        "waiting": step.get("env_seconds", 0.0),
        "hidden_messages": step.get("hidden_messages"),
        "summary": step.get("summary"),
        "info": _clip(dump_json(step.get("info") or {}, default=str), f"{at}/info"),
    }


def seen_before(steps: Sequence[Mapping[str, Any]], index: int) -> tuple[list[int], int]:
    """Return the prompt and the response of the last step of the same role, and the length of that prompt.

    A role continues from its own last step, even if other roles acted in between.
    """
    role = steps[index].get("role", "")
    for earlier in reversed(steps[:index]):
        if earlier.get("role", "") == role:
            return [*earlier["prompt_ids"], *earlier["response_ids"]], len(earlier["prompt_ids"])
    return [], 0


def _call(call: Mapping[str, Any], at: str) -> dict[str, Any]:
    arguments = call["arguments"] if isinstance(call["arguments"], Mapping) else {"": call["arguments"]}
    return {
        "name": str(call["name"]),
        "arguments": [
            {"name": str(key), "value": _clip(_plain(value), f"{at}/arguments/{_escape(str(key))}")}
            for key, value in arguments.items()
        ],
        "result": _clip(str(call["result"]), f"{at}/result"),
        "pictures": [str(name) for name in call.get("pictures") or ()],
        "reward": call["reward"],
        "error": None if call["error"] is None else _clip(str(call["error"]), f"{at}/error"),
        "fault": call.get("fault"),
        "span": call["text_span"],
        "seconds": call.get("seconds", 0.0),
    }


def newest_batch(run: OpenRun) -> str:
    """Return the name of the newest file with training episodes, or else with those of an evaluation."""
    files = run.reader.files("train") or run.reader.files()
    if not files:
        raise NotFound(f"{run.name} has kept no episodes, so there is no time line")
    return files[-1].path.name.split(".")[0]


def batch_page(run: OpenRun, name: str) -> dict[str, Any]:
    """Return when every episode of a file was sampled and when it waited, on one clock.

    An episode has steps [start, seconds of sampling, seconds of waiting, number of what it waited for, number of its
    role]; the numbers are indices into `names`. One that cannot be read takes no time, and changes nothing for others.
    """
    rows, lines = run.episodes.summaries(name), open_file(run.reader, name).lines()
    read = [None if row.stop == UNREADABLE else times(line) for row, line in zip(rows, lines, strict=False)]
    known = [each for each in read if each is not None]
    recorded = bool(known) and all(each.started is not None for each in known)
    first = min((each.started or 0.0 for each in known), default=0.0)
    names = {"": 0}
    episodes = list[dict[str, Any]]()
    for n, (row, found) in enumerate(zip(rows, read, strict=False)):
        each = found or EpisodeTimes(first, 0.0, [])
        episodes.append(
            {
                "n": n, "row": row.row, "stop": row.stop,
                "reward": _finite(row.reward), "outcome": _finite(row.outcome),
                "start": (each.started or 0.0) - first if recorded else 0.0, "seconds": each.seconds,
                "steps": [
                    [round(step.start, 4), round(step.sampling, 4), round(step.waiting, 4),
                     names.setdefault(step.what, len(names)), names.setdefault(step.role, len(names))]
                    for step in each.steps
                ],
            }
        )  # fmt: skip
    ends = [one["start"] + one["seconds"] for one, each in zip(episodes, read, strict=True) if each is not None]
    files = [file.path.name.split(".")[0] for file in run.reader.files()]
    kind, _, step = name.rpartition("_")
    alike = [each for each in files if each.rpartition("_")[0] == kind]
    at = alike.index(name)
    return {
        "file": name, "kind": kind, "step": int(step) if step.isdecimal() else 0, "recorded": recorded,
        "seconds": max(ends, default=0.0), "names": list(names), "episodes": episodes, "spent": _spent(known, ends),
        "before": alike[at - 1] if at else None, "after": alike[at + 1] if at + 1 < len(alike) else None,
    }  # fmt: skip


def _spent(read: Sequence[EpisodeTimes], ends: Sequence[float]) -> dict[str, float]:
    """Return the seconds that all episodes together were sampled, waited for each tool, did something else, and had
    ended while others went on."""
    spent = {"sampling": 0.0}
    for each in read:
        for step in each.steps:
            spent["sampling"] += step.sampling
            if step.waiting:
                spent[step.what] = spent.get(step.what, 0.0) + step.waiting
    known = [sum(step.sampling + step.waiting for step in each.steps) for each in read]
    other = sum(max(0.0, each.seconds - own) for each, own in zip(read, known, strict=True))
    return {**spent, "\0other": other, "\0ended": sum(max(ends, default=0.0) - end for end in ends)}


def _finite(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def token_page(run: RunReader, step: Mapping[str, Any], part: str, start: int) -> dict[str, Any]:
    """Return some tokens of a step's prompt or response, with every number that was recorded for each of them."""
    ids = step[f"{part}_ids"]
    shown = ids[start : start + TOKENS]
    values: dict[str, list[Any]] = {}
    if part == "response":  # the tokens of a prompt were not sampled: they have no values
        for name, column in step.items():
            is_numbers = isinstance(column, list) and len(column) == len(ids) > 0 and name != "response_ids"
            if is_numbers and all(isinstance(value, int | float | str) for value in column[:8]):
                values[_NAMES.get(name, name)] = column[start : start + TOKENS]
    return {"ids": shown, "texts": token_texts(run, shown), "values": values, "start": start, "total": len(ids)}


def token_texts(run: RunReader, ids: Sequence[int]) -> list[str] | None:
    try:
        return spell_pictures(ids, [_spell(text) for text in run.token_texts(ids)])
    except (DataError, OSError, ValueError):
        return None  # older runs did not write the texts of their tokens


def tokens_of(run: RunReader, name: str, position: int, *, step: int, part: str, start: int) -> dict[str, Any]:
    record, _ = read_record(run, name, position)
    if part not in ("prompt", "response") or not 0 <= step < len(record["steps"]):
        raise NotFound(f"step {step} of episode {position} of {name} has no {part!r}")
    return token_page(run, record["steps"][step], part, max(0, start))


def text_of(run: RunReader, name: str, position: int, *, at: str, start: int) -> dict[str, Any]:
    """Return the next part of a text that was cut. `at` names it inside the record: "steps/0/feedback"."""
    value: Any = read_record(run, name, position)[0]
    try:
        for key in at.split("/"):
            value = value[int(key)] if isinstance(value, list) else value[_unescape(key)]
    except (KeyError, IndexError, ValueError, TypeError) as error:
        raise NotFound(f"the episode has no {at!r}") from error
    text = content_text(value) if at.endswith("/content") else _plain(value)
    start = max(0, start)
    part = text[start : start + 16 * TEXT_CHARS]
    return {"text": part, "end": start + len(part), "length": len(text)}


def _clip(text: str, at: str) -> dict[str, Any]:
    """Return the beginning of a text, where that ends, its length, and where the rest is. Counts code points."""
    return {"text": text[:TEXT_CHARS], "end": min(len(text), TEXT_CHARS), "length": len(text), "at": at}


def _plain(value: Any) -> str:
    if value is None:
        return ""
    try:
        return value if isinstance(value, str) else dump_json(value, indent=1, default=str)
    except (RecursionError, AgentR1Error):
        return "(nested too deeply)"


def _escape(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")  # as in JSON pointers


def _unescape(key: str) -> str:
    return key.replace("~1", "/").replace("~0", "~")


def common(before: Sequence[int], after: Sequence[int]) -> int:
    """Return the length of the common beginning."""
    limit = min(len(before), len(after))
    if before[:limit] == after[:limit]:
        return limit
    return next(index for index in range(limit) if before[index] != after[index])


def _spell(text: str) -> str:
    """Write bytes of an incomplete character in hexadecimal: JSON for a browser cannot hold them."""
    return _PARTIAL.sub(lambda found: f"\u2039{ord(found[0]) - 0xDC00:02x}\u203a", text)
