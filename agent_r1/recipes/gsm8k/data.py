"""GSM8K (Cobbe et al., 2021): 7,473 training and 1,319 test problems of school mathematics, with solutions.

A solution ends with `#### ANSWER` and marks its calculations: `48/2 = <<48/2=24>>24 clips`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_r1.data.downloads import Report, data_folder, fetch
from agent_r1.data.files import json_lines, plain_or_gzipped
from agent_r1.errors import ConfigError, DataError, did_you_mean

NUMBER = re.compile(r"-?(?:\d+(?:\.\d+)?|\.\d+)")
FOLDER = "gsm8k"  # name of the data directory
SOURCE = (
    "https://raw.githubusercontent.com/openai/grade-school-math/3101c7d5072418e28b9008a6636bde82a006892c/"
    "grade_school_math/data/{split}.jsonl"
)
SHA256 = {
    "train": "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465",
    "test": "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    name: str  # train-0, test-17
    question: str
    solution: str  # with marked calculations, without the answer
    answer: str  # as written, without thousands separators


def prepare(directory: Path, report: Report) -> None:
    """Download both splits (5 MB)."""
    for split, sha256 in SHA256.items():
        fetch(SOURCE.format(split=split), directory / f"{split}.jsonl", sha256=sha256, report=report)


def problems(split: str, path: str | None) -> list[Problem]:
    """Return a whole split from the folder `path`, or download it."""
    if split not in SHA256:
        raise ConfigError(f"GSM8K has no split {split!r}.{did_you_mean(split, SHA256)}")
    return list(_read(_find(split, path), split))


def _find(split: str, path: str | None) -> Path:
    folder = data_folder(FOLDER, path)
    found = plain_or_gzipped(folder / f"{split}.jsonl")
    if found is not None:
        return found
    if path is not None:
        raise DataError(f"data.path={path!r} has neither {split}.jsonl nor {split}.jsonl.gz")
    prepare(folder, lambda line: None)
    return folder / f"{split}.jsonl"


def _read(file: Path, split: str) -> Iterator[Problem]:
    for index, record in enumerate(json_lines(file)):
        try:
            yield problem_of(record, name=f"{split}-{index}")
        except DataError as error:
            raise DataError(f"{file} record {index + 1}: {error}") from error


def problem_of(record: Mapping[str, Any], *, name: str) -> Problem:
    """Parse a published record. Raises `DataError` if it is malformed."""
    try:
        solution, mark, answer = record["answer"].rpartition("####")
        question = record["question"].strip()
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"this is not a problem of GSM8K: {error!r}") from error
    if not mark:
        raise DataError("the solution has no '#### ANSWER'")
    answer = answer.strip().replace(",", "")
    if not NUMBER.fullmatch(answer):
        raise DataError(f"the answer after '####' must be a number, got {answer!r}")
    return Problem(name=name, question=question, solution=solution.strip(), answer=answer)
