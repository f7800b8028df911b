"""GSM8K (Cobbe et al., 2021): 7,473 problems of school mathematics to train on and 1,319 to test on, with solutions.

A solution ends with `#### ANSWER` and marks its calculations: `48/2 = <<48/2=24>>24 clips`.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from agent_r1.errors import ConfigError, DataError, did_you_mean
from agent_r1.tasks.download import data_dir, fetch

FOLDER = "gsm8k"  # under which the data are kept
SOURCE = "https://raw.githubusercontent.com/openai/grade-school-math/3101c7d5072418e28b9008a6636bde82a006892c"
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


def prepare(directory: Path, report: Callable[[str], None]) -> None:
    """Fetch both splits; 5 MB."""
    for split, sha256 in SHA256.items():
        url = f"{SOURCE}/grade_school_math/data/{split}.jsonl"
        fetch(url, _file(directory, split), sha256=sha256, report=report)


def problems(split: str, path: str | None) -> list[Problem]:
    """All of a split: from the folder `path`, or fetched."""
    if split not in SHA256:
        raise ConfigError(f"GSM8K has no split {split!r}.{did_you_mean(split, SHA256)}")
    return list(_read(_find(split, path), split))


def _find(split: str, path: str | None) -> Path:
    if path is None:
        directory = data_dir(FOLDER)
        if not _file(directory, split).exists():
            prepare(directory, lambda line: None)
        return _file(directory, split)
    folder = Path(path).expanduser()
    candidates = [_file(folder, split), folder / f"{split}.jsonl.gz"]
    found = next((candidate for candidate in candidates if candidate.is_file()), None)
    if found is None:
        raise DataError(f"data.path={path!r} has neither {split}.jsonl nor {split}.jsonl.gz")
    return found


def _file(directory: Path, split: str) -> Path:
    return directory / f"{split}.jsonl"


def _read(file: Path, split: str) -> Iterator[Problem]:
    with gzip.open(file, "rt", encoding="utf-8") if file.suffix == ".gz" else file.open(encoding="utf-8") as lines:
        for index, line in enumerate(lines):
            try:
                record = json.loads(line)
                solution, mark, answer = record["answer"].rpartition("####")
                question = record["question"].strip()
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise DataError(f"{file} line {index + 1} is not a problem of GSM8K: {error!r}") from error
            if not mark:
                raise DataError(f"{file} line {index + 1}: the solution has no '#### ANSWER'")
            yield Problem(
                name=f"{split}-{index}",
                question=question,
                solution=solution.strip(),
                answer=answer.strip().replace(",", ""),
            )
