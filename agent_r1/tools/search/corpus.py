"""Passages: read from files, stored in one Arrow file that any number of processes map into memory.

A passage is read from disk when it is used, so opening a corpus takes the same time whatever its size. Passages keep
their order; rankers refer to them by their place in it.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import pyarrow as pa
from pydantic import Field

from agent_r1.data.files import read_records
from agent_r1.errors import DataError

Item = TypeVar("Item")
Report = Callable[[str], None]  # takes the progress of a long loop

ROWS_PER_BATCH = 4096
REPORT_SECONDS = 1.0
_SCHEMA = pa.schema([("id", pa.string()), ("title", pa.string()), ("text", pa.string())])


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    passage_id: Annotated[str, Field(alias="id")]  # unique in its corpus; the alias is its name in `wire.py`
    title: str
    text: str


def read_passages(paths: Sequence[Path]) -> Iterator[Passage]:
    """Read .jsonl, .jsonl.gz and .parquet files with the columns title, text and, optionally, id.

    A passage without an id is named after its file and its number in it.
    """
    for path in paths:
        if not path.is_file():
            raise DataError(f"there is no corpus file {path}")
        for index, record in enumerate(read_records(path)):
            if not isinstance(record, Mapping) or not isinstance(record.get("text"), str):
                raise DataError(f"passage {index} of {path} has no 'text'; expected title, text and, optionally, id")
            given = record.get("id")
            name = f"{path.name.partition('.')[0]}-{index}" if given is None else str(given)
            title, text = str(record.get("title") or ""), record["text"]
            try:
                f"{name}{title}{text}".encode()
            except UnicodeEncodeError as error:
                raise DataError(f"passage {index} of {path} cannot be written as UTF-8: {error}") from None
            yield Passage(passage_id=name, title=title, text=text)


class Corpus:
    """The passages of one Arrow file, by place."""

    def __init__(self, table: Any) -> None:
        self._ids, self._titles, self._texts = (table.column(name) for name in _SCHEMA.names)

    @classmethod
    def open(cls, path: Path) -> Corpus:
        try:
            return cls(pa.ipc.open_file(pa.memory_map(str(path))).read_all())
        except (OSError, KeyError, pa.ArrowInvalid) as error:
            raise DataError(f"{path} is not a file of passages: {error}") from error

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, place: int) -> Passage:
        return Passage(
            passage_id=self._ids[place].as_py(), title=self._titles[place].as_py(), text=self._texts[place].as_py()
        )

    def __iter__(self) -> Iterator[Passage]:
        for chunks in zip(self._ids.chunks, self._titles.chunks, self._texts.chunks, strict=True):
            for passage_id, title, text in zip(*(chunk.to_pylist() for chunk in chunks), strict=True):
                yield Passage(passage_id=passage_id, title=title, text=text)


def write_corpus(passages: Iterable[Passage], path: Path, report: Report | None = None) -> str:
    """Write the passages without duplicates (same title and text), and return the sha256 of what was written."""
    seen: set[bytes] = set()
    ids: set[str] = set()
    digest, batch = hashlib.sha256(), list[Passage]()
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, _SCHEMA) as writer:
        for passage in track(passages, "reading", report):
            content = hashlib.sha256(f"{passage.title}\0{passage.text}".encode()).digest()
            if content in seen:
                continue
            if passage.passage_id in ids:
                raise DataError(f"two different passages have the id {passage.passage_id!r}; ids must be unique")
            seen.add(content)
            ids.add(passage.passage_id)
            digest.update(content)
            batch.append(passage)
            if len(batch) == ROWS_PER_BATCH:
                writer.write_batch(_to_arrow(batch))
                batch.clear()
        if batch:
            writer.write_batch(_to_arrow(batch))
    if not seen:
        raise DataError("the corpus has no passages")
    return digest.hexdigest()


def _to_arrow(batch: Sequence[Passage]) -> Any:
    columns = ([p.passage_id for p in batch], [p.title for p in batch], [p.text for p in batch])
    return pa.record_batch([pa.array(column, pa.string()) for column in columns], schema=_SCHEMA)


def track(items: Iterable[Item], stage: str, report: Report | None, total: int | None = None) -> Iterator[Item]:
    """Yield the items, reporting at most once a second and at the end."""
    began = last = time.perf_counter()
    done = 0
    for done, item in enumerate(items, start=1):
        yield item
        now = time.perf_counter()
        if report is not None and now - last >= REPORT_SECONDS:
            last = now
            report(describe_progress(stage, done, total, seconds=now - began))
    if report is not None:
        report(f"{stage}: {done:,} passages")


def describe_progress(stage: str, done: int, total: int | None, *, seconds: float) -> str:
    if not total:
        return f"{stage}: {done:,} passages"
    left = seconds * (total - done) / done
    return f"{stage}: {done:,} of {total:,} passages ({done / total:.0%}), about {left:.0f} s left"
