"""The papers and questions: the ACL Anthology, AutoScholarQuery's test set and SPAR's benchmark.

`agent-r1 data recipe paper_search` downloads them from the public repositories, or copies them with `--from DIR`, and
fills `library/` beside them: the index, the table of papers, and the questions that are trained on.

The papers come from the Anthology, followed by the gold papers of SPAR's benchmark, which has their abstracts. Two
records with the same title are one paper. AutoScholarQuery names its gold papers by title only, so only its questions
about papers of the Anthology can be asked.
"""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from agent_r1.data.downloads import Report, data_dir, data_folder, fetch
from agent_r1.data.files import json_lines, parquet_rows, plain_or_gzipped
from agent_r1.disk import write_atomically
from agent_r1.errors import ConfigError, DataError, did_you_mean
from agent_r1.recipes.paper_search.anthology import read_anthology, write_papers
from agent_r1.recipes.paper_search.corpus import TABLE, build_library, open_library
from agent_r1.recipes.paper_search.papers import Paper, title_key
from agent_r1.recipes.paper_search.queries import Query, training_queries
from agent_r1.tools.search.dense import DenseSettings

FOLDER = "paper_search"  # name of the data directory
LIBRARY, QUESTIONS = "library", "questions.jsonl.gz"
ANTHOLOGY, AUTOSCHOLAR, SPAR = "acl_anthology*.parquet", "AutoScholarQuery_test.jsonl", "spar_bench.jsonl"
SPLITS = ("train", "valid", "autoscholar", "spar")
MIN_PAPERS = 100_000  # fewer mean that the source has changed or was cut off

ANTHOLOGY_URL = "https://codeload.github.com/acl-org/acl-anthology/tar.gz/70ba973519718ea45ae34b71ca63ab73f7253ba7"
SPAR_URL = "https://raw.githubusercontent.com/xiaofengShi/SPAR/d9aaa7704e1e59fe06dd3c43b46ce3549d2cf9f2/benchmark"
SHA256 = {  # hashes of the uncompressed files
    AUTOSCHOLAR: "7d8c7f59b289a54912c38cf204d16dbfec14ca35de850b9978b4051ad43a8b36",
    SPAR: "8ee774f428c88701e7a0a42a89b7c0ec7b88f0c1106615dce0c7f0a82f0b7893",
}


def queries(split: str, path: str | None = None) -> list[Query]:
    """Return the questions of a split, ordered by hash."""
    if split not in SPLITS:
        raise ConfigError(f"unknown split {split!r}.{did_you_mean(split, SPLITS)}")
    file = library_folder(path) / QUESTIONS
    if not file.is_file():
        raise DataError(f"there are no questions at {file}. Make them: agent-r1 data recipe {FOLDER} [--from DIR]")
    found = []
    for record in json_lines(file):
        if record["split"] == split:
            found.append(Query(text=record["text"], gold=tuple(record["gold"]), kind=record["kind"]))
    return found


def library_folder(path: str | None) -> Path:
    """Return the library beside the files or, if those are only read, in the data directory."""
    beside = data_folder(FOLDER, path) / LIBRARY
    return beside if (beside / TABLE).is_file() else data_dir(FOLDER) / LIBRARY


def prepare(directory: Path, report: Report, source: Path | None = None) -> None:
    """Fill `directory` with the files and the library, from the folder `source` or from the public repositories."""
    directory.mkdir(parents=True, exist_ok=True)
    if source is not None:
        for path in (_anthology_file(source), *(_questions_file(source, name) for name in SHA256)):
            if not (directory / path.name).exists():
                shutil.copyfile(path, directory / path.name)
    else:
        _fetch(directory, report)
    build(directory, report)


def build(directory: Path, report: Report, dense: DenseSettings | None = None) -> None:
    """Build the library from the files of `directory`, with `dense` also for search by meaning."""
    acl = list(merge(anthology(directory)))
    known = {paper.key for paper in acl}
    library = build_library(merge([*acl, *spar_papers(directory)]), directory / LIBRARY, dense=dense, report=report)
    keys = [title_key(title) for title in library.titles]
    sets = {
        "autoscholar": [q for q in _autoscholar(directory, set(keys)) if known & set(q.gold)],
        "spar": list(_spar(directory)),
    }
    held_out = {key for asked in sets.values() for query in asked for key in query.gold}
    report("making training questions")
    # Made with lexical search, so that a library with a dense index has the same questions.
    words = open_library(directory / LIBRARY, kind="lexical")
    sets |= training_queries(acl, held_out, lambda query, limit: [keys[place] for place in words.rank(query, limit)])
    with write_atomically(directory / LIBRARY / QUESTIONS) as part, gzip.open(part, "wt", encoding="utf-8") as out:
        for split in SPLITS:
            for query in sorted(sets[split], key=lambda each: each.digest):
                out.write(json.dumps({"split": split, **asdict(query)}, ensure_ascii=False) + "\n")
    report(f"{directory / LIBRARY}: {len(library):,} papers")
    for split in SPLITS:
        report(f"{split}: {len(sets[split]):,} questions")


def merge(papers: Iterable[Paper]) -> Iterator[Paper]:
    """Yield each paper once, with an id of its own: the first record with an abstract, or the first.

    Untitled records and short titles without an abstract are left out: "Author Index", "Advertisements".
    """
    found: dict[str, Paper] = {}
    for paper in papers:
        if not paper.key or (not paper.abstract and len(paper.key.split()) < 3):
            continue
        if paper.key not in found or (paper.abstract and not found[paper.key].abstract):
            found[paper.key] = paper
    ids = set[str]()
    for paper in found.values():
        paper_id, number = paper.paper_id, 2
        while paper_id in ids:
            paper_id, number = f"{paper.paper_id}-{number}", number + 1
        ids.add(paper_id)
        yield paper if paper_id == paper.paper_id else replace(paper, paper_id=paper_id)


def anthology(folder: Path) -> Iterator[Paper]:
    for row in parquet_rows(_anthology_file(folder)):
        yield Paper(
            paper_id=row["id"],
            title=" ".join(row["title"].split()),
            abstract=" ".join((row["abstract"] or "").split()),
            year=int(row["year"]) if (row["year"] or "").isdecimal() else None,
            authors=tuple(name for name in (row["authors"] or "").split("; ") if name),
            venue=row["venue"] or "",
        )


def spar_papers(folder: Path) -> Iterator[Paper]:
    for record in json_lines(_questions_file(folder, SPAR)):
        for gold in record["source_meta"]["answers"]:
            year = str(gold.get("year") or "")[:4]
            yield Paper(
                paper_id=f"spar-{gold['paperID']}",
                title=" ".join(gold["title"].split()),
                abstract=" ".join((gold.get("abstract") or "").split()),
                year=int(year) if year.isdecimal() else None,
                authors=tuple(gold.get("author") or ()),
            )


def _autoscholar(folder: Path, known: set[str]) -> Iterator[Query]:
    for record in json_lines(_questions_file(folder, AUTOSCHOLAR)):
        gold = [key for key in map(title_key, record["answer"]) if key in known]
        yield _query(record, gold, "autoscholar")


def _spar(folder: Path) -> Iterator[Query]:
    for record in json_lines(_questions_file(folder, SPAR)):
        yield _query(record, map(title_key, record["answer"]), "spar")


def _query(record: Mapping[str, Any], gold: Iterable[str], kind: str) -> Query:
    return Query(text=" ".join(record["question"].split()), gold=tuple(dict.fromkeys(gold)), kind=kind)


def _anthology_file(folder: Path) -> Path:
    found = sorted(folder.glob(ANTHOLOGY))
    if not found:
        raise DataError(f"there is no {ANTHOLOGY} in {folder}. Fetch it: agent-r1 data recipe {FOLDER}")
    return found[0]


def _questions_file(folder: Path, name: str) -> Path:
    found = plain_or_gzipped(folder / name)
    if found is None:
        raise DataError(f"there is no {name} or {name}.gz in {folder}. Fetch it: agent-r1 data recipe {FOLDER}")
    return found


def _fetch(directory: Path, report: Report) -> None:
    for name, digest in SHA256.items():
        if plain_or_gzipped(directory / name) is None:
            fetch(f"{SPAR_URL}/{name}", directory / name, sha256=digest, report=report)
    if sorted(directory.glob(ANTHOLOGY)):
        return
    archive = fetch(ANTHOLOGY_URL, directory / "fetched" / "acl-anthology.tar.gz", sha256=None, report=report)
    rows = list(read_anthology(archive))
    if len(rows) < MIN_PAPERS:
        raise DataError(f"{archive} holds {len(rows):,} papers, fewer than {MIN_PAPERS:,}: delete it to fetch it again")
    write_papers(rows, directory / "acl_anthology.parquet")
    report(f"the ACL Anthology: {len(rows):,} papers")
