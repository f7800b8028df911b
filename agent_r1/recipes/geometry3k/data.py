"""Geometry3K (Lu et al., 2021): 2,101 training, 300 validation and 601 test problems of plane geometry, with figures.

Read as published, or as verl converts them:

    hiyouga/geometry3k    images [{bytes, path}], problem ("<image>Find $x$."), answer ("2 \\sqrt { 221 }")
    verl's geo3k.py       images, prompt (messages with <image>), reward_model {ground_truth}, extra_info

A training problem with the same figure and words as a validation or test problem is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from agent_r1.data.downloads import Report, data_folder, fetch
from agent_r1.data.files import parquet_rows
from agent_r1.data.rows import row_from_record
from agent_r1.errors import ConfigError, DataError, did_you_mean
from agent_r1.types import Message, TaskRow

FOLDER = "geometry3k"  # name of the data directory
SOURCE = "https://huggingface.co/datasets/hiyouga/geometry3k/resolve/main/data/{split}-00000-of-00001.parquet"
SPLITS = ("train", "validation", "test")
PATTERNS = ("{split}.parquet", "{split}-*.parquet", "data/{split}-*.parquet")  # file names of a split in a folder

INSTRUCTION = (
    "Solve the geometry problem. Think step by step. If something in a picture is too small to read, look closer with "
    "the tool zoom. When you know the answer, write it as \\boxed{answer}."
)


def prepare(directory: Path, report: Report) -> None:
    """Download the published files (60 MB) and read every problem, because their hashes are not known here."""
    for split in SPLITS:
        if not files(directory, split):
            url = SOURCE.format(split=split)
            fetch(url, directory / url.rpartition("/")[2], sha256=None, report=report)
    for split in SPLITS:
        report(f"{split}: {len(problems(split, str(directory))):,} problems")


def problems(split: str, path: str | None) -> list[TaskRow]:
    """Return the problems of a split from the folder `path`, or download all of them."""
    if split not in SPLITS:
        raise ConfigError(f"Geometry3K has no split {split!r}.{did_you_mean(split, SPLITS)}")
    folder = data_folder(FOLDER, path)
    if not files(folder, split):
        if path is not None:
            wanted = " nor ".join(pattern.format(split=split) for pattern in PATTERNS)
            raise DataError(f"data.path={path!r} has neither {wanted}")
        prepare(folder, lambda line: None)
    found = list(_read(folder, split))
    if split != "train":
        return found
    taboo = {repr(row.prompt) for other in SPLITS if other != split for row in _read(folder, other)}
    return [row for row in found if repr(row.prompt) not in taboo]


def files(folder: Path, split: str) -> list[Path]:
    """The files of a split; none if the folder has none."""
    found = (sorted(folder.glob(pattern.format(split=split))) for pattern in PATTERNS)
    return next(filter(None, found), [])


def row_of(record: Mapping[str, Any], *, split: str, index: int, place: str, folder: Path | None = None) -> TaskRow:
    """Return a published or converted record as a row. Raises `DataError` if it is malformed.

    Relative paths of pictures start in the folder.
    """
    row = row_from_record(
        {
            "row_id": f"{split}-{index}",
            "prompt": _prompt(record, place),
            "images": record.get("images"),
            "reward_model": {"style": "rule", "ground_truth": _answer(record, place)},
            "data_source": FOLDER,  # verl's may name a folder of the machine that converted them
            "extra_info": {"split": split, "index": index},  # verl's repeats the answer
        },
        place=place,
        folder=folder,
    )
    if not any(isinstance(message["content"], list) for message in row.prompt):
        raise DataError(f"{place} has no pictures")
    return row


def _read(folder: Path, split: str) -> Iterator[TaskRow]:
    index = 0
    for file in files(folder, split):
        for number, record in enumerate(parquet_rows(file), 1):
            yield row_of(record, split=split, index=index, place=f"{file} record {number}", folder=file.parent)
            index += 1


def _prompt(record: Mapping[str, Any], place: str) -> list[Message]:
    if record.get("prompt") is not None:
        prompt: list[Message] = record["prompt"]
        return prompt
    if not isinstance(record.get("problem"), str):
        raise DataError(f"{place} has neither a 'problem' nor a 'prompt'; its columns are {sorted(record)}")
    return [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": record["problem"]}]


def _answer(record: Mapping[str, Any], place: str) -> str:
    converted = record.get("reward_model")
    answer = converted.get("ground_truth") if isinstance(converted, Mapping) else record.get("answer")
    if not isinstance(answer, str) or not answer.strip():
        raise DataError(f"{place}: 'answer', or reward_model.ground_truth, must be text, got {answer!r}")
    return answer.strip()
