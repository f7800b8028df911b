"""Problems with a final answer: DAPO-Math-17k and MATH for training; MATH-500, AIME, AMC and GSM8K for evaluation.

`agent-r1 data recipe retool` downloads the files; a folder that has them, plain or gzipped, works too. GSM8K is in a
folder `gsm8k` inside that folder, or next to it.

Evaluation problems must not be trained on. A training problem is left out if its letters and digits equal those of an
evaluation problem, or begin like them with the same answer; duplicates are left out too. DAPO alone contains 976 of the
5,000 problems of MATH's test set.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_r1.data.downloads import Report, fetch
from agent_r1.data.files import json_lines, parquet_rows, plain_or_gzipped, read_json
from agent_r1.errors import ConfigError, DataError, did_you_mean
from agent_r1.recipes.gsm8k import data as gsm8k

Record = Mapping[str, Any]

START_CHARS = 60  # problems that share this many leading letters and digits, and the answer, count as the same

FOLDER = "retool"  # of the data directory
GITHUB = "https://raw.githubusercontent.com"
SVS = f"{GITHUB}/MasterVito/SvS/9fd8f35375b31b8632b52e715296c264a3ad4176/data"
DEEPSCALER = f"{GITHUB}/agentica-project/deepscaler/95ef74ffee001cce89463f2d61dfdce1d03576c1/deepscaler/data"
HARNESS = f"{GITHUB}/ZubinGou/math-evaluation-harness/db77bc6bb2a17c90ed2d63e88ebd8c40a82858c5/data"
RETOOL = f"{GITHUB}/ReTool-RL/ReTool/8407e1394dd92c1c3e61f23d6c5015c023ed7407/evaluation/dataset"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    text: str
    answer: str  # LaTeX, without \boxed


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One file of problems."""

    file: str
    url: str
    sha256: str  # of the plain file
    read: Callable[[Record], Problem | None]  # None: a record without a final answer


def boxed(text: str) -> str | None:
    """Return the content of the last \\boxed{...} with balanced braces, or None."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 0, start + len("\\boxed{")
    for place in range(begin, len(text)):
        if text[place] == "}" and depth == 0:
            return text[begin:place].strip()
        depth += {"{": 1, "}": -1}.get(text[place], 0)
    return None


def _dapo(record: Record) -> Problem:
    return Problem(text=record["prompt"][-1]["content"], answer=record["reward_model"]["ground_truth"])


def _with_answer(record: Record) -> Problem | None:
    answer = record["answer"]
    if answer is None:
        return None
    return Problem(text=record["problem"], answer=f"{answer:g}" if isinstance(answer, float) else answer)


def _with_solution(record: Record) -> Problem | None:
    answer = boxed(record["solution"])
    return None if answer is None else Problem(text=record["problem"], answer=answer)


def _input_output(record: Record) -> Problem:
    return Problem(text=record["input"], answer=record["output"])


def _gsm8k(record: Record) -> Problem:
    problem = gsm8k.problem_of(record, name="")
    return Problem(text=problem.question, answer=problem.answer)


SOURCES: dict[str, Source] = {
    "dapo": Source(
        file="dapo_math_17k.parquet",
        url=f"{SVS}/dapo_math_17k.parquet",
        sha256="246ae23df97c9eae8126cb4da780e9a0a31d10110e16eed144bcecbf2132d535",
        read=_dapo,
    ),
    "math_train": Source(
        file="math_train_7474_deepscaler.json",
        url=f"{DEEPSCALER}/train/math.json",
        sha256="569230b362fd501e1a33d8f29aae3b4b989d32e2b91b07c3f48493528c3bf6d2",
        read=_with_answer,
    ),
    "math500": Source(
        file="math500.jsonl",
        url=f"{HARNESS}/math_oai/test.jsonl",
        sha256="35dc41080a3680858b27fa7e0533d2d547825316fc5dafe5d316f4ccc5a06132",
        read=_with_answer,
    ),
    "math_test": Source(
        file="math_test_5000.jsonl",
        url=f"{HARNESS}/math/test.jsonl",
        sha256="3371949f33dd702d04b43fddd7d53a028de0aaca0e76abb1b875a050297b3aa4",
        read=_with_solution,
    ),
    "aime24": Source(
        file="aime24.jsonl",
        url=f"{RETOOL}/AIME24.jsonl",
        sha256="b952a4fd99a81353662b549deb43207a31997b554aea616f3b071e2fecaa8285",
        read=_input_output,
    ),
    "aime25": Source(
        file="aime25.jsonl",
        url=f"{RETOOL}/AIME25.jsonl",
        sha256="633607e7e2584d6d52f3fdd741d5fc6e66384a1924ab3e1da3ad46eec76af2f8",
        read=_input_output,
    ),
    "amc23": Source(
        file="amc23_deepscaler.json",
        url=f"{DEEPSCALER}/test/amc.json",
        sha256="2666a217cb566efb77ebfce61841d5d8855d4b4be89633b29df3a43dcfd942dd",
        read=_with_answer,
    ),
    **{
        f"gsm8k_{split}": Source(
            file=f"gsm8k/{split}.jsonl", url=gsm8k.SOURCE.format(split=split), sha256=sha256, read=_gsm8k
        )
        for split, sha256 in gsm8k.SHA256.items()
    },
}
EVALUATION = ("math500", "math_test", "aime24", "aime25", "amc23", "gsm8k_test")
TRAINING = ("dapo", "math_train", "gsm8k_train")
SPLITS: dict[str, tuple[str, ...]] = {
    "train": ("dapo", "math_train"),
    "test": ("math500",),
    **{name: (name,) for name in SOURCES},
}


def prepare(directory: Path, report: Report) -> None:
    """Download every missing file."""
    for source in SOURCES.values():
        if find(directory, source) is None:
            fetch(source.url, directory / source.file, sha256=source.sha256, report=report)
    for split in SPLITS:
        report(f"{split}: {len(split_problems(directory, split)):,} problems")


def split_problems(folder: Path, name: str) -> list[tuple[str, Problem]]:
    """Return the problems of a split with their sources; training splits exclude evaluation problems."""
    if name not in SPLITS:
        raise ConfigError(f"unknown split {name!r}.{did_you_mean(name, SPLITS)}")
    sources = SPLITS[name]
    found = [(source, problem) for source in sources for problem in problems(folder, source)]
    return clean(found, judged(folder)) if set(sources) <= set(TRAINING) else found


def judged(folder: Path) -> set[str]:
    """Return the marks of all evaluation sets; only GSM8K may be missing."""
    needed = [name for name in EVALUATION if name != "gsm8k_test" or find(folder, SOURCES[name]) is not None]
    return {mark for name in needed for problem in problems(folder, name) for mark in marks(problem)}


def clean(found: Sequence[tuple[str, Problem]], taboo: set[str]) -> list[tuple[str, Problem]]:
    """Remove duplicates and any problem that shares a fingerprint with `taboo`."""
    seen, kept = set(taboo), []
    for source, problem in found:
        own = marks(problem)
        if not own & seen:
            seen |= own
            kept.append((source, problem))
    return kept


def marks(problem: Problem) -> set[str]:
    """Return what identifies copies of a problem: its whole text, or its beginning and its answer."""
    text = reduced(problem.text)
    return {text, f"{text[:START_CHARS]} -> {''.join(problem.answer.split())}"}


def reduced(text: str) -> str:
    """Keep letters and digits only: copies of a problem differ in spaces, dollar signs and backslashes."""
    return re.sub(r"[^a-z0-9]", "", text.lower())


def problems(folder: Path, name: str) -> list[Problem]:
    return [problem for _, problem in solved(folder, name)]


def solved(folder: Path, name: str) -> Iterator[tuple[Record, Problem]]:
    """Yield every record with a final answer, raw and as a problem. Raises for records of another format."""
    source = SOURCES[name]
    for index, record in enumerate(records(folder, name)):
        try:
            problem = source.read(record)
            if problem is not None and not (isinstance(problem.text, str) and isinstance(problem.answer, str)):
                raise TypeError(f"the problem and its answer must be text, got {problem.text!r} and {problem.answer!r}")
        except (LookupError, TypeError, AttributeError, DataError) as error:
            reason = error if isinstance(error, DataError) else f"this is not a problem of {name}: {error!r}"
            raise DataError(f"{find(folder, source)} record {index + 1}: {reason}") from error
        if problem is not None:
            yield record, problem


def records(folder: Path, name: str) -> Iterator[Record]:
    """Yield the raw records of a file."""
    source = SOURCES[name]
    path = find(folder, source)
    if path is None:
        raise DataError(
            f"there is no {source.file} (or {source.file}.gz) in {folder}. Fetch it: agent-r1 data recipe {FOLDER}, "
            "or set data.path to a folder that has it"
        )
    try:
        yield from _parsed(path)
    except (ValueError, OSError) as error:
        raise DataError(f"{path} cannot be read: {error}. Expected the format of {source.url}") from error


def find(folder: Path, source: Source) -> Path | None:
    """Find a file, plain or gzipped, in the folder; a subfolder such as gsm8k may also be next to it."""
    places = [folder / source.file]
    if "/" in source.file:
        places.append(folder.parent / source.file)
    return next((found for place in places if (found := plain_or_gzipped(place)) is not None), None)


def _parsed(path: Path) -> Iterator[Record]:
    if path.suffix == ".parquet":
        yield from parquet_rows(path)
    elif ".jsonl" in path.name:
        yield from json_lines(path)
    else:
        data = path.read_bytes()
        yield from read_json((gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8"))
