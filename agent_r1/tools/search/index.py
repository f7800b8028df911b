"""One index: a folder with passages, what ranks them, and a manifest that says what is in it.

    index = Index.build(passages, "index", lexical=LexicalSettings())  # or Index.open("index")
    [hits] = index.search(["Who founded the band?"], top_k=5)

A folder is built beside its place and moved there when it is whole, so one that can be opened is complete: a build that
was interrupted leaves nothing behind that looks like an index. Everything large is mapped into memory, so the processes
of a machine share it. Ways to search: `lexical`, `dense`, and `hybrid`, which needs both.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, Literal, Self, get_args

from agent_r1.data.files import read_json
from agent_r1.errors import AgentR1Error, ConfigError, DataError, did_you_mean
from agent_r1.tools.search.corpus import Corpus, Passage, write_corpus
from agent_r1.tools.search.dense import DenseRanker, DenseSettings, EncoderSettings
from agent_r1.tools.search.hybrid import DEPTH, fuse
from agent_r1.tools.search.lexical import LexicalRanker, LexicalSettings, Ranking
from agent_r1.tools.search.progress import Report

FORMAT = 1  # of the folder; older and newer ones are built again
MANIFEST = "manifest.json"
PASSAGES = "passages.arrow"

Kind = Literal["lexical", "dense", "hybrid"]
KINDS: tuple[Kind, ...] = get_args(Kind)
RANKERS: tuple[Kind, ...] = ("lexical", "dense")  # what an index can hold


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """One passage found."""

    passage: Passage
    score: float  # comparable within one result only


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a folder claims to hold."""

    num_passages: int
    corpus_sha256: str  # of titles and texts, in order
    lexical: LexicalSettings | None
    dense: DenseSettings | None
    files: dict[str, int] = field(default_factory=dict)  # bytes of every other file

    @property
    def kinds(self) -> list[Kind]:
        """The ways this index can be searched."""
        held: list[Kind] = [kind for kind in RANKERS if getattr(self, kind) is not None]
        return [*held, "hybrid"] if len(held) == len(RANKERS) else held

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """The manifest of a folder whose files are all there, whole; DataError or ConfigError otherwise."""
        path = directory / MANIFEST
        if not path.is_file():
            raise ConfigError(f"{directory} is no search index: it has no {MANIFEST}. {how_to_build(directory)}")
        try:
            stored = read_json(path.read_text(encoding="utf-8"))
            version = stored.pop("format")
        except (ValueError, KeyError, AttributeError) as error:
            raise DataError(f"{path} cannot be read: {error!r}. {how_to_build(directory)}") from error
        if version != FORMAT:
            raise DataError(
                f"{directory} has the index format {version}, this version reads {FORMAT}. {how_to_build(directory)}"
            )
        try:
            manifest = cls(**stored | {"lexical": _lexical(stored["lexical"]), "dense": _dense(stored["dense"])})
        except (TypeError, KeyError) as error:
            raise DataError(f"{path} is not a manifest: {error!r}. {how_to_build(directory)}") from error
        manifest._check_files(directory)
        return manifest

    def write(self, directory: Path) -> None:
        text = json.dumps({"format": FORMAT, **asdict(self)}, indent=1, allow_nan=False)
        (directory / MANIFEST).write_text(text + "\n", encoding="utf-8")

    def _check_files(self, directory: Path) -> None:
        for name, size in self.files.items():
            path = directory / name
            found = path.stat().st_size if path.is_file() else None
            if found != size:
                state = "is missing" if found is None else f"has {found:,} bytes instead of {size:,}"
                raise DataError(f"the index {directory} is damaged: {name} {state}. {how_to_build(directory)}")


class Index:
    """An open index, for any number of threads. What ranks is loaded when it is first asked."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.directory, self.manifest = directory, manifest
        self.corpus = Corpus.open(directory / PASSAGES)
        if len(self.corpus) != manifest.num_passages:
            raise DataError(
                f"the index {directory} was built for {manifest.num_passages:,} passages and holds "
                f"{len(self.corpus):,}. {how_to_build(directory)}"
            )
        self._rankers: dict[str, LexicalRanker | DenseRanker] = {}
        self._loading = Lock()

    @classmethod
    def open(cls, directory: str | Path) -> Self:
        directory = Path(directory).expanduser()
        return cls(directory, Manifest.read(directory))

    @classmethod
    def build(
        cls,
        passages: Iterable[Passage],
        directory: str | Path,
        *,
        lexical: LexicalSettings | None = None,
        dense: DenseSettings | None = None,
        report: Report | None = None,
    ) -> Self:
        """Build the parts that are described; an index already at `directory` is replaced when the new one is whole."""
        if lexical is None and dense is None:
            raise ConfigError("an index needs at least one way to search: lexical, dense, or both")
        place = Path(directory).expanduser()
        if place.exists() and not (place / MANIFEST).is_file() and (not place.is_dir() or any(place.iterdir())):
            raise ConfigError(f"{place} exists and is no search index; choose another folder, or remove it")
        place.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{place.name}-building-", dir=place.parent))
        try:
            digest = write_corpus(passages, work / PASSAGES, report)
            corpus = Corpus.open(work / PASSAGES)
            if lexical is not None:
                LexicalRanker.build(corpus, len(corpus), work / "lexical", lexical, report)
            if dense is not None:
                DenseRanker.build(corpus, len(corpus), work / "dense", dense, report)
            Manifest(
                num_passages=len(corpus), corpus_sha256=digest, lexical=lexical, dense=dense, files=_sizes(work)
            ).write(work)
            work.chmod(0o755)  # as mkdir would have made it
            _move(work, place)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        return cls.open(place)

    @property
    def default_kind(self) -> Kind:
        """Hybrid where both parts are there, else the one that is. Which finds more depends on the passages."""
        return self.manifest.kinds[-1]

    def search(self, queries: Sequence[str], top_k: int, kind: Kind | None = None) -> list[list[Hit]]:
        """The best passages for each query, best first."""
        kind = check_kind(kind or self.default_kind, self.manifest, self.directory)
        if top_k < 1:
            raise ConfigError(f"top_k must be at least 1, got {top_k}")
        return [
            [Hit(passage=self.corpus[place], score=score) for place, score in ranking]
            for ranking in self._rank(queries, top_k, kind)
        ]

    def _rank(self, queries: Sequence[str], top_k: int, kind: Kind) -> list[Ranking]:
        if kind != "hybrid":
            return self._ranker(kind).rank(queries, top_k)
        lists = [self._ranker(name).rank(queries, max(DEPTH, top_k)) for name in RANKERS]
        return [fuse(rankings, top_k) for rankings in zip(*lists, strict=True)]

    def _ranker(self, kind: Kind) -> LexicalRanker | DenseRanker:
        with self._loading:
            if kind not in self._rankers:
                self._rankers[kind] = self._load(kind)
            return self._rankers[kind]

    def _load(self, kind: Kind) -> LexicalRanker | DenseRanker:
        folder, manifest = self.directory / kind, self.manifest
        if Manifest.read(self.directory) != manifest:
            raise DataError(f"the index {self.directory} was built again while it was open; open it again")
        try:
            if kind == "lexical":
                assert manifest.lexical is not None
                return LexicalRanker.open(folder, manifest.lexical)
            assert manifest.dense is not None
            return DenseRanker.open(folder, manifest.dense)
        except (OSError, ValueError, KeyError) as error:
            if isinstance(error, AgentR1Error):
                raise
            raise DataError(
                f"the index {self.directory} is damaged: {error!r}. {how_to_build(self.directory)}"
            ) from error


def check_kind(kind: str, manifest: Manifest, directory: Path) -> Kind:
    if kind not in KINDS:
        raise ConfigError(f"unknown kind of search {kind!r}.{did_you_mean(kind, KINDS)}")
    for known in manifest.kinds:
        if kind == known:
            return known
    raise ConfigError(
        f"the index {directory} can be searched by {', '.join(manifest.kinds)}, not by {kind}. "
        "Build it again with --kind lexical,dense"
    )


def how_to_build(directory: Path) -> str:
    return f"Build it: agent-r1 search build CORPUS --to {directory}"


def _sizes(directory: Path) -> dict[str, int]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.stat().st_size for path in files}


def _move(work: Path, place: Path) -> None:
    """Put the new folder in its place. Who has the old one open keeps it: its files live as long as needed."""
    if place.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{place.name}-replaced-", dir=place.parent))
        os.rename(place, old)
        os.rename(work, place)
        shutil.rmtree(old)
    else:
        os.rename(work, place)


def _lexical(stored: Any) -> LexicalSettings | None:
    return None if stored is None else LexicalSettings(**stored)


def _dense(stored: Any) -> DenseSettings | None:
    return None if stored is None else DenseSettings(**stored | {"encoder": EncoderSettings(**stored["encoder"])})
