"""An index: a folder with passages, rankers and a manifest.

    index = Index.build(passages, "index", lexical=LexicalSettings())  # or Index.open("index")
    [hits] = index.search(["Who founded the band?"], top_k=5)

A folder is built under a temporary name and moved into place when it is complete, so an interrupted build leaves
nothing that looks like an index. Large files are mapped into memory, so the processes of a machine share them. An index
is searched by `lexical`, `dense` or `hybrid`, which needs both rankers.
"""

from __future__ import annotations

import shutil
import uuid
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Annotated, Literal, Self, get_args

from pydantic import Field, TypeAdapter, ValidationError

from agent_r1.disk import write_atomically
from agent_r1.errors import AgentR1Error, ConfigError, DataError, at_least, did_you_mean
from agent_r1.tools.search.corpus import Corpus, Passage, Report, write_corpus
from agent_r1.tools.search.dense import DenseRanker, DenseSettings
from agent_r1.tools.search.lexical import LexicalRanker, LexicalSettings, Ranking

FORMAT = 1  # format of the folder; indexes of other formats must be rebuilt
MANIFEST = "manifest.json"
PASSAGES = "passages.arrow"

Kind = Literal["lexical", "dense", "hybrid"]
KINDS: tuple[Kind, ...] = get_args(Kind)
RANKERS: tuple[Kind, ...] = ("lexical", "dense")  # what an index can contain

RANK_OFFSET = 60  # the constant of reciprocal rank fusion, as in the paper
FUSION_DEPTH = 100  # ranks read of each ranking; passages further down in both hardly matter


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    passage: Annotated[Passage, Field(alias="document")]  # its name in `wire.py`
    score: float  # comparable only within one result


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a folder contains."""

    num_passages: int
    corpus_sha256: str  # hash of titles and texts, in order
    lexical: LexicalSettings | None
    dense: DenseSettings | None
    files: dict[str, int] = field(default_factory=dict)  # size in bytes of every other file
    format: int = FORMAT

    @property
    def kinds(self) -> list[Kind]:
        """The ways this index can be searched; the last is the default."""
        held: list[Kind] = [kind for kind in RANKERS if getattr(self, kind) is not None]
        return [*held, "hybrid"] if len(held) == len(RANKERS) else held

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Read the manifest and check that all files are complete."""
        path = directory / MANIFEST
        rebuild = f"Build it: agent-r1 search build CORPUS --to {directory}"
        if not path.is_file():
            recipes = "; the index of a recipe comes with its data: agent-r1 data recipe NAME"
            raise ConfigError(f"{directory} is not a search index: it has no {MANIFEST}. {rebuild}{recipes}")
        try:
            manifest = TypeAdapter(cls).validate_json(path.read_bytes())
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(map(str, problem["loc"]))
            raise DataError(f"{path} cannot be read: {where} {problem['msg']}. {rebuild}") from error
        if manifest.format != FORMAT:
            raise DataError(f"{directory} has index format {manifest.format}, expected {FORMAT}. {rebuild}")
        for name, size in manifest.files.items():
            found = (directory / name).stat().st_size if (directory / name).is_file() else None
            if found != size:
                state = "is missing" if found is None else f"has {found:,} bytes instead of {size:,}"
                raise DataError(f"the index {directory} is damaged: {name} {state}. {rebuild}")
        return manifest


class Index:
    """An open index, safe to use from several threads. Rankers are loaded on first use."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.directory, self.manifest = directory, manifest
        self.corpus = Corpus.open(directory / PASSAGES)
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
        """Build the rankers that have settings. Replaces an existing index once the new one is complete."""
        if lexical is None and dense is None:
            raise ConfigError("an index needs at least one ranker: lexical, dense, or both")
        place = Path(directory).expanduser()
        if place.exists() and not (place / MANIFEST).is_file() and (not place.is_dir() or any(place.iterdir())):
            raise ConfigError(f"{place} exists and is not a search index; choose another folder, or remove it")
        # Temporary folders, with names that `disk.remove_leftovers` recognises.
        new, old = (place.with_name(f".{place.name}.{uuid.uuid4().hex[:12]}.part") for _ in range(2))
        with write_atomically(new) as work:
            work.mkdir()
            digest = write_corpus(passages, work / PASSAGES, report)
            corpus = Corpus.open(work / PASSAGES)
            if lexical is not None:
                LexicalRanker.build(corpus, len(corpus), work / "lexical", lexical, report)
            if dense is not None:
                DenseRanker.build(corpus, len(corpus), work / "dense", dense, report)
            manifest = Manifest(
                num_passages=len(corpus), corpus_sha256=digest, lexical=lexical, dense=dense, files=_file_sizes(work)
            )
            (work / MANIFEST).write_bytes(TypeAdapter(Manifest).dump_json(manifest, indent=1))
        if place.exists():  # only now that the new index is on disk: writing it takes long, and may fail
            place.rename(old)  # processes that have it open keep its files until they close them
        new.rename(place)
        shutil.rmtree(old, ignore_errors=True)
        return cls.open(place)

    @property
    def default_kind(self) -> Kind:
        """Hybrid if the index has both rankers, else the one it has. Which finds more depends on the passages."""
        return self.manifest.kinds[-1]

    def search(self, queries: Sequence[str], top_k: int, kind: Kind | None = None) -> list[list[Hit]]:
        """Return the best passages for each query, best first."""
        kind = check_kind(kind or self.default_kind, self.manifest, self.directory)
        at_least(1, "a search", top_k=top_k)
        return [
            [Hit(passage=self.corpus[place], score=score) for place, score in ranking]
            for ranking in self._rank(queries, top_k, kind)
        ]

    def _rank(self, queries: Sequence[str], top_k: int, kind: Kind) -> list[Ranking]:
        if kind != "hybrid":
            return self._ranker(kind).rank(queries, top_k)
        lists = [self._ranker(name).rank(queries, max(FUSION_DEPTH, top_k)) for name in RANKERS]
        return [fuse(rankings, top_k) for rankings in zip(*lists, strict=True)]

    def _ranker(self, kind: Kind) -> LexicalRanker | DenseRanker:
        with self._loading:
            if kind not in self._rankers:
                if Manifest.read(self.directory) != self.manifest:
                    raise DataError(f"the index {self.directory} was rebuilt while it was open; open it again")
                settings = getattr(self.manifest, kind)
                ranker = LexicalRanker if kind == "lexical" else DenseRanker
                try:
                    self._rankers[kind] = ranker(self.directory / kind, settings)
                except AgentR1Error:
                    raise
                except (OSError, ValueError, KeyError) as error:
                    raise DataError(f"the index {self.directory} is damaged ({error!r}): build it again") from error
            return self._rankers[kind]


def fuse(rankings: Iterable[Ranking], top_k: int) -> Ranking:
    """Reciprocal rank fusion (Cormack et al., SIGIR 2009): score(p) = sum over rankings of 1 / (60 + rank of p).

    Ranks start at 1. A ranking that does not contain a passage adds nothing to its score.
    """
    scores: defaultdict[int, float] = defaultdict(float)
    for ranking in rankings:
        for rank, (place, _) in enumerate(ranking, start=1):
            scores[place] += 1 / (RANK_OFFSET + rank)
    return sorted(scores.items(), key=lambda item: (-item[1], item[0]))[:top_k]


def check_kind(kind: str, manifest: Manifest, directory: Path) -> Kind:
    if kind not in KINDS:
        raise ConfigError(f"unknown kind of search {kind!r}.{did_you_mean(kind, KINDS)}")
    for known in manifest.kinds:
        if kind == known:
            return known
    raise ConfigError(
        f"the index {directory} supports {', '.join(manifest.kinds)}, not {kind}. Build it with --kind lexical,dense"
    )


def _file_sizes(directory: Path) -> dict[str, int]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.stat().st_size for path in files}
