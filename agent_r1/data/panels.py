"""Panels: a panel is the fixed list of rows that an agent is evaluated on, identified by a short hash.

Results can be compared only on the same rows. The hash covers what a row asks and what counts as right, in order, and
nothing that depends on the machine, the run or the file format. `extra_info`, which only describes a row, is left out.
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
from agent_r1.vision.pictures import Picture

HASHED = ("row_id", "prompt", "ground_truth", "env_kwargs", "data_source")
HASH_DIGITS = 12  # 48 bits: among a thousand panels, a collision has odds of one in half a billion


def panel_hash(rows: Iterable[TaskRow]) -> str:
    """Hash the `HASHED` fields of every row, in order."""
    digest = hashlib.sha256()
    for row in rows:
        content = {name: getattr(row, name) for name in HASHED}
        try:
            # JSON with a unique spelling.
            digest.update(json.dumps(_plain(content), sort_keys=True, separators=(",", ":")).encode() + b"\n")
        except TypeError as error:
            raise DataError(
                f"row {row.row_id!r} cannot be evaluated on: {error}. Use text, numbers, lists and mappings in "
                "prompts, ground truths and env_kwargs"
            ) from None
    return digest.hexdigest()[:HASH_DIGITS]


def _plain(value: Any) -> Any:
    """Return the value as plain JSON. Types that JSON lacks are tagged, so that no text equals them."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        return {"bytes": hashlib.sha256(value).hexdigest()}
    if isinstance(value, Picture):
        return {"picture": value.name}
    if isinstance(value, date | Decimal):
        return {type(value).__name__: str(value)}
    if hasattr(value, "tolist"):  # numpy's arrays and scalars
        return _plain(value.tolist())
    raise TypeError(f"it holds {value!r:.60} of type {type(value).__name__}, which JSON lacks")
