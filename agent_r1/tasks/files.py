"""Files of records: JSON, JSON lines (plain or gzipped) and parquet, read with clear errors and written strictly."""

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

MAX_NESTING = 100  # levels of lists and mappings; Python copies and prints a few hundred before it gives up
MAX_REASON_CHARS = 300
_TOO_DEEP = f"it is nested more than {MAX_NESTING} levels deep"


def plain_or_gzipped(path: Path) -> Path | None:
    """The file that is there: this one, or the same with `.gz`."""
    return next((found for found in (path, Path(f"{path}.gz")) if found.is_file()), None)


def read_json(text: str) -> Any:
    """`json.loads`, but everything that cannot be read is a `ValueError`: also what would break code further on."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except ValueError as error:
        if "integer string conversion" in str(error):  # which advises to change a setting of Python
            raise ValueError("a number in it has too many digits") from None
        raise
    if text.count("[") + text.count("{") > MAX_NESTING and _is_deeper(value, MAX_NESTING):
        raise ValueError(_TOO_DEEP)
    return value


def dump_json(value: Any, *, indent: int | None = None, default: Callable[[Any], Any] | None = None) -> str:
    """JSON that every reader takes. It has no NaN: numbers that are not finite become texts that `float` reads back."""
    dumps = partial(json.dumps, ensure_ascii=False, allow_nan=False, indent=indent, default=default)
    try:
        return dumps(value)
    except ValueError:
        return dumps(_finite(value))


def json_lines(path: Path) -> Iterator[Any]:
    """Every record of a file, without blank lines. A line that cannot be read is a `DataError` with its number."""
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
            for line in lines:
                number += 1
                if line.strip():
                    yield read_json(line.decode("utf-8-sig" if number == 1 else "utf-8"))  # Windows marks the start
    except (ValueError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path} line {number} cannot be read: {error}") from error


def parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Every row of a file. A damaged file is a `DataError` that says how far it could be read."""
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


def _is_deeper(value: Any, levels: int) -> bool:
    layer = [value]
    for _ in range(levels + 1):
        inside = [list(item.values()) if isinstance(item, dict) else item for item in layer]
        layer = [item for items in inside if isinstance(items, list) for item in items]
        if not layer:
            return False
    return True
