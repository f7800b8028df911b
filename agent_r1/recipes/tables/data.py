"""WikiTableQuestions (Pasupat and Liang, 2015): questions about 2,108 tables of Wikipedia, with answers.

`agent-r1 data recipe tables` downloads the repository at one commit, checks the files that are needed against their
hash, and keeps those. `data.path` may name a folder with that archive, or a clone of the repository.
"""

from __future__ import annotations

import csv
import io
import re
import tarfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from agent_r1.data.downloads import Report, fetch
from agent_r1.disk import write_atomically
from agent_r1.errors import ConfigError, DataError, did_you_mean
from agent_r1.recipes.tables.table import Table, make_table

FOLDER = "wikitablequestions"  # name of the data directory
ARCHIVE = "wtq.tar.xz"
COMMIT = "7d455a5a707b96341ef72aff9428749d443d8aa9"
URL = f"https://codeload.github.com/ppasupat/WikiTableQuestions/tar.gz/{COMMIT}"
# Hash of the names and contents of the files below. GitHub's archives themselves have no stable hash.
SHA256 = "fa3d69bdc9c2782ef961858a042674d89bfc5fdf1d401a5f589e5cc9ef123104"
SPLITS = {
    "train": "data/training.tsv",
    "test": "data/pristine-unseen-tables.tsv",  # the official test set: none of its tables is in train
    "dev_train": "data/random-split-1-train.tsv",  # four fifths of train, by table, for choosing settings
    "dev": "data/random-split-1-dev.tsv",  # the other fifth
}
ESCAPES = {"n": "\n", "p": "|", "\\": "\\"}  # in questions and answers, after a backslash
FIELDS = ["id", "utterance", "context", "targetValue"]

Read = Callable[[str], bytes]  # the content of a file of the repository


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A question with its table and its answer."""

    key: str
    text: str
    table: str  # the name of its file
    answers: tuple[str, ...]


def prepare(directory: Path, report: Report) -> None:
    """Download the archive, unless it is there."""
    to = directory / ARCHIVE
    if not to.is_file():
        fetched = fetch(URL, directory / f"{COMMIT}.tar.gz", sha256=None, report=report)
        files = needed_files(fetched)
        if (digest := content_hash(files)) != SHA256:
            raise DataError(f"the files of {URL} have the sha256 {digest}, but {SHA256} was expected: they changed")
        write_archive(files, to)
        fetched.unlink()
    for split in SPLITS:
        report(f"{split}: {len(questions(split, opened(directory))):,} questions")


def needed_files(archive: Path) -> dict[str, bytes]:
    """The tables and questions in an archive of the repository, by name. A folder around everything is ignored."""
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(archive) as files:
            for member in files:
                taken = files.extractfile(member) if member.isfile() else None
                name = _name_in_repository(member.name)
                if taken is not None and name is not None:
                    found[name] = taken.read()
    except (OSError, EOFError, tarfile.TarError) as error:
        raise DataError(f"{archive} cannot be read: {error}. Delete it, and run agent-r1 data recipe tables") from error
    return found


def _name_in_repository(path: str) -> str | None:
    parts = path.split("/")
    for start, name in enumerate(parts):
        inside = "/".join(parts[start:])
        if inside in SPLITS.values() or (name == "csv" and inside.endswith(".csv")):
            return inside
    return None


def content_hash(files: Mapping[str, bytes]) -> str:
    digest = sha256()
    for name, content in sorted(files.items()):
        digest.update(f"{name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def write_archive(files: Mapping[str, bytes], to: Path) -> None:
    with write_atomically(to) as part, tarfile.open(part, "w:xz") as archive:
        for name, content in sorted(files.items()):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def opened(folder: Path) -> Read:
    """Return a function that reads the files, from the archive in the folder or from a clone of the repository."""
    if (folder / SPLITS["train"]).is_file():
        return lambda name: _read_file(folder, name)
    if not (folder / ARCHIVE).is_file():
        raise DataError(
            f"there is neither {ARCHIVE} nor {SPLITS['train']} in {folder}. Run agent-r1 data recipe tables, or set "
            "data.path to a folder that has one of them"
        )
    files = needed_files(folder / ARCHIVE)

    def read(name: str) -> bytes:
        if name not in files:
            raise DataError(f"{folder / ARCHIVE} has no {name}")
        return files[name]

    return read


def _read_file(folder: Path, name: str) -> bytes:
    try:
        return (folder / name).read_bytes()
    except OSError as error:
        raise DataError(f"{folder / name} cannot be read: {error}") from error


def questions(split: str, read: Read) -> list[Asked]:
    """Return the questions of a split, in the order of the file."""
    if split not in SPLITS:
        raise ConfigError(f"unknown split {split!r}.{did_you_mean(split, SPLITS)}")
    return list(_questions(SPLITS[split], read))


def _questions(name: str, read: Read) -> Iterator[Asked]:
    header, *lines = _text(name, read).removesuffix("\n").split("\n")
    if header.split("\t") != FIELDS:
        raise DataError(f"{name} has the columns {header[:100]!r}, expected {FIELDS}")
    for number, line in enumerate(lines, 2):
        fields = line.split("\t")
        if len(fields) != len(FIELDS):
            raise DataError(f"{name} line {number} has {len(fields)} fields, expected {len(FIELDS)}")
        key, text, table, answers = fields
        items = tuple(map(_unescape, answers.split("|")))
        yield Asked(key=key, text=" ".join(_unescape(text).split()), table=table, answers=items)


def _unescape(text: str) -> str:
    return re.sub(r"\\([np\\])", lambda found: ESCAPES[found[1]], text)


def read_table(name: str, read: Read) -> Table:
    lines = csv.reader(io.StringIO(_text(name, read), newline=""), doublequote=False, escapechar="\\")
    try:
        header, *rows = list(lines)
        return make_table(header, rows)
    except (csv.Error, ValueError) as error:  # DataError is a ValueError, too
        raise DataError(f"{name} is not a table: {error}") from error


def _text(name: str, read: Read) -> str:
    try:
        return read(name).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{name} is not UTF-8: {error}") from error
