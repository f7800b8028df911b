"""Rows come in from files, datasets and generators; bad ones are errors that say where."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.data.rows import load_rows, row_from_record, rows_for_step
from agent_r1.errors import ConfigError, DataError
from agent_r1.types import TaskRow

PUBLISHED: dict[str, Any] = {
    "data_source": "openai/gsm8k",
    "agent_name": "agent_env_loop",
    "prompt": [{"role": "system", "content": "Be exact."}, {"role": "user", "content": "1 + 1?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "env_kwargs": json.dumps({"env_type": "tool", "tools": ["calc"], "tools_kwargs": {"digits": 3}}),
    "extra_info": {"index": 7, "split": "train"},
}


def test_a_published_parquet_row_is_read_unchanged(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist([PUBLISHED]), tmp_path / "train.parquet")
    [row] = load_rows(str(tmp_path), split="train")
    assert row.prompt == PUBLISHED["prompt"]
    assert row.agent_name == "agent_env_loop"
    assert row.ground_truth == "2"
    assert row.env_kwargs == {"env_type": "tool", "tools": ["calc"], "tools_kwargs": {"digits": 3}}
    assert row.data_source == "openai/gsm8k"
    # columns that the schema does not name are kept
    assert row.extra_info == {"index": 7, "split": "train", "ability": "math"}
    assert row.row_id == "train-0"


def test_every_kind_of_source_gives_the_same_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = json.dumps(PUBLISHED) + "\n\n"
    parquet, plain, gzipped = (tmp_path / name for name in ("parquet", "plain", "gzipped"))
    for folder in (parquet, plain, gzipped):
        folder.mkdir()
    pq.write_table(pa.Table.from_pylist([PUBLISHED]), parquet / "train.parquet")
    (plain / "train.jsonl").write_text(line, encoding="utf-8")
    (gzipped / "train.jsonl.gz").write_bytes(gzip.compress(line.encode()))
    rows = load_rows(str(parquet), split="train")
    sources = [parquet / "train.parquet", plain, plain / "{split}.jsonl", gzipped, gzipped / "{split}.jsonl.gz"]
    assert [load_rows(str(source), split="train") for source in sources] == [rows] * 5
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    assert load_rows(f"hf:{parquet}", split="train") == rows
    with pytest.raises(DataError, match="cannot load split 'nope' of dataset"):
        load_rows(f"hf:{parquet}", split="nope")


def test_a_folder_with_two_files_of_one_split_does_not_say_which_is_meant(tmp_path: Path) -> None:
    for name, asked in (("test.jsonl", "old"), ("test.jsonl.gz", "new")):
        line = json.dumps({"prompt": asked}).encode()
        (tmp_path / name).write_bytes(gzip.compress(line) if name.endswith(".gz") else line)
    with pytest.raises(DataError, match=r"test\.jsonl and test\.jsonl\.gz"):
        load_rows(str(tmp_path), split="test")
    [row] = load_rows(f"{tmp_path}/{{split}}.jsonl.gz", split="test")
    assert row.prompt[0]["content"] == "new"


def test_damaged_gzip_is_a_clear_error(tmp_path: Path) -> None:
    whole = gzip.compress(b'{"prompt": "x"}\n' * 9)
    for content in (whole[:-12], whole[:12] + b"\xff" * 9 + whole[21:]):  # cut off; something else inside
        (tmp_path / "a.jsonl.gz").write_bytes(content)
        with pytest.raises(DataError, match=r"a\.jsonl\.gz line \d cannot be read"):
            load_rows(str(tmp_path / "a.jsonl.gz"), split="train")


def test_a_generator_function_gives_rows_or_records() -> None:
    def rows(split: str, count: int) -> Iterator[Any]:
        yield TaskRow(prompt=[{"role": "user", "content": split}], row_id="mine")
        for index in range(count):
            yield {"prompt": f"q{index}"}

    loaded = load_rows(rows, split="test", count=3)
    assert [row.row_id for row in loaded] == ["mine", "test-1", "test-2"]


def test_the_ground_truth_can_be_taken_off_a_row() -> None:
    row = row_from_record(PUBLISHED, place="row 0 of here")
    assert row.without_ground_truth().ground_truth is None
    assert row.without_ground_truth().prompt == row.prompt


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"question": "x"}, r"row 0 of f.jsonl has no 'prompt'; its columns are \['question'\]"),
        ({"prompt": [{"text": "hi"}]}, "role, content"),
        ({"prompt": "x", "env_kwargs": "{broken"}, "env_kwargs is a string but not JSON"),
        ({"prompt": "x", "reward_model": 3}, "reward_model must be a mapping"),
        (["prompt"], "is list, not a mapping"),
        ({"prompt": [{"role": "user", "content": 4}]}, "role, content"),
        ({"prompt": "x", "agent_name": 5}, "row 0 of f.jsonl: agent_name must be the name of a flow, got 5"),
        ({"prompt": "x", "ground_truth": 0}, "ground_truth into reward_model"),
    ],
)
def test_a_bad_row_names_its_place_and_fault(record: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        row_from_record(record, place="row 0 of f.jsonl")


def test_rows_from_code_are_checked_like_rows_from_files() -> None:
    made = [TaskRow(prompt="two", row_id=0), TaskRow(prompt=[{"role": "user", "content": "three"}])]  # type: ignore[arg-type]
    loaded = load_rows(lambda split: made, split="train")
    assert [row.prompt[0]["content"] for row in loaded] == ["two", "three"]
    assert [row.row_id for row in loaded] == ["0", "train-1"]
    [row] = load_rows(lambda split: [TaskRow(prompt=[])], split="train")
    assert row.prompt == []  # the environment may say everything
    bad = TaskRow(prompt=["text"])  # type: ignore[list-item]
    with pytest.raises(DataError, match=r"row 0 of .*: prompt must be text or a list"):
        load_rows(lambda split: [bad], split="train")


def test_messages_may_come_in_an_array_and_calls_without_content() -> None:
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    parts = {"role": "user", "content": [{"type": "text", "text": "sum?"}]}
    held: Any = np.array([parts, call, {"role": "tool", "content": "3"}], dtype=object)
    [made, read] = load_rows(lambda split: [TaskRow(prompt=held), {"prompt": held}], split="train")
    assert made.prompt == read.prompt == [parts, {"content": None, **call}, {"role": "tool", "content": "3"}]


def test_a_file_may_begin_with_the_mark_that_windows_writes(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text('{"prompt": "x"}\n', encoding="utf-8-sig")
    assert [row.prompt[0]["content"] for row in load_rows(str(file), split="train")] == ["x"]


def test_unreadable_sources_are_clear_errors(tmp_path: Path) -> None:
    (tmp_path / "bad.parquet").write_bytes(b"not parquet")
    (tmp_path / "bad.jsonl").write_text('{"prompt": "x"}\n{oops\n', encoding="utf-8")
    (tmp_path / "bad.jsonl.gz").write_bytes(b"not gzip")
    (tmp_path / "empty.jsonl").write_text("", encoding="utf-8")
    (tmp_path / "data.csv").write_text("a,b", encoding="utf-8")
    for name, message in (
        ("missing.jsonl", "no data file at"),
        ("bad.parquet", "not a readable parquet file"),
        ("bad.jsonl", r"bad\.jsonl line 2 cannot be read: Expecting property name"),
        ("bad.jsonl.gz", r"bad\.jsonl\.gz line 0 cannot be read: Not a gzipped file"),
        ("empty.jsonl", "no rows for split 'train'"),
        ("data.csv", r"data\.csv is none of \.parquet, \.jsonl, \.jsonl\.gz"),
    ):
        with pytest.raises(DataError, match=message):
            load_rows(str(tmp_path / name), split="train")
    with pytest.raises(DataError, match=r"has none of valid\.parquet, valid\.jsonl, valid\.jsonl\.gz; it holds"):
        load_rows(str(tmp_path), split="valid")


DEEP, LONG = "[" * 5000 + "]" * 5000, "9" * 5000


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (DEEP, "nested too deeply"),
        (LONG, "digits"),
    ],
)
def test_json_that_python_cannot_hold_is_an_error_with_its_place(tmp_path: Path, value: str, message: str) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(f'{{"prompt": "a"}}\n{{"prompt": "b", "x": {value}}}\n', encoding="utf-8")
    with pytest.raises(DataError, match=f"{path} line 2 cannot be read: .*{message}"):
        load_rows(str(path), split="train")
    path.write_text(json.dumps({"prompt": "b", "env_kwargs": f'{{"x": {value}}}'}), encoding="utf-8")
    with pytest.raises(DataError, match=f"row 0 of {path}: env_kwargs is a string but not JSON: .*{message}"):
        load_rows(str(path), split="train")


def test_nesting_up_to_the_limit_is_read(tmp_path: Path) -> None:
    inner = "[" * 98 + "1" + "]" * 98  # and two levels around it
    (tmp_path / "train.jsonl").write_text(f'{{"prompt": "a", "extra_info": {{"x": {inner}}}}}', encoding="utf-8")
    [row] = load_rows(str(tmp_path / "train.jsonl"), split="train")
    assert json.dumps(row.extra_info["x"]) == inner


def test_damaged_pages_of_a_parquet_file_are_an_error_with_file_and_row(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    prompts = [f"question {number} {number**7}" for number in range(20_000)]
    pq.write_table(pa.table({"prompt": prompts}), path, row_group_size=1000)
    content = bytearray(path.read_bytes())
    half = len(content) // 2
    content[half : half + 3000] = b"\xff" * 3000
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"^{path} is not a readable parquet file, from row \d+ on: .+$"):
        load_rows(str(path), split="train")


@pytest.mark.parametrize("source", ["hf:", "hf: ", "hf::main"])
def test_a_dataset_without_a_name_is_refused(source: str) -> None:
    with pytest.raises(ConfigError, match=f"^{source} does not name a dataset"):
        load_rows(source, split="train")


def test_repeated_ids_are_errors(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "x", "row_id": "same"}\n' * 2, encoding="utf-8")
    with pytest.raises(DataError, match="two rows with row_id 'same'"):
        load_rows(str(tmp_path / "a.jsonl"), split="train")


@given(there=st.integers(1, 6), count=st.none() | st.integers(1, 6))
def test_a_count_is_an_upper_bound_for_every_source(
    there: int, count: int | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    records = [{"prompt": f"q{index}"} for index in range(there)]
    path = tmp_path_factory.mktemp("rows") / "a.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")

    def rows(split: str, count: int | None = None) -> Iterator[Any]:
        yield from records  # a function may give more or fewer than it was asked for

    from_file = load_rows(str(path), split="test", count=count)
    assert len(from_file) == (there if count is None else min(there, count))
    assert load_rows(rows, split="test", count=count) == from_file


def test_a_relative_path_is_looked_up_beside_the_recipe_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipe").mkdir()
    monkeypatch.chdir(tmp_path)

    def prompts(source: str, beside: Path | None = tmp_path / "recipe") -> list[Any]:
        return [row.prompt[0]["content"] for row in load_rows(source, split="test", beside=beside)]

    (tmp_path / "test.jsonl").write_text('{"prompt": "here"}', encoding="utf-8")
    assert prompts("{split}.jsonl") == ["here"]
    (tmp_path / "recipe" / "test.jsonl").write_text('{"prompt": "beside"}', encoding="utf-8")
    assert prompts("{split}.jsonl") == prompts(".") == ["beside"]
    assert prompts("{split}.jsonl", beside=None) == prompts(str(tmp_path / "{split}.jsonl")) == ["here"]
    with pytest.raises(DataError, match=r"no data file at .*recipe/no\.jsonl or .*no\.jsonl"):
        prompts("no.jsonl")
    with pytest.raises(DataError) as once:  # started in the recipe's folder, both are the same
        prompts("no.jsonl", beside=tmp_path)
    assert str(once.value) == f"no data file at {tmp_path / 'no.jsonl'}"


class Frame(list[str]):
    """Like a pandas frame: iterating over it gives column names."""

    def iterrows(self) -> None: ...


@pytest.mark.parametrize("returned", [None, "text", {"train": []}, Frame(["prompt"])])
def test_a_function_that_does_not_return_rows_is_named(returned: Any) -> None:
    def forgot(split: str) -> Any:
        return returned

    with pytest.raises(DataError, match=rf"test_rows\.forgot returned {type(returned).__name__} for split 'train'"):
        load_rows(forgot, split="train")


@given(total=st.integers(1, 12), count=st.integers(1, 9), seed=st.integers(0, 3))
def test_every_epoch_shows_each_row_once_and_order_depends_on_seed_and_step_only(
    total: int, count: int, seed: int
) -> None:
    rows = [TaskRow(prompt=[{"role": "user", "content": str(i)}], row_id=str(i)) for i in range(total)]
    steps = [rows_for_step(rows, step=step, count=count, seed=seed) for step in range(1, total + 1)]
    # `total` steps of `count` rows are exactly `count` epochs
    assert Counter(row.row_id for step in steps for row in step) == {str(i): count for i in range(total)}
    again = rows_for_step(rows, step=total, count=count, seed=seed)
    assert [row.row_id for row in again] == [row.row_id for row in steps[-1]]
