"""Read and write JSON, JSON Lines (plain or gzipped) and parquet, with errors that name file and line."""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from agent_r1.errors import DataError

FORMATS = (".parquet", ".jsonl", ".jsonl.gz")
MAX_REASON_CHARS = 300


def plain_or_gzipped(path: Path) -> Path | None:
    """Return this file, or the same with `.gz`, whichever exists."""
    return next((found for found in (path, Path(f"{path}.gz")) if found.is_file()), None)


def read_json(text: str) -> Any:
    """`json.loads` that raises `ValueError` for everything unreadable."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def is_nested_deeper(value: Any, levels: int, *, text: str) -> bool:
    """Return True if lists and mappings are nested more than `levels` deep; `text` is the value as JSON.

    Python's own functions fail at a few hundred levels, so deeper input from users and models is refused early.
    """
    if text.count("[") + text.count("{") <= levels:
        return False
    layer = [value]
    for _ in range(levels + 1):
        inside = [list(item.values()) if isinstance(item, dict) else item for item in layer]
        layer = [item for items in inside if isinstance(items, list) for item in items]
        if not layer:
            return False
    return True


def dump_json(value: Any, *, indent: int | None = None, default: Callable[[Any], Any] | None = None) -> str:
    """Write strict JSON. Non-finite numbers become strings that `float` reads back."""
    dumps = partial(json.dumps, ensure_ascii=False, allow_nan=False, indent=indent, default=default)
    try:
        return dumps(value)
    except ValueError:
        return dumps(_finite(value))


def json_lines(path: Path) -> Iterator[Any]:
    """Yield every record of a file, skipping blank lines. Raises `DataError` with the number of an unreadable line."""
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
            for line in lines:
                number += 1
                if line.strip():
                    # Windows may start a file with a byte-order mark.
                    yield read_json(line.decode("utf-8-sig" if number == 1 else "utf-8"))
    except (ValueError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path} line {number} cannot be read: {error}") from error


def read_records(path: Path) -> Iterator[Any]:
    """Yield every record of a file in one of the `FORMATS`."""
    if not path.name.endswith(FORMATS):
        raise DataError(f"{path} is none of {', '.join(FORMATS)}")
    return parquet_rows(path) if path.suffix == ".parquet" else json_lines(path)


def parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield every row of a file. Raises `DataError` for a damaged file, with the first unreadable row."""
    import pyarrow.parquet as pq

    number = 0
    try:
        for batch in pq.ParquetFile(path).iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                yield row
                number += 1
    except Exception as error:  # damaged pages make pyarrow raise nearly anything
        reason = " ".join(str(error).split())[:MAX_REASON_CHARS]
        raise DataError(f"{path} is not a readable parquet file, from row {number} on: {reason}") from error


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {_finite(key): _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
