"""Fill the fields of a row from the columns of a file or dataset, as `data.map` says.

    {prompt: "Question: {question}", answer: answers.text.0, row_id: id}

A value is the name of a column, with dots for what lies inside it, or a text with such names in braces. `answer` is the
ground truth; fields that rows do not have go to `extra_info`, as do all columns that do not fill a field alone, except
the columns of the answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from agent_r1.errors import DataError, did_you_mean

_NAMED = re.compile(r"\{([^{}]+)\}")


def map_columns(record: Any, columns: Mapping[str, str], *, place: str) -> dict[str, Any]:
    """Return the record of a row. Raises DataError that names a column that is missing."""
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
