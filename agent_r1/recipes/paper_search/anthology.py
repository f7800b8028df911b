"""Read the ACL Anthology's own XML files, from an archive of its repository."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from agent_r1.disk import write_atomically
from agent_r1.errors import DataError

# Left out, so that everybody evaluates on the same papers: the results on the recipe's page were measured without them.
LEFT_OUT = frozenset(
    f"{name}.xml"
    for name in (
        "2023.findings", "2024.findings", "2025.findings", "2026.findings", "2025.acl", "2025.emnlp", "2026.acl",
    )
)  # fmt: skip
COLUMNS = ("id", "title", "abstract", "authors", "year", "venue")


def read_anthology(archive: Path) -> Iterator[dict[str, str]]:
    """Yield the papers of `data/xml/*.xml`, ordered by file."""
    try:
        with tarfile.open(archive, "r:gz") as files:
            found = {}
            for member in files:
                folder, _, name = member.name.rpartition("/")
                if folder.endswith("/data/xml") and name.endswith(".xml") and name not in LEFT_OUT:
                    taken = files.extractfile(member)
                    found[name] = list(read_collection(taken.read())) if taken is not None else []
    except (OSError, EOFError, tarfile.TarError, ElementTree.ParseError) as error:
        raise DataError(f"{archive} cannot be read: {error}. Delete it to fetch it again") from error
    for name in sorted(found):
        yield from found[name]


def read_collection(xml: bytes) -> Iterator[dict[str, str]]:
    """Yield the papers of one file."""
    collection = ElementTree.fromstring(xml)
    for volume in collection.iter("volume"):
        meta = volume.find("meta")
        venue, year = (_text(meta, name) for name in ("booktitle", "year"))
        for paper in volume.iter("paper"):
            authors = [f"{_text(author, 'first')} {_text(author, 'last')}".strip() for author in paper.iter("author")]
            yield {
                "id": _identifier(str(collection.get("id")), str(volume.get("id")), str(paper.get("id"))),
                "title": _text(paper, "title"),
                "abstract": _text(paper, "abstract"),
                "authors": "; ".join(authors),
                "year": year,
                "venue": venue,
            }


def write_papers(rows: Sequence[dict[str, str]], to: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with write_atomically(to) as part:
        pq.write_table(pa.table({name: [row[name] for row in rows] for name in COLUMNS}), part)


def _text(parent: Any, name: str) -> str:
    """Return the text of a child without its markup, on one line."""
    child = None if parent is None else parent.find(name)
    return "" if child is None else " ".join("".join(child.itertext()).split())


def _identifier(collection: str, volume: str, paper: str) -> str:
    """Return the Anthology's id: 2022.bionlp-1.1, but P18-1001 and W02-0101 before 2020."""
    if collection[:1].isdigit():
        return f"{collection}-{volume}.{paper}"
    many_volumes = collection.startswith("W") or collection == "C69" or (collection == "D19" and int(volume) >= 5)
    width = 2 if many_volumes else 3
    return f"{collection}-{volume.zfill(4 - width)}{paper.zfill(width)}"
