"""Multi-hop questions and their pages: HotpotQA, 2WikiMultihopQA and MuSiQue in one corpus.

`agent-r1 data recipe hotpotqa` downloads the questions with their paragraphs and some 286,000 lead sections of
Wikipedia, and builds one index over everything, so that the questions of all three sets are searched in the same
corpus. With `--from DIR` the files are copied from a folder that has them (`multihop_qa/*_ctx.jsonl.gz`,
`wiki_passages/*.parquet`).

The splits are our own, not the official ones: a hash of the question's text assigns each question whose gold paragraphs
are all present. They are the same on every machine and for every subset of the questions.
"""

from __future__ import annotations

import gzip
import json
import shutil
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

from agent_r1.data.downloads import Report, data_dir, data_folder, fetch
from agent_r1.data.files import json_lines, read_json
from agent_r1.errors import ConfigError, DataError, did_you_mean
from agent_r1.tools.search.corpus import Passage, read_passages
from agent_r1.tools.search.index import MANIFEST, Index
from agent_r1.tools.search.lexical import LexicalSettings

_Read = TypeVar("_Read")

FOLDER = "hotpotqa"  # name of the data directory
INDEX = "index"  # folder beside the questions
QUESTIONS, PAGES = Path("multihop_qa"), Path("wiki_passages")
MIGRES = "https://raw.githubusercontent.com/AdelWang/MIGRES/1de6265c9ca1014054d6ba875738e785830908f8/data"
LEAD_SECTIONS, NUM_LEAD_SECTIONS = "wikilinks.parquet", 280_000  # the file, and how many sections it has at least
LEAD_SECTIONS_URL = (
    "https://codeload.github.com/wenhuchen/WikiTables-WithLinks/tar.gz/dc066e1a6d5281511d8b73a6107d5ad2824cc2b2"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One set of questions."""

    file: str  # under `QUESTIONS`: JSON lines, gzipped
    urls: Mapping[str, str | None]  # source of the records, with the sha256 of the file; None: a pinned commit
    num_records: int  # minimum; fewer mean that the source has changed or was truncated
    test_share: float  # share of the questions that are held out


SOURCES = {
    "hotpotqa": Source(
        file="hotpot_ctx.jsonl.gz",
        urls={
            "https://curtis.ml.cmu.edu/datasets/hotpot/hotpot_dev_distractor_v1.json": (
                "4e9ecb5c8d3b719f624d66b60f8d56bf227f03914f5f0753d6fa1b359d7104ea"
            )
        },
        num_records=7405,
        test_share=0.24,
    ),
    "2wiki": Source(
        file="2wiki_ctx.jsonl.gz",
        urls={f"{MIGRES}/wikihop.json": None, f"{MIGRES}/wikihop_train_preprocess.json": None},
        num_records=660,
        test_share=0.75,
    ),
    "musique": Source(
        file="musique_ctx.jsonl.gz", urls={f"{MIGRES}/musique.json": None}, num_records=200, test_share=0.75
    ),
}
SPLITS = {  # split of the rows -> which questions, and whether they are held out
    "train": ("hotpotqa", False),
    "test": ("hotpotqa", True),
    "2wiki_train": ("2wiki", False),
    "2wiki": ("2wiki", True),
    "musique_train": ("musique", False),
    "musique": ("musique", True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    text: str
    answers: tuple[str, ...]  # the answer itself first, then its aliases
    gold: tuple[str, ...]  # titles of the paragraphs that hold the answer, each once
    kind: str  # bridge, comparison, ...

    @property
    def key(self) -> str:
        """Hash the text, independently of machine and subset. Questions are ordered by it."""
        return sha256(self.text.encode()).hexdigest()[:16]

    def is_held_out(self, share: float) -> bool:
        return int(self.key, 16) < share * 2**64


def questions(split: str, folder: Path) -> list[Question]:
    """Return the questions of a split that have all their gold paragraphs, ordered by hash."""
    if split not in SPLITS:
        raise ConfigError(f"unknown split {split!r}.{did_you_mean(split, SPLITS)}")
    name, held_out = SPLITS[split]
    found = {question.text: question for question in _each(name, folder, _question) if question is not None}
    share = SOURCES[name].test_share
    return sorted((q for q in found.values() if q.is_held_out(share) == held_out), key=lambda q: q.key)


def passages(folder: Path) -> Iterator[Passage]:
    """Yield every paragraph of every question, then the lead sections of other pages."""
    titles, seen = set[str](), set[tuple[str, str]]()
    for name in SOURCES:
        for paragraphs in _each(name, folder, _paragraphs):
            for title, text in paragraphs:
                if text and (title, text) not in seen:
                    seen.add((title, text))
                    titles.add(title)
                    yield Passage(passage_id=f"{name}-{len(seen)}", title=title, text=text)
    files = sorted((folder / PAGES).glob("*.parquet"))
    if not files:
        raise DataError(
            f"there is no .parquet file of lead sections in {folder / PAGES}: run agent-r1 data recipe {FOLDER}"
        )
    for passage in read_passages(files):
        if passage.title not in titles:
            yield passage


def records(name: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield records: question, answer, type, supporting_facts [[title, sentence]], context [[title, [sentence]]],
    answer_aliases."""
    path = folder / QUESTIONS / SOURCES[name].file
    if not path.is_file():
        raise DataError(
            f"there are no questions at {path}. Fetch them: agent-r1 data recipe {FOLDER}, or set data.path to a "
            f"folder with {QUESTIONS / SOURCES[name].file}"
        )
    yield from json_lines(path)


def prepare(directory: Path, report: Report, source: Path | None = None) -> None:
    """Fill `directory` with questions and index, from the folder `source` or from the public sources.

    Files that exist are not downloaded again.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if source is not None:
        for name in SOURCES.values():
            _copy(source / QUESTIONS / name.file, directory / QUESTIONS / name.file)
        for path in (source / PAGES).glob("*.parquet"):
            _copy(path, directory / PAGES / path.name)
    else:
        _fetch_questions(directory, report)
        _fetch_pages(directory, report)
    index = Index.build(passages(directory), directory / INDEX, lexical=LexicalSettings(), report=report)
    report(f"{directory / INDEX}: {index.manifest.num_passages:,} passages")
    for split in SPLITS:
        report(f"{split}: {len(questions(split, directory)):,} questions")


def index_folder(path: str | None) -> Path:
    """Return the index in the folder of the questions or, if that is a read-only source, in the data directory."""
    beside = data_folder(FOLDER, path) / INDEX
    return beside if (beside / MANIFEST).is_file() else data_dir(FOLDER) / INDEX


def _each(name: str, folder: Path, read: Callable[[Mapping[str, Any]], _Read]) -> Iterator[_Read]:
    """Apply `read` to each record; a record with missing fields raises an error that names its line."""
    for index, record in enumerate(records(name, folder)):
        try:
            made = read(record)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            path = folder / QUESTIONS / SOURCES[name].file
            raise DataError(f"{path} record {index + 1}: not a question in HotpotQA's format: {error!r}") from error
        yield made


def _question(record: Mapping[str, Any]) -> Question | None:
    gold = tuple(dict.fromkeys(title for title, _ in record["supporting_facts"] or ()))
    if not gold or not set(gold) <= {title for title, _ in record["context"] or ()}:
        return None
    if not isinstance(record["answer"], str):
        raise TypeError(f"the answer must be text, got {record['answer']!r}")
    return Question(
        text=" ".join(record["question"].split()),
        answers=tuple(dict.fromkeys([record["answer"], *record.get("answer_aliases", ())])),
        gold=gold,
        kind=record["type"] or "unknown",
    )


def _paragraphs(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(title, _joined(sentences)) for title, sentences in record["context"] or ()]


def _joined(sentences: Sequence[str]) -> str:
    """Join sentences to a paragraph. HotpotQA's carry their own spaces, and some begin inside a quotation; others do
    not."""
    bring_spaces = any(sentence.startswith(" ") for sentence in sentences[1:])
    return " ".join(("" if bring_spaces else " ").join(sentences).split())


def _copy(path: Path, to: Path) -> None:
    if not path.is_file():
        raise DataError(f"{path} is missing: the source needs {QUESTIONS}/ and {PAGES}/ as described in the README")
    if to.exists() and to.samefile(path):
        return
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, to)


def _fetch_questions(directory: Path, report: Report) -> None:
    for name, source in SOURCES.items():
        to = directory / QUESTIONS / source.file
        if to.is_file():
            report(f"{name}: {to} is already there")
            continue
        found = dict[str, dict[str, Any]]()
        for url, digest in source.urls.items():
            raw = fetch(url, directory / "fetched" / url.rpartition("/")[2], sha256=digest, report=report)
            found |= {record["question"]: record for record in map(_normal, _json_records(raw))}
        _check_count(name, len(found), source.num_records)
        to.parent.mkdir(parents=True, exist_ok=True)
        with gzip.open(to, "wt", encoding="utf-8") as out:
            out.writelines(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n" for record in found.values())
        report(f"{name}: {len(found):,} questions")


def _fetch_pages(directory: Path, report: Report) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    there = sorted((directory / PAGES).glob("*.parquet"))
    if there:
        report(f"lead sections: {there[0]} is already there")
        return
    to = directory / PAGES / LEAD_SECTIONS
    archive = directory / "fetched" / "WikiTables-WithLinks.tar.gz"
    pages = lead_sections(fetch(LEAD_SECTIONS_URL, archive, sha256=None, report=report))
    _check_count("lead sections", len(pages), NUM_LEAD_SECTIONS)
    to.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"title": list(pages), "text": list(pages.values())}), to, compression="zstd")
    report(f"lead sections: {len(pages):,} pages")


def _check_count(name: str, found: int, least: int) -> None:
    if found < least:
        raise DataError(f"{name}: expected at least {least:,} records, got {found:,}: the source has changed")


def lead_sections(archive: Path) -> dict[str, str]:
    """Return text by title of the pages linked from WikiTables-WithLinks; sorted, first text of each."""
    pages: dict[str, str] = {}
    with tarfile.open(archive, "r:gz") as files:
        for member in files:
            taken = files.extractfile(member) if "/request_tok/" in member.name and member.isfile() else None
            if taken is not None:
                for link, text in json.load(taken).items():
                    if text:
                        pages.setdefault(unquote(link.removeprefix("/wiki/")).replace("_", " "), text)
    return dict(sorted(pages.items()))


def _json_records(path: Path) -> Iterator[dict[str, Any]]:
    """Read a file that is one JSON list, or one JSON object per line."""
    try:
        text = path.read_text(encoding="utf-8")
        yield from read_json(text) if text.lstrip().startswith("[") else map(read_json, text.splitlines())
    except ValueError as error:
        raise DataError(f"{path} cannot be read: {error}. Delete it to download it again") from error


def _normal(record: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a published record to the fields of `records`; MuSiQue's paragraphs have another layout."""
    kept = {key: record.get(key) for key in ("question", "answer", "type", "context", "supporting_facts")}
    if "paragraphs" in record:
        paragraphs = record["paragraphs"]
        kept["context"] = [[p["title"], [p["paragraph_text"]]] for p in paragraphs]
        kept["supporting_facts"] = [[p["title"], 0] for p in paragraphs if p["is_supporting"]]
        kept["answer_aliases"] = record["answer_aliases"]
    return kept
