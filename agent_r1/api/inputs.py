"""Turn Python objects (rows, tools, demonstrations, a model) into names that a config can hold."""

from __future__ import annotations

import inspect
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from agent_r1.api.fingerprint import fingerprint
from agent_r1.api.given import give
from agent_r1.build.resolve import resolve
from agent_r1.config import PYTHON
from agent_r1.data.rows import Demo, row_from_record
from agent_r1.errors import ConfigError, brief, did_you_mean
from agent_r1.places import anchored
from agent_r1.tools.base import BaseTool, ToolSet, get_tool, tool
from agent_r1.types import TaskRow

HELD_OUT_SHARE = 0.2  # share of a list of rows that is held out if there are no test rows
MOST_HELD_OUT = 200
TINY = "tiny"  # the model that is created from scratch and learns in minutes on a CPU
TINY_DEMOS = 2000  # the most demonstrations that its tokenizer learns from


def rows_name(rows: Any, test_rows: Any = None, *, seed: int = 0) -> str:
    """Name rows: a list (some are held out for evaluation), {"train": ..., "test": ...}, a function, a file."""
    if isinstance(rows, str | Path):
        if test_rows is not None:
            raise ConfigError(
                f"test_rows has no effect with rows={str(rows)!r}: put {{split}} in the path, as in "
                "data/{split}.jsonl"
            )
        return str(rows)
    if callable(rows):
        if "split" in inspect.signature(rows).parameters:
            if test_rows is not None:
                raise ConfigError("test_rows has no effect with a function rows(split, count): return them for 'test'")
            return give(rows)
        rows = rows()
    splits = rows if isinstance(rows, Mapping) else _split(_records(rows, "rows"), test_rows, seed)
    if isinstance(rows, Mapping) and test_rows is not None:
        raise ConfigError("test_rows has no effect beside rows={'train': ..., 'test': ...}: leave one of them out")
    known = {str(name): _records(part, f"rows[{name!r}]") for name, part in splits.items()}
    return give(_source(known), "rows", made_of=_content(known))


def _source(splits: Mapping[str, Sequence[Any]]) -> Callable[..., list[Any]]:
    def rows(split: str, count: int | None = None) -> list[Any]:
        if split not in splits:
            raise ConfigError(f"rows have no split {split!r}.{did_you_mean(split, splits)}")
        return list(splits[split][:count])

    return rows


def _split(rows: Sequence[Any], test_rows: Any, seed: int) -> dict[str, Sequence[Any]]:
    """Hold rows out for evaluation. An id is the row's position in the list, so it does not depend on the split."""
    named = [row if _row_id(row) else _with_id(row, f"row-{index}") for index, row in enumerate(rows)]
    if test_rows is not None:
        return {"train": named, "test": _records(test_rows, "test_rows")}
    if len(named) < 2:
        raise ConfigError(f"rows has {len(named)} row: give at least 2, or test_rows to evaluate on")
    count = min(MOST_HELD_OUT, max(1, round(len(named) * HELD_OUT_SHARE)))
    held_out = set(random.Random(seed).sample(range(len(named)), count))
    return {
        "train": [row for index, row in enumerate(named) if index not in held_out],
        "test": [row for index, row in enumerate(named) if index in held_out],
    }


def _row_id(row: Any) -> Any:
    return row.row_id if isinstance(row, TaskRow) else row.get("row_id") if isinstance(row, Mapping) else None


def _with_id(row: Any, row_id: str) -> Any:
    if isinstance(row, TaskRow):
        return TaskRow(**{**{field.name: getattr(row, field.name) for field in fields(TaskRow)}, "row_id": row_id})
    return {**row, "row_id": row_id} if isinstance(row, Mapping) else row  # another kind is refused when it is read


def _records(rows: Any, what: str) -> list[Any]:
    """A list from any container of rows, also from a pandas frame."""
    if hasattr(rows, "to_dict") and hasattr(rows, "iterrows"):
        rows = rows.to_dict("records")
    if not isinstance(rows, Iterable) or isinstance(rows, str | bytes | Mapping):
        raise ConfigError(f"{what} must be a list of rows (TaskRow or dicts), a function or a file, got {brief(rows)}")
    return list(rows)


def _content(thing: Any) -> str:
    """Rows as text, to distinguish versions. Pictures, arrays and other objects count by their fingerprint."""
    return json.dumps(thing, default=_as_data, sort_keys=True)


def _as_data(thing: Any) -> Any:
    if isinstance(thing, TaskRow):
        return [getattr(thing, field.name) for field in fields(TaskRow)]
    return dict(thing) if isinstance(thing, Mapping) else fingerprint(thing)


def tool_names(tools: Any) -> list[Any]:
    """Name tools: typed functions (as if decorated with @tool), tool objects and classes. Names stay as they are."""
    if isinstance(tools, str | Mapping) or not isinstance(tools, Iterable):
        raise ConfigError(f"tools must be a list, got {brief(tools)}")
    return [each if isinstance(each, str) else _entry(each) for each in tools]


def _entry(each: Any) -> Any:
    """A tool's name, or settings of tools such as those of an MCP server. Its command starts in the working directory,
    as a recipe's starts in the recipe's folder."""
    if isinstance(each, list | tuple | set | frozenset):
        raise ConfigError(f"tools holds {brief(each)}: list its tools one by one, as in tools=[lookup, *others]")
    if not isinstance(each, Mapping):
        return give(_as_tool(each), made_of=each.made_of if isinstance(each, ToolSet) else None)
    return {
        kind: {**given, "cwd": str(anchored(given.get("cwd", "")))} if "command" in given else given
        for kind, given in each.items()
    }


def _as_tool(each: Any) -> Any:
    return tool(each) if inspect.isroutine(each) else each


def demos_name(demos: Any) -> tuple[str, int | None]:
    """Name demonstrations, a list of (row, texts) or a function (count, seed). For a list, also return its length."""
    if isinstance(demos, str):
        return demos, None
    if callable(demos):
        return give(demos), None
    listed = [_as_demo(demo, index) for index, demo in enumerate(_records(demos, "demos"))]

    def given_demos(count: int, seed: int) -> list[Demo]:
        return listed[:count]

    return give(given_demos, "demos", made_of=_content(listed)), len(listed)


def _as_demo(demo: Any, index: int) -> Any:
    if isinstance(demo, tuple | list) and len(demo) == 2 and isinstance(demo[0], Mapping):
        record = {"row_id": f"demo-{index}", **demo[0]}
        return row_from_record(record, place=f"the row of demonstration {index}"), list(demo[1])
    return demo


def tiny_model_name(demos: Any, tools: Sequence[Any]) -> str:
    """Name a function that makes a tiny model whose tokenizer knows the words of this task. `tools` are named."""
    if demos is None:
        raise ConfigError(
            f"model={TINY!r} is made from the words of demonstrations and knows nothing before it imitates them: give "
            "demos, or name a trained model"
        )
    source = demos_name(demos)[0]

    def make_model(directory: str | Path, seed: int) -> None:
        from agent_r1.recipes.quickstart.tiny import make_tiny_model

        shown = resolve(source, recipe=PYTHON)(count=TINY_DEMOS, seed=0)
        make_tiny_model(directory, seed, demos=shown, tools=list(_tools_of(tools)))

    return give(make_model, "tiny_model", made_of=[source, *map(str, tools)])


def _tools_of(names: Sequence[Any]) -> Iterator[BaseTool]:
    """The tools of these names. Tools that need settings or a server are skipped: their names just get no tokens of
    their own."""
    for name in names:
        found = resolve(name, recipe=PYTHON) if isinstance(name, str) and "." in name else name
        if isinstance(found, str | BaseTool):
            yield get_tool(found)
