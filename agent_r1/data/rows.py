"""Rows: what is asked. Parquet, JSON Lines (plain or gzipped), Hugging Face datasets or a Python generator, one type
out.

The published row schema (`prompt`, `agent_name`, `reward_model`, `env_kwargs`, `data_source`, `extra_info`) is read
unchanged; columns it does not name are kept under `extra_info`. Row order is a function of (seed, step), so resuming
needs no iterator state.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from string import Formatter
from typing import Any

from agent_r1.data.files import json_lines, parquet_rows, read_json
from agent_r1.errors import ConfigError, DataError
from agent_r1.places import anchored
from agent_r1.types import Message, TaskRow

Demo = tuple[TaskRow, list[str]]  # what is asked, and what an expert says, turn by turn

FORMATS = (".parquet", ".jsonl", ".jsonl.gz")
_COLUMNS = {"prompt", "agent_name", "reward_model", "env_kwargs", "data_source", "extra_info", "row_id"}


def load_rows(
    source: str | Callable[..., Iterable[Any]], *, split: str, count: int | None = None, beside: Path | None = None
) -> list[TaskRow]:
    """At most `count` rows from a file, from `hf:name[:config]`, or from a function `rows(split=..., count=...)`.

    A relative path is looked up in the folder `beside` first. Every row is checked here, so a bad one is an error
    before training with its place, not a crash in the middle.
    """
    if callable(source):
        where = f"{getattr(source, '__module__', '?')}.{getattr(source, '__name__', source)}"
        raw = _call(source, where, {"split": split} if count is None else {"split": split, "count": count})
    else:
        raw, where = _read(source, split, beside), source
    rows = []
    for index, item in enumerate(islice(raw, count)):
        place = f"row {index} of {where}"
        row = _checked(item, place) if isinstance(item, TaskRow) else row_from_record(item, place=place)
        rows.append(row if row.row_id else replace(row, row_id=f"{split}-{index}"))
    if not rows:
        raise DataError(f"{where} gave no rows for split {split!r}")
    _check_unique(rows, where)
    return rows


def row_from_record(record: Mapping[str, Any], *, place: str) -> TaskRow:
    """One published-style record (a dict, as parquet and JSON give it) as a `TaskRow`."""
    if not isinstance(record, Mapping):
        raise DataError(f"{place} is {type(record).__name__}, not a mapping of columns")
    if record.get("prompt") is None:
        raise DataError(f"{place} has no 'prompt'; its columns are {sorted(record)}. A prompt is text or messages")
    if record.get("ground_truth") is not None:  # under extra_info the env would see it, and the reward would not
        raise DataError(
            f"{place}: ground_truth belongs into reward_model: {{'ground_truth': ...}}, where no env sees it"
        )
    extra = dict(_mapping(record.get("extra_info"), "extra_info", place))
    extra |= {key: value for key, value in record.items() if key not in _COLUMNS and value is not None}
    return TaskRow(
        prompt=_messages(record["prompt"], place),
        row_id=_name(record.get("row_id")),
        agent_name=_flow(record.get("agent_name"), place),
        reward_model=_mapping(record.get("reward_model"), "reward_model", place),
        env_kwargs=_mapping(record.get("env_kwargs"), "env_kwargs", place),
        data_source=str(record.get("data_source") or "unknown"),
        extra_info=extra,
    )


def _checked(row: TaskRow, place: str) -> TaskRow:
    """As `row_from_record` would have made it. A world that says everything itself may have rows without a prompt."""
    return replace(
        row,
        prompt=_messages(row.prompt, place) if len(row.prompt) else [],
        row_id=_name(row.row_id),
        agent_name=_flow(row.agent_name, place),
        reward_model=_mapping(row.reward_model, "reward_model", place),
        env_kwargs=_mapping(row.env_kwargs, "env_kwargs", place),
        extra_info=_mapping(row.extra_info, "extra_info", place),
    )


def _name(row_id: Any) -> str:
    return "" if row_id is None else str(row_id)


def _flow(agent_name: Any, place: str) -> str | None:
    if agent_name is not None and not isinstance(agent_name, str):
        raise DataError(f"{place}: agent_name must be the name of a flow, got {agent_name!r:.60}")
    return agent_name


def rows_for_step(rows: Sequence[TaskRow], *, step: int, count: int, seed: int) -> list[TaskRow]:
    """The `count` rows of training step `step` (from 1): shuffled epochs, each a permutation fixed by (seed, epoch)."""
    chosen: list[TaskRow] = []
    position = (step - 1) * count
    while len(chosen) < count:
        epoch, offset = divmod(position + len(chosen), len(rows))
        order = list(range(len(rows)))
        random.Random(f"{seed}:{epoch}").shuffle(order)
        chosen += [rows[i] for i in order[offset : offset + count - len(chosen)]]
    return chosen


def _call(source: Callable[..., Any], where: str, arguments: dict[str, Any]) -> Iterable[Any]:
    made = source(**arguments)
    if not isinstance(made, Iterable):
        raise DataError(f"{where} returned {made!r:.80} for split {arguments['split']!r}, not rows")
    if isinstance(made, str | Mapping) or hasattr(made, "iterrows"):  # which would give characters, keys, column names
        raise DataError(
            f"{where} returned a {type(made).__name__} for split {arguments['split']!r}, not rows: give a list of "
            "them, of a pandas frame its to_dict('records')"
        )
    return made


def _read(source: str, split: str, beside: Path | None) -> Iterable[Any]:
    if source.startswith("hf:"):
        return _read_hub(source.removeprefix("hf:"), split)
    path = Path(_filled(source, split)).expanduser()
    places = [anchored(path)] if beside is None or path.is_absolute() else [beside / path, anchored(path)]
    found = next((place for place in places if place.exists()), None)
    if found is None:
        raise DataError(f"no data file at {' or '.join(dict.fromkeys(map(str, places)))}")  # often the same place
    path = _split_file(found, split) if found.is_dir() else found
    if not path.name.endswith(FORMATS):
        raise DataError(f"{path} is none of {', '.join(FORMATS)}")
    return map(_without_nulls, parquet_rows(path)) if path.suffix == ".parquet" else json_lines(path)


def _filled(source: str, split: str) -> str:
    try:
        for _, placeholder, _, _ in Formatter().parse(source):
            if placeholder not in (None, "split"):
                raise ValueError(f"there is no {{{placeholder}}}")
        return source.format(split=split)
    except ValueError as error:
        raise ConfigError(f"{source!r}: the only placeholder of a data file is {{split}}: {error}") from None


def _split_file(folder: Path, split: str) -> Path:
    names = [f"{split}{suffix}" for suffix in FORMATS]
    there = [name for name in names if (folder / name).exists()]
    if len(there) > 1:
        raise DataError(f"{folder} has {' and '.join(there)}: name the one that is meant, as in {{split}}{FORMATS[1]}")
    if there:
        return folder / there[0]
    found = sorted(path.name for path in folder.iterdir())
    raise DataError(f"{folder} has none of {', '.join(names)}; it holds {found[:10]}")


def _without_nulls(value: Any) -> Any:
    """Arrow gives every struct all fields of its column: those a row does not have come back as None."""
    if isinstance(value, dict):
        kept = {key: _without_nulls(item) for key, item in value.items() if item is not None}
        return {**kept, "content": None} if "role" in kept and "content" not in kept else kept
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _read_hub(name: str, split: str) -> Iterable[Any]:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(f"reading {name!r} needs the 'datasets' package: pip install 'agent-r1[datasets]'") from error
    name, _, config = name.partition(":")
    if not name.strip():
        raise ConfigError(
            f"hf:{name}{config and f':{config}'} does not name a dataset: write hf:NAME or hf:NAME:CONFIG"
        )
    try:
        loaded: Iterable[Any] = datasets.load_dataset(name, config or None, split=split)
    except (OSError, ValueError) as error:  # datasets raises many kinds, all of them one of these two
        raise DataError(f"cannot load split {split!r} of dataset {name!r}: {error}") from error
    return loaded


def _messages(prompt: Any, place: str) -> list[Message]:
    if isinstance(prompt, str) and prompt.strip():
        return [{"role": "user", "content": prompt}]
    # Whatever holds them: pandas and datasets give arrays.
    messages = list(prompt) if isinstance(prompt, Iterable) and not isinstance(prompt, str | Mapping) else None
    if not messages or not all(map(_is_message, messages)):
        raise DataError(
            f"{place}: prompt must be text or a non-empty list of {{role, content}}, got {str(prompt)[:120]}"
        )
    return [{"content": None, **message} if "tool_calls" in message else dict(message) for message in messages]


def _is_message(message: Any) -> bool:
    """Its content is text, or parts; beside tool calls it may be missing."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        return False
    content = message.get("content")
    if content is None:
        return "content" in message or "tool_calls" in message
    return isinstance(content, Iterable) and not isinstance(content, Mapping)


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


def _check_unique(rows: Sequence[TaskRow], where: str) -> None:
    seen: set[str] = set()
    for row in rows:
        if row.row_id in seen:
            raise DataError(
                f"{where} gave two rows with row_id {row.row_id!r}; ids name rows in trajectories and panels"
            )
        seen.add(row.row_id)
