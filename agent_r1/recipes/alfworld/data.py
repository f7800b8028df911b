"""The released ALFWorld games (Shridhar et al., 2021): 3,553 to train on, 140 in rooms seen there, 134 in other rooms.

`agent-r1 data recipe alfworld` fetches the official archive and puts what the engine needs into one SQLite file, from
which a single game is read in a millisecond, by any number of processes. A folder with the released tree
(`.../train/TASK/TRIAL/game.tw-pddl`) or with an archive of it (.zip, .tar.xz, ...) is read as it is, wherever it
stands; the SQLite file made of it is kept in the data directory.

A game is named SPLIT/TASK/TRIAL, and the games of a split come in the order of the hashes of their names: the same on
every machine, and the first n of them are a fair sample.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
import tarfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

from agent_r1.errors import ConfigError, DataError, did_you_mean
from agent_r1.recipes.alfworld.game import TASK_TYPES, Game, read_game
from agent_r1.tasks.download import data_dir, fetch

Say = Callable[[str], None]

FOLDER = "alfworld"  # of the data directory
FILE = "games.sqlite"
RELEASED = "game.tw-pddl"
SOURCE = "https://github.com/alfworld/alfworld/releases/download/0.4.0/json_2.1.2_tw-pddl.zip"
SPLITS = {"train": 3553, "valid_train": 200, "valid_seen": 140, "valid_unseen": 134}
# The one PDDL domain and the one grammar, without the sentence of the task, that `engine.py` knows.
DOMAIN = "0af55e7f92d1"
GRAMMAR = "063d42f07581"
CONTENT = "279cde4f9c17"  # `content_hash` of all 4,027 games of the copy that this recipe's numbers are of
GAMES_KEPT = 512  # parsed ones, per process; some 40 kB each

_TASK = re.compile(r"Your task is to: [^\"]*")
_TABLE = """CREATE TABLE games (
    name TEXT PRIMARY KEY, split TEXT, rank TEXT, task TEXT, walkthrough TEXT, problem BLOB
) WITHOUT ROWID"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A game, but for its world."""

    name: str
    task: str
    walkthrough: tuple[str, ...]  # by a planner that knew where everything is

    @property
    def task_type(self) -> str:
        return task_type_of(self.name)


def task_type_of(name: str) -> str:
    return name.split("/")[1].split("-")[0]


def entries(split: str, path: str | None) -> list[Entry]:
    """The games of a split in their fixed order: from the folder or archive `path`, or from what was fetched."""
    if split not in SPLITS:
        raise ConfigError(f"ALFWorld has no split {split!r}.{did_you_mean(split, SPLITS)}")
    with _open(games_file(path)) as games:
        found = games.execute("SELECT name, task, walkthrough FROM games WHERE split = ? ORDER BY rank", (split,))
        return [Entry(name=name, task=task, walkthrough=tuple(json.loads(steps))) for name, task, steps in found]


@lru_cache(maxsize=GAMES_KEPT)
def load_game(file: str, name: str) -> Game:
    """One game of a file that `games_file` named."""
    with _open(Path(file)) as games:
        found = games.execute("SELECT problem, task FROM games WHERE name = ?", (name,)).fetchone()
    if found is None:
        raise DataError(f"{file} has no game {name!r}")
    return read_game(zlib.decompress(found[0]).decode(), found[1])


def games_file(path: str | None) -> Path:
    """The SQLite file of the games: made of what is at `path`, or fetched, if it is not there yet."""
    if path is None:
        folder = data_dir(FOLDER)
        if not (folder / FILE).is_file():
            prepare(folder, lambda line: None)
        return folder / FILE
    given = Path(path).expanduser()
    if (given / FILE).is_file():
        return given / FILE
    source = _source_in(given)
    if source is None:
        raise DataError(
            f"data.path={path!r} has no ALFWorld games: neither {FILE}, nor a tree of {RELEASED}, nor one archive of it"
        )
    made = data_dir(FOLDER) / f"{_signature(source)}.sqlite"
    if not made.is_file():
        build(source, made)
    return made


def prepare(directory: Path, report: Say) -> None:
    """Fetch the official archive, unless it or a tree of games is in `directory`, and make the SQLite file of it."""
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / FILE
    if not file.is_file():
        source = _source_in(directory) or fetch(
            SOURCE, directory / SOURCE.rpartition("/")[2], sha256=None, report=report
        )
        build(source, file)
    counts = _counts(file)
    for split, count in SPLITS.items():
        report(f"{split}: {counts[split]:,} games" + ("" if counts[split] == count else f", {count:,} were expected"))
    digest = content_hash(file)
    if digest == CONTENT:
        report(f"content {digest}: the very games that the results of this recipe are of")
    else:
        report(
            f"content {digest}, not {CONTENT}: these games differ in some text from those that the results of this "
            "recipe are of; compare numbers with care"
        )


def content_hash(file: Path) -> str:
    """Of the worlds, tasks and walkthroughs of all games, by name."""
    digest = sha256()
    with _open(file) as games:
        for name, task, steps, problem in games.execute(
            "SELECT name, task, walkthrough, problem FROM games ORDER BY name"
        ):
            digest.update(json.dumps([name, task, steps, _short(zlib.decompress(problem))]).encode())
    return digest.hexdigest()[:12]


def build(source: Path, to: Path) -> None:
    """Write the SQLite file of the solvable games of the six kinds in `source`, all or nothing."""
    to.parent.mkdir(parents=True, exist_ok=True)
    part = to.with_name(f".{to.name}.{os.getpid()}.part")
    part.unlink(missing_ok=True)
    try:
        games = sqlite3.connect(part)
        games.execute(_TABLE)
        games.executemany("INSERT OR REPLACE INTO games VALUES (?, ?, ?, ?, ?, ?)", _records(source))
        games.commit()
        games.close()
        if not any(_counts(part).values()):
            raise DataError(f"{source} has no solvable game in a folder SPLIT/TASK/TRIAL/{RELEASED}")
        part.replace(to)
    finally:
        part.unlink(missing_ok=True)


def released(source: Path) -> Iterator[tuple[str, bytes]]:
    """Name and content of every released game: of a tree at any depth, of a .zip, or of a .tar of any compression."""
    if source.is_dir():
        for file in sorted(source.rglob(RELEASED)):
            yield from _named(PurePosixPath(file.as_posix()), file.read_bytes)
    elif source.suffix == ".zip":
        with zipfile.ZipFile(source) as archive:
            for name in archive.namelist():
                yield from _named(PurePosixPath(name), partial(archive.read, name))
    else:
        with tarfile.open(source) as archive:
            for member in archive:
                opened = archive.extractfile(member) if member.isfile() else None
                if opened is not None:
                    yield from _named(PurePosixPath(member.name), opened.read)


def _named(path: PurePosixPath, read: Callable[[], bytes]) -> Iterator[tuple[str, bytes]]:
    if path.name == RELEASED and len(path.parts) >= 4 and path.parts[-4] in SPLITS:
        yield "/".join(path.parts[-4:-1]), read()


def _records(source: Path) -> Iterator[tuple[str, str, str, str, str, bytes]]:
    for name, content in released(source):
        try:
            game = json.loads(content)
            # As the official loader: what was sliced or has a movable receptacle is not of the six kinds.
            if task_type_of(name) not in TASK_TYPES or "Sliced" in name or "movable" in name or not game["solvable"]:
                continue
            task = check_rules(game, name)
            problem = zlib.compress(game["pddl_problem"].encode())
            steps = json.dumps(game["walkthrough"])
        except (KeyError, ValueError, AttributeError) as error:
            raise DataError(f"{name} of {source} is not an ALFWorld game: {error!r}") from error
        yield name, name.split("/")[0], sha256(name.encode()).hexdigest(), task, steps, problem


def check_rules(game: dict[str, Any], name: str) -> str:
    """The sentence of the task; `DataError` if the game has other rules or other words than the engine knows."""
    found = _TASK.search(game["grammar"])
    if found is None:
        raise DataError(f"{name}: its grammar says no task")
    rules = {"domain": game["pddl_domain"], "grammar": game["grammar"].replace(found.group(), "")}
    for what, text, known in (("domain", rules["domain"], DOMAIN), ("grammar", rules["grammar"], GRAMMAR)):
        if _short(text.encode()) != known:
            raise DataError(
                f"{name}: its {what} has hash {_short(text.encode())}, and the engine knows {known} alone: "
                "another release, whose rules or words differ (those before 0.4.0 say 'put' where this one says 'move')"
            )
    return found.group()


def _source_in(given: Path) -> Path | None:
    """A tree, an archive, or a folder with one archive in it."""
    if given.is_file():
        return given
    if next(given.glob(f"**/{RELEASED}"), None) is not None:
        return given
    archives = [file for file in sorted(given.glob("*")) if file.suffix == ".zip" or ".tar" in file.suffixes]
    return archives[0] if len(archives) == 1 else None


def _signature(source: Path) -> str:
    """Changes when the files do."""
    files = [source] if source.is_file() else sorted(source.rglob(RELEASED))
    stats = [file.stat() for file in files]
    seen = [str(source.resolve()), len(files), sum(s.st_size for s in stats), max(s.st_mtime_ns for s in stats)]
    return sha256(json.dumps(seen).encode()).hexdigest()[:12]


def _counts(file: Path) -> Counter[str]:
    with _open(file) as games:
        return Counter(dict(games.execute("SELECT split, COUNT(*) FROM games GROUP BY split").fetchall()))


@contextmanager
def _open(file: Path) -> Iterator[sqlite3.Connection]:
    """A connection for one question: cheap, and nothing that a forked process could inherit."""
    games = sqlite3.connect(f"file:{quote(str(file))}?mode=ro&immutable=1", uri=True)
    try:
        yield games
    except sqlite3.Error as error:
        raise DataError(f"{file} is not a file of ALFWorld games ({error}); remove it, and it is made anew") from error
    finally:
        games.close()


def _short(content: bytes) -> str:
    return sha256(content).hexdigest()[:12]
