"""Papers on this machine: a folder with a search index and a table of authors, venues, years and references.

`expand` follows references in both directions. For a paper without any it returns related papers instead: papers
with similar text, by the same authors, or of the same venue with similar text, fused by rank.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from agent_r1.data.downloads import Report
from agent_r1.disk import write_atomically
from agent_r1.errors import ConfigError, DataError
from agent_r1.guard import call
from agent_r1.recipes.paper_search.papers import Paper, PaperSource, Related, SourceError
from agent_r1.tools.search.corpus import Passage
from agent_r1.tools.search.dense import DenseSettings
from agent_r1.tools.search.index import MANIFEST, Index, Kind, check_kind, fuse
from agent_r1.tools.search.lexical import LexicalSettings, Words
from agent_r1.tools.search.tool import find_index

INDEX, TABLE, WORDS = "index", "papers.parquet", "words.parquet"
NEIGHBOURS = 50  # passages with similar text that `expand` looks at
QUERY_WORDS = 60  # words of a paper's text with which similar papers are searched
MAX_CACHED = 20_000  # searches: the attempts of a group repeat each other
CITED, SIMILAR = "cites or is cited by it", "no citations known: similar text, same authors or venue"

_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("title", pa.string()),
        ("abstract", pa.string()),
        ("year", pa.int32()),
        ("authors", pa.list_(pa.string())),
        ("venue", pa.string()),
        ("references", pa.list_(pa.string())),
    ]
)
_OPENING = Lock()


def build_library(
    papers: Iterable[Paper], folder: Path, *, dense: DenseSettings | None = None, report: Report | None = None
) -> LocalPapers:
    """Write the folder of a local source. The table comes last, so a folder that has it is complete."""
    kept = list(papers)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / TABLE).unlink(missing_ok=True)
    # Titles are unique, so that no two passages are equal and places in the index are places in the table.
    passages = (Passage(passage_id=paper.paper_id, title=paper.title, text=paper.abstract) for paper in kept)
    index = Index.build(passages, folder / INDEX, lexical=LexicalSettings(), dense=dense, report=report)
    if len(index.corpus) != len(kept):
        raise DataError(f"{len(kept) - len(index.corpus)} papers have the title and abstract of another: merge them")
    columns = {
        "id": [paper.paper_id for paper in kept],
        "title": [paper.title for paper in kept],
        "abstract": [paper.abstract for paper in kept],
        "year": [paper.year for paper in kept],
        "authors": [list(paper.authors) for paper in kept],
        "venue": [paper.venue for paper in kept],
        "references": [list(paper.references) for paper in kept],
    }
    _write(_count_stems(kept), folder / WORDS)
    _write(pa.table(columns, schema=_SCHEMA), folder / TABLE)
    return open_library(folder)


def _count_stems(papers: Iterable[Paper]) -> pa.Table:
    """Count the papers in which each stem occurs, for stems that occur in more than one."""
    split, counts = Words(stem=True), Counter[str]()
    for paper in papers:
        counts.update(set(split(f"{paper.title} {paper.abstract}")))
    repeated = {stem: count for stem, count in counts.items() if count > 1}
    return pa.table({"stem": list(repeated), "papers": list(repeated.values())})


def _write(table: pa.Table, to: Path) -> None:
    with write_atomically(to) as part:
        pq.write_table(table, part)


def open_library(folder: str | Path, kind: Kind | None = None) -> LocalPapers:
    """Open once per process, and again after it was rebuilt. A relative folder is also looked up in the data folder."""
    place = find_index(folder)
    if not (place / TABLE).is_file():
        raise ConfigError(
            f"there are no papers in {place}. Fetch them: agent-r1 data recipe paper_search, or name a folder that it "
            "has filled"
        )
    with _OPENING:
        return _open(place, (place / TABLE).stat().st_mtime_ns, (place / INDEX / MANIFEST).stat().st_mtime_ns, kind)


@lru_cache(maxsize=8)
def _open(place: Path, table_ns: int, index_ns: int, kind: Kind | None) -> LocalPapers:
    return LocalPapers(place, kind)


class LocalPapers(PaperSource):
    """Immutable, so all episodes and threads share it."""

    def __init__(self, folder: Path, kind: Kind | None = None) -> None:
        self.folder = folder
        self._index = Index.open(folder / INDEX)
        self._kind = check_kind(kind or self._index.default_kind, self._index.manifest, folder / INDEX)
        try:
            self._table = pq.read_table(folder / TABLE, schema=_SCHEMA)
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{folder / TABLE} cannot be read: {error}. Build it again") from error
        if len(self._table) != len(self._index.corpus):
            raise DataError(f"{folder}: the index has other papers than {TABLE}. Build both again")
        self.find = lru_cache(MAX_CACHED)(self._find)
        self.related = lru_cache(MAX_CACHED)(self._related)

    def __len__(self) -> int:
        return len(self._table)

    def __contains__(self, paper_id: object) -> bool:
        return paper_id in self._places

    def __getitem__(self, place: int) -> Paper:
        row: dict[str, Any] = {name: self._table[name][place].as_py() for name in _SCHEMA.names}
        return Paper(
            paper_id=row["id"],
            title=row["title"],
            abstract=row["abstract"],
            year=row["year"],
            authors=tuple(row["authors"]),
            venue=row["venue"],
            references=tuple(row["references"]),
        )

    async def search(self, query: str, limit: int) -> Sequence[Paper]:
        found: Sequence[Paper] = await call(self.find, query, limit)
        return found

    async def expand(self, paper: Paper, limit: int) -> Related:
        found: Related = await call(self.related, paper.paper_id, limit)
        return found

    def weights(self, words: Sequence[str]) -> list[float]:
        return [self._rarity(word) for word in words]

    def rank(self, query: str, limit: int) -> list[int]:
        """Return the places of the best matches, best first."""
        [hits] = self._index.search([query], limit, self._kind)
        return [self._places[hit.passage.passage_id] for hit in hits]

    @property
    def titles(self) -> list[str]:
        titles: list[str] = self._table["title"].to_pylist()
        return titles

    def get(self, paper_id: str) -> Paper:
        """Return the paper. Raises SourceError."""
        return self[self._place(paper_id)]

    def references(self, paper_id: str) -> list[Paper]:
        """Return the papers that it cites, if the library has them."""
        return [self[self._places[each]] for each in self.get(paper_id).references if each in self._places]

    def citations(self, paper_id: str) -> list[Paper]:
        """Return the papers that cite it."""
        self._place(paper_id)
        return [self[place] for place in self._citing.get(paper_id, ())]

    def similar(self, paper_id: str, limit: int) -> list[Paper]:
        """Return papers with similar text, by the same authors, or of the same venue with similar text."""
        own = self._place(paper_id)
        paper = self[own]
        words = f"{paper.title} {paper.abstract}".split()[:QUERY_WORDS]
        near = [place for place in self.rank(" ".join(words), NEIGHBOURS + 1) if place != own]
        shared: defaultdict[int, int] = defaultdict(int)
        for author in set(paper.authors):
            for place in self._by_author[author]:
                shared[place] += 1
        shared.pop(own, None)
        years, year = self._years, paper.year or 0
        by_authors = sorted(shared, key=lambda place: (-shared[place], abs((years[place] or 0) - year), place))
        venues = self._table["venue"]
        same_venue = [place for place in near if paper.venue and venues[place].as_py() == paper.venue]
        rankings = [[(place, 0.0) for place in places] for places in (near, by_authors[:NEIGHBOURS], same_venue)]
        return [self[place] for place, _ in fuse(rankings, limit)]

    def _find(self, query: str, limit: int) -> tuple[Paper, ...]:
        return tuple(self[place] for place in self.rank(query, limit))

    def _related(self, paper_id: str, limit: int) -> Related:
        linked = {paper.paper_id: paper for paper in [*self.references(paper_id), *self.citations(paper_id)]}
        if linked:
            return Related(papers=tuple(linked.values())[:limit], how=CITED)
        return Related(papers=tuple(self.similar(paper_id, limit)), how=SIMILAR)

    def _place(self, paper_id: str) -> int:
        place = self._places.get(paper_id)
        if place is None:
            raise SourceError("unknown_paper", f"there is no paper {paper_id!r}")
        return place

    def _rarity(self, word: str) -> float:
        """log(N / n) / log(N): 1 for a word of one paper, 0 for a word of all."""
        total = len(self)
        return math.log(total / self._paper_counts.get(word, 1)) / math.log(max(2, total))

    @cached_property
    def _paper_counts(self) -> dict[str, int]:
        counts = pq.read_table(self.folder / WORDS)
        return dict(zip(counts["stem"].to_pylist(), counts["papers"].to_pylist(), strict=True))

    @cached_property
    def _places(self) -> dict[str, int]:
        return {paper_id: place for place, paper_id in enumerate(self._table["id"].to_pylist())}

    @cached_property
    def _years(self) -> list[int | None]:
        years: list[int | None] = self._table["year"].to_pylist()
        return years

    @cached_property
    def _by_author(self) -> dict[str, list[int]]:
        return _invert(self._table["authors"].to_pylist())

    @cached_property
    def _citing(self) -> dict[str, list[int]]:
        return _invert(self._table["references"].to_pylist())


def _invert(lists: Iterable[Iterable[str]]) -> dict[str, list[int]]:
    found: defaultdict[str, list[int]] = defaultdict(list)
    for place, values in enumerate(lists):
        for value in values:
            found[value].append(place)
    return dict(found)
