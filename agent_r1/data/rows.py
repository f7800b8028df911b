"""Rows of a task: from parquet, JSON Lines (plain or gzipped), Hugging Face datasets or a Python generator.

The published row schema (`prompt`, `agent_name`, `reward_model`, `env_kwargs`, `data_source`, `extra_info`) is read
unchanged; other columns are kept under `extra_info`. Row order is a function of (seed, step), so resuming needs no
iterator state.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

from agent_r1.data.files import FORMATS, read_json, read_records
from agent_r1.errors import ConfigError, DataError, did_you_mean, import_extra
from agent_r1.places import anchored
from agent_r1.types import Message, TaskRow
from agent_r1.vision.contents import read_pictures, take_images

Demo = tuple[TaskRow, list[str]]  # a row, and what an expert says in each turn

_COLUMNS = {field.name for field in fields(TaskRow)}
_NAMED = re.compile(r"\{([^{}]+)\}")  # the name of a column in a text of `data.map`


def load_rows(
    source: str | Callable[..., Iterable[Any]],
    *,
    split: str,
    count: int | None = None,
    beside: Path | None = None,
    columns: Mapping[str, str] | None = None,
) -> list[TaskRow]:
    """Load at most `count` rows from a file, from `hf:name[:config]`, or from a function `rows(split=..., count=...)`.

    A relative path is looked up in the folder `beside` first. `columns` says which columns of a file or dataset fill
    the fields of a row. Every row is checked here, so a bad one is an error before training that names its place.
    """
    if callable(source):
        where = f"{getattr(source, '__module__', '?')}.{getattr(source, '__name__', source)}"
        raw = source(split=split) if count is None else source(split=split, count=count)
        # Iterating over a mapping or a pandas frame would give keys or column names.
        if not isinstance(raw, Iterable) or isinstance(raw, str | Mapping) or hasattr(raw, "iterrows"):
            raise DataError(f"{where} returned {type(raw).__name__} for split {split!r}: return a list of rows")
        folder = beside
    else:
        raw, folder = _read(source, split, beside)
        where = source
    rows = []
    for index, item in enumerate(islice(raw, count)):
        record = {name: getattr(item, name) for name in _COLUMNS} if isinstance(item, TaskRow) else item
        place = f"row {index} of {where}"
        record = map_columns(record, columns, place=place) if columns else record
        row = row_from_record(record, place=place, folder=folder)
        rows.append(row if row.row_id else replace(row, row_id=f"{split}-{index}"))
    if not rows:
        raise DataError(f"{where} has no rows for split {split!r}")
    [(row_id, times)] = Counter(row.row_id for row in rows).most_common(1)
    if times > 1:
        raise DataError(f"{where} has two rows with row_id {row_id!r}; ids name rows in trajectories")
    return rows


def row_from_record(record: Mapping[str, Any], *, place: str, folder: Path | None = None) -> TaskRow:
    """Return a published-style record (a dict, from parquet or JSON) as a `TaskRow`.

    Relative paths of pictures start in the folder.
    """
    if not isinstance(record, Mapping):
        raise DataError(f"{place} is {type(record).__name__}, not a mapping of columns")
    if record.get("prompt") is None:
        raise DataError(f"{place} has no 'prompt'; its columns are {sorted(record)}. A prompt is text or messages")
    if record.get("ground_truth") is not None:  # in extra_info, the environment would see it, not the reward
        raise DataError(f"{place}: move ground_truth into reward_model: {{'ground_truth': ...}}")
    agent_name, row_id = record.get("agent_name"), record.get("row_id")
    if agent_name is not None and not isinstance(agent_name, str):
        raise DataError(f"{place}: agent_name must be the name of a flow, got {agent_name!r:.60}")
    record, messages = take_images(record, _messages(record["prompt"], place), place=place, folder=folder)
    try:
        messages = read_pictures(messages, folder=folder)
    except ValueError as error:
        raise DataError(f"{place}: {error}") from error
    extra = dict(_mapping(record.get("extra_info"), "extra_info", place))
    extra |= {key: value for key, value in record.items() if key not in _COLUMNS and value is not None}
    return TaskRow(
        prompt=messages,
        row_id="" if row_id is None else str(row_id),
        agent_name=agent_name,
        reward_model=_mapping(record.get("reward_model"), "reward_model", place),
        env_kwargs=_mapping(record.get("env_kwargs"), "env_kwargs", place),
        data_source=str(record.get("data_source") or "unknown"),
        extra_info=extra,
    )


def rows_for_step(rows: Sequence[TaskRow], *, step: int, count: int, seed: int) -> list[TaskRow]:
    """Return the `count` rows of a step, counted from 1. Each epoch is a permutation fixed by (seed, epoch)."""
    chosen: list[TaskRow] = []
    position = (step - 1) * count
    while len(chosen) < count:
        epoch, offset = divmod(position + len(chosen), len(rows))
        order = list(range(len(rows)))
        random.Random(f"{seed}:{epoch}").shuffle(order)
        chosen += [rows[i] for i in order[offset : offset + count - len(chosen)]]
    return chosen


def _read(source: str, split: str, beside: Path | None) -> tuple[Iterable[Any], Path | None]:
    """Return the records and the folder that they lie in."""
    if source.startswith("hf:"):
        return _read_hub(source.removeprefix("hf:"), split), None
    path = Path(source.replace("{split}", split)).expanduser()
    places = [anchored(path)] if beside is None or path.is_absolute() else [beside / path, anchored(path)]
    found = next((place for place in places if place.exists()), None)
    if found is None:
        raise DataError(f"no data file at {' or '.join(dict.fromkeys(map(str, places)))}")  # often the same place
    path = _split_file(found, split) if found.is_dir() else found
    records = read_records(path)
    return map(_without_nulls, records) if path.suffix == ".parquet" else records, path.parent


def _split_file(folder: Path, split: str) -> Path:
    names = [f"{split}{suffix}" for suffix in FORMATS]
    found = [folder / name for name in names if (folder / name).exists()]
    if len(found) == 1:
        return found[0]
    if found:
        raise DataError(f"{folder} has {' and '.join(path.name for path in found)}: name one, as in {{split}}.jsonl")
    listed = sorted(path.name for path in folder.iterdir())
    raise DataError(f"{folder} has none of {', '.join(names)}; it holds {listed[:10]}")


def _without_nulls(value: Any) -> Any:
    """Drop the None that Arrow fills in for fields of a struct that a row does not have."""
    if isinstance(value, dict):
        kept = {key: _without_nulls(item) for key, item in value.items() if item is not None}
        return {**kept, "content": None} if "role" in kept and "content" not in kept else kept
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _read_hub(source: str, split: str) -> Iterable[Any]:
    name, _, config = source.partition(":")
    if not name.strip():
        raise ConfigError(f"hf:{source} does not name a dataset: write hf:NAME or hf:NAME:CONFIG")
    datasets = import_extra("datasets", f"reading {name!r}", "datasets")
    try:
        rows: Iterable[Any] = datasets.load_dataset(name, config or None, split=split)
    except (OSError, ValueError) as error:  # the bases of everything that datasets raises
        raise DataError(f"cannot load split {split!r} of dataset {name!r}: {error}") from error
    return rows


def _messages(prompt: Any, place: str) -> list[Message]:
    if isinstance(prompt, str) and prompt.strip():
        return [{"role": "user", "content": prompt}]
    # Any container: pandas and datasets give arrays. Environments may provide everything, so the list may be empty.
    is_list = isinstance(prompt, Iterable) and not isinstance(prompt, str | Mapping)
    messages = list(map(_message, prompt)) if is_list else [None]
    if None in messages:
        raise DataError(f"{place}: prompt must be text or a list of {{role, content}}, got {str(prompt)[:120]}")
    return [message for message in messages if message is not None]


def _message(item: Any) -> Message | None:
    """Return the message with a content of text, parts or None, which may be missing beside tool calls; None if it is
    not a message."""
    if not isinstance(item, Mapping) or not isinstance(item.get("role"), str):
        return None
    content = item.get("content")
    if isinstance(content, Mapping) or not ("content" in item or "tool_calls" in item):
        return None
    if not isinstance(content, str | None):
        if not isinstance(content, Iterable):
            return None
        content = list(content)
    return {**item, "content": content}


def _mapping(value: Any, column: str, place: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if isinstance(value, str):  # published rows store env_kwargs as a JSON string
        try:
            value = read_json(value)
        except ValueError as error:
            raise DataError(f"{place}: {column} is a string but not JSON: {error}") from error
    if not isinstance(value, Mapping):
        raise DataError(f"{place}: {column} must be a mapping or a JSON object, got {type(value).__name__}")
    return {str(key): item for key, item in value.items()}


def map_columns(record: Any, columns: Mapping[str, str], *, place: str) -> dict[str, Any]:
    """Fill the fields of a row from the columns of a file or dataset, as `data.map` says.

        {prompt: "Question: {question}", answer: answers.text.0, row_id: id}

    A value is the name of a column, with dots for what lies inside it, or a text with such names in braces. `answer` is
    the ground truth; fields that rows do not have go to `extra_info`, as do all columns that do not fill a field alone,
    except the columns of the answer. Raises DataError that names a column that is missing.
    """
    if not isinstance(record, Mapping):
        raise DataError(f"{place} is {type(record).__name__}, not a mapping of columns")
    filled = {field: _fill(field, source, record, place) for field, source in columns.items()}
    # A column that fills a field is not kept beside it: the environment must not see the answer.
    used = {_column(source, record) for source in columns.values()}
    used |= {_column(name, record) for name in _NAMED.findall(columns.get("answer", ""))}
    kept = {column: value for column, value in record.items() if column not in used}
    if "answer" in filled:
        scored = kept.get("reward_model")
        ground_truth = {"ground_truth": filled.pop("answer")}
        kept["reward_model"] = {**(scored if isinstance(scored, Mapping) else {}), **ground_truth}
    return {**kept, **filled}


def _column(name: str, record: Mapping[str, Any]) -> str:
    """Return the column that `column` or `column.key.0` lies in."""
    return name if name in record else name.partition(".")[0]


def _fill(field: str, source: str, record: Mapping[str, Any], place: str) -> Any:
    if _NAMED.search(source) is None:
        return _find(field, source, record, place)
    return _NAMED.sub(lambda match: str(_find(field, match[1], record, place)), source)


def _find(field: str, name: str, record: Mapping[str, Any], place: str) -> Any:
    """Return the value of `column` or of `column.key.0`."""
    if name in record:
        return record[name]
    value: Any = record
    for key in name.split("."):
        if isinstance(value, Mapping) and key in value:
            value = value[key]
        elif isinstance(value, list | tuple) and key.isdigit() and int(key) < len(value):
            value = value[int(key)]
        else:
            known = value if isinstance(value, Mapping) else ()
            raise DataError(
                f"{place}: data.map.{field}={name!r} names no column: no {key!r}.{did_you_mean(key, known)}"
            )
    return value
