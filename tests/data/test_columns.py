"""`data.map`: rows from files and datasets whose columns have other names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agent_r1.build.task import build_task
from agent_r1.config import load_config
from agent_r1.data.rows import load_rows
from agent_r1.errors import ConfigError, DataError

RECORDS: list[dict[str, Any]] = [
    {"id": 7, "question": "1 + 1?", "final": {"text": ["2", "two"]}, "topic": "sums", "level": 1},
    {"id": 8, "question": "2 + 2?", "final": {"text": ["4"]}, "topic": "sums", "level": 2},
]
TASK = """
def reward(row, trajectory): return 0.0
def rows(split): return [{"prompt": split}]
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    lines = "\n".join(map(json.dumps, RECORDS))
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(lines, encoding="utf-8")
    (tmp_path / "task.py").write_text(TASK, encoding="utf-8")
    (tmp_path / "base.yaml").write_text(
        'task: {rows: "{split}.jsonl", reward: task.reward, flow: single_step}\n'
        'data: {map: {prompt: "Level {level}. {question}", answer: final.text.0, row_id: id, subject: topic}}\n'
        "model: {path: nowhere}\n",
        encoding="utf-8",
    )
    return tmp_path


def test_columns_and_texts_with_columns_fill_the_fields_of_a_row(recipe: Path) -> None:
    row, other = build_task(load_config(str(recipe))).train_rows()
    assert row.prompt == [{"role": "user", "content": "Level 1. 1 + 1?"}]
    assert (row.ground_truth, row.row_id, other.ground_truth, other.row_id) == ("2", "7", "4", "8")
    assert row.extra_info == {"subject": "sums", "question": "1 + 1?", "level": 1}  # not the answer


@pytest.mark.parametrize("answer", ["{final.text.0}", "#### {final.text.0}"])
def test_columns_in_the_text_of_an_answer_are_not_kept_beside_it(recipe: Path, answer: str) -> None:
    columns = {"prompt": "{question}", "answer": answer}
    row = load_rows(str(recipe / "train.jsonl"), split="train", columns=columns)[0]
    assert row.ground_truth == answer.replace("{final.text.0}", "2")
    assert "final" not in row.extra_info
    assert row.extra_info["question"] == "1 + 1?"


@pytest.mark.parametrize(
    ("column", "named"),
    [
        ("questoin", "'question'"),
        ("{questoin}?", "'question'"),
        ("final.txt", "'text'"),
        ("final.text.5", "'5'"),
        ("id.x", "'x'"),
    ],
)
def test_a_column_that_is_missing_is_named_with_the_nearest_one(recipe: Path, column: str, named: str) -> None:
    task = build_task(load_config(str(recipe), [f'data.map.prompt="{column}"']))
    with pytest.raises(DataError, match=rf"row 0 .*data\.map\.prompt.*{named}"):
        task.train_rows()


def test_a_map_for_rows_made_by_a_function_is_refused(recipe: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.map"):
        build_task(load_config(str(recipe), ["task.rows=task.rows"]))
