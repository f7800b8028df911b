"""The released ALFWorld games (Shridhar et al., 2021): 3,553 for training, 140 in the same rooms, 134 in unseen rooms.

`agent-r1 data recipe alfworld` downloads the official archive and writes the parts that the engine needs to one SQLite
file. Any number of processes can read games from it, in a millisecond each. `data.path` also takes a folder with the
released tree (`.../train/TASK/TRIAL/game.tw-pddl`) or with an archive of it (.zip, .tar.xz, ...); its SQLite file is
kept in the data directory.

A game is named SPLIT/TASK/TRIAL. The games of a split are ordered by the hashes of their names: the order is the same
on every machine, and the first n games are a fair sample.
"""

from __future__ import annotations

import json
import logging
import lzma
import re
import sqlite3
import tarfile
import tempfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

from agent_r1.data.downloads import Report, data_dir, fetch
from agent_r1.data.files import read_json
from agent_r1.errors import ConfigError, DataError, did_you_mean
from agent_r1.recipes.alfworld.game import TASK_TYPES, Game, read_game

logger = logging.getLogger(__name__)

FOLDER = "alfworld"  # name of the data directory
FILE = "games.sqlite"
RELEASED = "game.tw-pddl"
SOURCE = "https://github.com/alfworld/alfworld/releases/download/0.4.0/json_2.1.2_tw-pddl.zip"
SPLITS = {"train": 3553, "valid_train": 200, "valid_seen": 140, "valid_unseen": 134}
# Hashes of the PDDL domain and of the grammar (without the task sentence) that `engine.py` implements.
DOMAIN = "0af55e7f92d1"
GRAMMAR = "063d42f07581"
CONTENT = "279cde4f9c17"  # `content_hash` of the 4,027 games behind this recipe's published results
FORM = 2  # raise it when the SQLite format changes, so that older files are not reused
GAMES_KEPT = 512  # parsed games cached per process, about 40 kB each

_TASK = re.compile(r"Your task is to: [^\"]*")
_TABLE = """CREATE TABLE games (
    name TEXT PRIMARY KEY, split TEXT, rank TEXT, task TEXT, walkthrough TEXT, world TEXT, problem BLOB
) WITHOUT ROWID"""
_UNREADABLE = (OSError, EOFError, lzma.LZMAError, zlib.error, zipfile.BadZipFile, tarfile.TarError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A game without its PDDL problem, which is identified by its hash."""

    name: str
    task: str
    walkthrough: tuple[str, ...]  # written by a planner with full knowledge
    world: str  # `short_hash` of the PDDL problem

    @property
    def task_type(self) -> str:
        return task_type_of(self.name)


def task_type_of(name: str) -> str:
    return name.split("/")[1].split("-")[0]


def entries(split: str, file: Path) -> list[Entry]:
    """Return the games of a split in their fixed order, from a file that `games_file` returned."""
    if split not in SPLITS:
        raise ConfigError(f"ALFWorld has no split {split!r}.{did_you_mean(split, SPLITS)}")
    with _open(file) as games:
        found = games.execute(
            "SELECT name, task, walkthrough, world FROM games WHERE split = ? ORDER BY rank", (split,)
        ).fetchall()
    return [
        Entry(name=name, task=task, walkthrough=tuple(json.loads(steps)), world=world)
        for name, task, steps, world in found
    ]


@lru_cache(maxsize=GAMES_KEPT)
def load_game(file: str, name: str, world: str) -> Game:
    """Read one game from a file that `games_file` returned. Raises `DataError` if its hash differs."""
    with _open(Path(file)) as games:
        found = games.execute("SELECT problem, task FROM games WHERE name = ?", (name,)).fetchone()
    if found is None:
        raise DataError(f"{file} has no game {name!r}")
    problem = zlib.decompress(found[0])
    if short_hash(problem) != world:
        raise DataError(
            f"game {name!r} of {file} has world {short_hash(problem)}, and the row asks for {world}: the games have "
            "changed since the rows were created: create them again"
        )
    return read_game(problem.decode(), found[1])


def games_file(path: str | None) -> Path:
    """Return the SQLite file of the games, first creating it from `path` or from the download if necessary."""
    file = _fetched() if path is None else _made_of(path)
    _warn_of_other_games(file)
    return file


def _fetched() -> Path:
    folder = data_dir(FOLDER)
    if not (folder / FILE).is_file():
        prepare(folder, lambda line: None)
    return folder / FILE


def _made_of(path: str) -> Path:
    given = Path(path).expanduser()
    if not given.exists():
        raise DataError(f"data.path={path!r}: there is no such folder or file")
    if (given / FILE).is_file():
        return given / FILE
    source = source_in(given)
    if source is None:
        what = "is not an archive, or a damaged one" if given.is_file() else "has no ALFWorld games"
        raise DataError(
            f"data.path={path!r} {what}: expected a folder with {FILE}, an unpacked {RELEASED}, or its archive"
        )
    made = data_dir(FOLDER) / f"{_signature(source)}.sqlite"
    if not made.is_file():
        build(source, made)
    return made


@cache  # warn only once
def _warn_of_other_games(file: Path) -> None:
    digest = content_hash(file)
    if digest != CONTENT:
        logger.warning("%s: %s", file, _other_games(digest))


def _other_games(digest: str) -> str:
    return (
        f"content {digest}, not {CONTENT}: these games differ in some text from those of this recipe's "
        "published results; compare numbers with care"
    )


def prepare(directory: Path, report: Report) -> None:
    """Download the official archive, unless `directory` has it or a tree of games, and write the SQLite file."""
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / FILE
    if not file.is_file():
        source = source_in(directory) or fetch(
            SOURCE, directory / SOURCE.rpartition("/")[2], sha256=None, report=report
        )
        build(source, file)
    counts = count_games(file)
    for split, count in SPLITS.items():
        report(f"{split}: {counts[split]:,} games" + ("" if counts[split] == count else f", {count:,} were expected"))
    digest = content_hash(file)
    known = f"content {digest}: the games of this recipe's published results"
    report(known if digest == CONTENT else _other_games(digest))


def content_hash(file: Path) -> str:
    """Hash the problems, tasks and walkthroughs of all games, by name."""
    digest = sha256()
    with _open(file) as games:
        for game in games.execute("SELECT name, task, walkthrough, world FROM games ORDER BY name"):
            digest.update(json.dumps(game).encode())
    return digest.hexdigest()[:12]


def build(source: Path, to: Path) -> None:
    """Atomically write the SQLite file of the solvable games of the six kinds in `source`."""
    to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{to.name}.", suffix=".part", dir=to.parent) as folder:
        part = Path(folder) / FILE
        games = sqlite3.connect(part)
        try:
            games.execute(_TABLE)
            games.executemany("INSERT OR REPLACE INTO games VALUES (?, ?, ?, ?, ?, ?, ?)", _records(source))
            games.commit()
        finally:
            games.close()
        if not any(count_games(part).values()):
            raise DataError(f"{source} has no solvable game in a folder SPLIT/TASK/TRIAL/{RELEASED}")
        part.replace(to)


def released(source: Path) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of every released game from a tree at any depth, a .zip, or a .tar of any compression."""
    try:
        yield from _files_in(source)
    except _UNREADABLE as error:
        advice = "" if source.is_dir() else ": delete it and download it again"
        raise DataError(f"{source} cannot be read ({type(error).__name__}: {error}){advice}") from error


def _files_in(source: Path) -> Iterator[tuple[str, bytes]]:
    if source.is_dir():
        for file in sorted(source.rglob(RELEASED)):
            yield from _named(PurePosixPath(file.as_posix()), file.read_bytes)
    elif tarfile.is_tarfile(source):
        with tarfile.open(source) as archive:
            for member in archive:
                opened = archive.extractfile(member) if member.isfile() else None
                if opened is not None:
                    yield from _named(PurePosixPath(member.name), opened.read)
    else:
        with zipfile.ZipFile(source) as archive:
            for name in archive.namelist():
                yield from _named(PurePosixPath(name), partial(archive.read, name))


def _named(path: PurePosixPath, read: Callable[[], bytes]) -> Iterator[tuple[str, bytes]]:
    if path.name == RELEASED and len(path.parts) >= 4 and path.parts[-4] in SPLITS:
        yield "/".join(path.parts[-4:-1]), read()


def _records(source: Path) -> Iterator[tuple[str, str, str, str, str, str, bytes]]:
    for name, content in released(source):
        try:
            game = read_json(content.decode("utf-8"))
            # Like the official loader, skip games with sliced objects and games outside the six kinds.
            if task_type_of(name) not in TASK_TYPES or "Sliced" in name or not game["solvable"]:
                continue
            task = check_rules(game, name)
            problem, steps = game["pddl_problem"].encode(), json.dumps(game["walkthrough"])
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise DataError(f"{name} of {source} is not an ALFWorld game: {error!r}") from error
        split, rank = name.split("/")[0], sha256(name.encode()).hexdigest()
        yield name, split, rank, task, steps, short_hash(problem), zlib.compress(problem)


def check_rules(game: dict[str, Any], name: str) -> str:
    """Return the task sentence. Raises `DataError` if the game has rules or words that the engine does not
    implement."""
    found = _TASK.search(game["grammar"])
    if found is None:
        raise DataError(f"{name}: its grammar contains no task")
    rules = {"domain": game["pddl_domain"], "grammar": game["grammar"].replace(found.group(), "")}
    for what, text, known in (("domain", rules["domain"], DOMAIN), ("grammar", rules["grammar"], GRAMMAR)):
        if short_hash(text.encode()) != known:
            raise DataError(
                f"{name}: its {what} has hash {short_hash(text.encode())}, but the engine only supports {known}: "
                "another release with different rules or words (releases before 0.4.0 say 'put' instead of 'move')"
            )
    return found.group()


def source_in(given: Path) -> Path | None:
    """Resolve a tree, an archive, or a folder with one archive in it."""
    if given.is_file():
        return given if _is_archive(given) else None
    if next(given.glob(f"**/{RELEASED}"), None) is not None:
        return given
    archives = [file for file in sorted(given.glob("*")) if file.is_file() and _is_archive(file)]
    return archives[0] if len(archives) == 1 else None


def _is_archive(file: Path) -> bool:
    """Recognise an archive by its content, not by its name."""
    try:
        return tarfile.is_tarfile(file) or zipfile.is_zipfile(file)
    except _UNREADABLE:
        return False


def _signature(source: Path) -> str:
    """Return a digest that changes when the files change."""
    files = [source] if source.is_file() else sorted(source.rglob(RELEASED))
    stats = [file.stat() for file in files]
    seen = [FORM, str(source.resolve()), len(files), sum(s.st_size for s in stats), max(s.st_mtime_ns for s in stats)]
    return sha256(json.dumps(seen).encode()).hexdigest()[:12]


def count_games(file: Path) -> Counter[str]:
    with _open(file) as games:
        return Counter(dict(games.execute("SELECT split, COUNT(*) FROM games GROUP BY split").fetchall()))


@contextmanager
def _open(file: Path) -> Iterator[sqlite3.Connection]:
    """Open a connection for one query: cheap, and nothing for a forked process to inherit."""
    if not file.is_file():
        raise DataError(f"there is no file of ALFWorld games at {file}; run agent-r1 data recipe {FOLDER}")
    games = sqlite3.connect(f"file:{quote(str(file))}?mode=ro&immutable=1", uri=True)
    try:
        yield games
    except sqlite3.Error as error:
        raise DataError(f"{file} is not a file of ALFWorld games ({error}): delete it to rebuild it") from error
    finally:
        games.close()


def short_hash(content: bytes) -> str:
    return sha256(content).hexdigest()[:12]
