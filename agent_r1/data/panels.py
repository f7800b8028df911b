"""Panels: the fixed list of rows an agent is judged on, known by a short hash.

Two numbers can be compared only if they are of the same rows. The hash says so without the rows: it is made of what a
row asks and what counts as right, in order, and of nothing that depends on the machine, the run or the file format.
What only describes a row (`extra_info`, where published rows number themselves) is not part of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from datetime import date
from decimal import Decimal
from typing import Any

from agent_r1.errors import DataError
from agent_r1.types import TaskRow

HASH_DIGITS = 12  # 48 bits: two of a thousand panels are alike once in half a billion times


def panel_hash(rows: Iterable[TaskRow]) -> str:
    """Of row_id, prompt, ground truth, env_kwargs and data_source of every row, in order."""
    digest = hashlib.sha256()
    for row in rows:
        content = {
            "row_id": row.row_id,
            "prompt": row.prompt,
            "ground_truth": row.ground_truth,
            "env_kwargs": row.env_kwargs,
            "data_source": row.data_source,
        }
        digest.update(_canonical(content, row.row_id).encode())
        digest.update(b"\n")
    return digest.hexdigest()[:HASH_DIGITS]


def _canonical(content: Mapping[str, Any], row_id: str) -> str:
    """JSON with one spelling: sorted keys, no spaces, ASCII."""
    try:
        return json.dumps(_plain(content), sort_keys=True, separators=(",", ":"))
    except TypeError as error:
        raise DataError(
            f"row {row_id!r} cannot be part of a panel: {error}. Give prompts, ground truths and env_kwargs as text, "
            "numbers, lists and mappings, from which an env or a tool makes what it needs"
        ) from None


def _plain(value: Any) -> Any:
    """The value as JSON has it. What has no form of its own there is tagged, so that no text can pass for it."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        return {"bytes": hashlib.sha256(value).hexdigest()}
    if isinstance(value, date | Decimal):
        return {type(value).__name__: str(value)}
    if hasattr(value, "tolist"):  # numpy's arrays and scalars
        return _plain(value.tolist())
    raise TypeError(f"it holds {value!r:.60} of type {type(value).__name__}, which has no fixed form")
