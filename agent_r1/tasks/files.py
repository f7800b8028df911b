"""Files of records as they are published: a JSON object per line, plain or gzipped. Knows nothing of what they hold."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agent_r1.errors import DataError


def plain_or_gzipped(path: Path) -> Path | None:
    """The file that is there: this one, or the same with `.gz`."""
    return next((found for found in (path, Path(f"{path}.gz")) if found.is_file()), None)


def json_lines(path: Path) -> Iterator[Any]:
    """Every record of a file, blank lines left out; a line that is not JSON is a `DataError` with its number."""
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
            for line in lines:
                number += 1
                if line.strip():
                    yield json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))  # Windows marks the start
    except (json.JSONDecodeError, UnicodeDecodeError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path} line {number} cannot be read: {error}") from error
