"""The viewer's index of episodes: equal to a slow reference, also while a run is written, resumed or deleted."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.errors import ConfigError
from agent_r1.runs.run_dir import RunDir
from agent_r1.runs.trajectories import RecordFile, trajectory_from_json, trajectory_to_json
from agent_r1.serve.view.index.episodes import EpisodeIndex, wait_until_read
from agent_r1.serve.view.index.summary import summarize
from agent_r1.serve.view.index.tail import MetricsTail
from agent_r1.serve.view.library import Library, NotFound
from agent_r1.types import StopReason
from tests.serve.small_runs import HOSTILE, add_step, make_episode, make_groups, make_run, make_step


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path / "shop")


def read(run: RunDir) -> EpisodeIndex:
    index = EpisodeIndex(run)
    wait_until_read(index, 60)
    return index


def find(index: EpisodeIndex, **asked: str) -> list[str]:
    rows = index.find(asked, offset=0, limit=10_000)["rows"]
    return [f"{row['file']}/{row['n']}" for row in rows]


def all_records(run: RunDir) -> Iterator[tuple[str, int, dict[str, Any]]]:
    for file in run.files():
        for n, record in enumerate(file):
            yield file.path.name.split(".")[0], n, record


def test_a_summary_counts_what_the_whole_record_says(run: RunDir) -> None:
    for file in run.files():
        for line, record in zip(file.lines(), file, strict=True):
            summary, text = summarize(line)
            episode = trajectory_from_json(record)
            assert summary.reward == episode.total_reward
            assert summary.tokens == episode.num_response_tokens
            assert summary.prompt_tokens == sum(len(step.prompt_ids) for step in episode.steps)
            assert (summary.steps, summary.stop, summary.row) == (len(episode.steps), episode.stop, episode.row_id)
            assert summary.roles == tuple(sorted({step.role for step in episode.steps} - {""}))
            assert summary.bad_calls == sum(call.error is not None for step in episode.steps for call in step.calls)
            assert (summary.sampling, summary.waiting) == (0.5 * len(episode.steps), 0.25 * len(episode.steps))
            assert all(step.action_text.casefold().encode() in text for step in episode.steps)


NAMES = st.sampled_from(["advantages", "prompt_ids", 'x"prompt_ids', "response_ids", "steps"])
VALUES = st.recursive(
    st.integers() | st.text('[]",: \\a', max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=2),
)


@given(arguments=st.dictionaries(NAMES, VALUES, max_size=3), text=st.text('"prompt_ids": [1, 2]\\{', max_size=40))
def test_arguments_and_texts_that_look_like_lists_of_tokens_do_not_change_the_counts(arguments: Any, text: str) -> None:
    step = make_step(text=text + "{it}", call={"arguments": arguments, "text_span": (0, 1)})
    record = trajectory_to_json(make_episode("row", 0, 1.0, step, step), {"advantages": [[0.5] * 4, [0.5] * 4]})
    for separators in ((", ", ": "), (",", ":")):
        summary, searched = summarize(json.dumps(record, separators=separators).encode())
        assert (summary.tokens, summary.prompt_tokens, summary.calls, summary.stop) == (8, 6, 2, "answered")
        assert text.casefold().encode() in searched


@pytest.mark.parametrize(
    ("asked", "keeps"),
    [
        ({}, lambda file, r: True),
        ({"kind": "eval"}, lambda file, r: file.startswith("eval")),
        ({"step": "2"}, lambda file, r: file.endswith("_000002")),
        ({"reward_min": "0.5"}, lambda file, r: r["total_reward"] >= 0.5),
        ({"reward_max": "0.1", "stop": "error"}, lambda file, r: r["total_reward"] <= 0.1 and r["stop"] == "error"),
        ({"stop": "error\nmax_steps"}, lambda file, r: r["stop"] in ("error", "max_steps")),
        ({"tool": "stock"}, lambda file, r: any(c["name"] == "stock" for s in r["steps"] for c in s["calls"])),
        ({"role": "seller"}, lambda file, r: any(s.get("role") == "seller" for s in r["steps"])),
        ({"role": "sell"}, lambda file, r: False),
        ({"text": "IT COSTS 2"}, lambda file, r: "It costs 2" in json.dumps(r)),
        ({"text": "onerror"}, lambda file, r: r["row_id"] == "hostile"),
        ({"text": "it broke"}, lambda file, r: r["stop"] == "error"),
        ({"row": "tea", "step_min": "1", "step_max": "2"}, lambda file, r: r["row_id"] == "tea" and file[-1] in "12"),
        ({"text": "no such words"}, lambda file, r: False),
    ],
)  # fmt: skip
def test_filters_find_what_a_scan_of_all_records_finds(run: RunDir, asked: dict[str, str], keeps: Any) -> None:
    expected = {f"{file}/{n}" for file, n, record in all_records(run) if keeps(file, record)}
    found = find(read(run), **asked)
    assert set(found) == expected
    assert len(found) == len(expected)


def test_episodes_are_sorted_paged_and_counted(run: RunDir) -> None:
    index = read(run)
    rewards = [row["reward"] for row in index.find({"sort": "-reward"}, offset=0, limit=99)["rows"]]
    assert rewards == sorted(rewards, reverse=True)
    steps = [row["step"] for row in index.find({}, offset=0, limit=99)["rows"]]
    assert steps == sorted(steps, reverse=True)  # newest first
    whole = index.find({"sort": "row"}, offset=0, limit=99)
    parts = [row for start in range(0, 20, 7) for row in index.find({"sort": "row"}, offset=start, limit=7)["rows"]]
    assert parts == whole["rows"]
    assert len(parts) == 20
    assert whole["stops"] == {"answered": 10, "error": 5, "max_steps": 5}
    assert whole["tools"] == {"price": 15, "stock": 5}
    # Of each file: 1.0, 0.0, 0.5 and 0.0 as outcomes; process rewards of calls are not added up by these steps.
    assert whole["mean_reward"] == pytest.approx(1.5 / 4)
    assert index.find({"tool": "stock"}, offset=0, limit=1)["stops"] == {"answered": 5, "error": 0, "max_steps": 0}
    with pytest.raises(ConfigError, match="cannot sort by 'rewards'"):
        index.find({"sort": "rewards"}, offset=0, limit=1)
    with pytest.raises(ConfigError, match="reward_min must be a number"):
        index.find({"reward_min": "much"}, offset=0, limit=1)


def test_a_few_of_many_episodes_are_spread_over_all(run: RunDir) -> None:
    found = read(run).find({"sort": "step"}, offset=0, limit=5, spread=True)
    assert found["matches"] == 20
    assert [f"{row['file']}/{row['n']}" for row in found["rows"]] == [
        "eval_000000/0", "train_000001/1", "train_000002/2", "eval_000003/2", "train_000003/3",
    ]  # fmt: skip


def test_errors_are_those_of_the_means_of_rows(run: RunDir) -> None:
    # Means of rows: tea (1 + 0) / 2 = 0.5, hostile 0.5, broken 0 (it failed). Their mean is 1/3, the squared
    # deviations 1/36 + 1/36 + 1/9 = 1/6, the variance 1/12, the standard error sqrt(1/12 / 3) = 1/6.
    [first, *_] = read(run).statistics(success_reward=1.0)["train"]
    assert first["reward_stderr"] == pytest.approx(1 / 6)
    # Successes of rows: 0.5, 0, 0. Mean 1/6, squared deviations 1/9 + 2/36 = 1/6: the same.
    assert first["success_stderr"] == pytest.approx(1 / 6)
    assert (first["step"], first["episodes"], first["sampling"], first["waiting"]) == (1, 4, 2.5, 1.25)


def test_a_growing_file_is_followed_and_a_half_written_line_waits(run: RunDir) -> None:
    index = read(run)
    before = len(find(index))
    path = run.trajectories_file("train", 3)
    line = path.read_bytes().splitlines()[0]
    with path.open("ab") as file:
        file.write(line[: len(line) // 2])
    wait_until_read(index, 60)
    assert len(find(index)) == before
    with path.open("ab") as file:
        file.write(line[len(line) // 2 :] + b"\n")
    wait_until_read(index, 60)
    assert len(find(index)) == before + 1
    assert "train_000003/4" in find(index, text="it costs 3")
    add_step(run, 4)
    wait_until_read(index, 60)
    assert find(index)[0] == "train_000004/0"


def test_a_resumed_run_replaces_its_later_steps(run: RunDir) -> None:
    index = read(run)
    run.forget_after(1)
    wait_until_read(index, 60)
    assert len(index.find({"step": "1"}, offset=0, limit=99)["rows"]) == 4
    assert {name.split("/")[0] for name in find(index)} == {"eval_000000", "train_000001"}
    run.write_trajectories("train", 2, make_groups(9)[:1])
    wait_until_read(index, 60)
    assert find(index, step="2") == ["train_000002/0", "train_000002/1"]
    assert find(index, text="it costs 9") == ["train_000002/0"]
    assert find(index, text="it costs 2") == []


def test_damaged_records_old_formats_and_newer_ones_have_a_row_each(run: RunDir) -> None:
    path = run.trajectories_file("train", 1)
    good = json.loads(path.read_text(encoding="utf-8").splitlines()[0])
    old = {key: value for key, value in good.items() if key not in ("format", "total_reward", "opening", "failure")}
    for step in old["steps"]:
        del step["advantages"], step["versions"], step["summary"], step["hidden_messages"]
    lines = [json.dumps(one) for one in (old, {**good, "format": 99}, {"steps": 5}, [1])] + [
        "{ not JSON",
        json.dumps(good),
    ]
    with gzip.open(run.path / "trajectories" / "train_000007.jsonl.gz", "wt") as file:
        file.write("\n".join(lines) + "\n")
    rows = read(run).find({"step": "7", "sort": "step"}, offset=0, limit=9)["rows"]
    assert [row["stop"] for row in rows] == ["answered", *["unreadable"] * 4, "answered"]
    assert rows[0]["reward"] == 1.0
    assert "format 99 is newer" in rows[1]["question"]


def test_one_file_can_be_read_at_once(run: RunDir) -> None:
    index = EpisodeIndex(run)
    assert [row["n"] for row in index.group("eval_000003", "tea")] == [0, 1]
    assert index.neighbours("eval_000003", "hostile") == {"before": "tea", "after": "broken"}
    assert index.group("eval_000003", "unknown") == []
    with pytest.raises(ConfigError, match=r"no episodes '\.\./config'"):
        index.require("../config")


def test_lines_from_a_position_are_the_rest_of_the_file(run: RunDir) -> None:
    file = RecordFile(run.trajectories_file("train", 1))
    lines = run.trajectories_file("train", 1).read_bytes().splitlines(keepends=True)
    for start in range(6):
        assert list(file.lines(start)) == lines[start:]


def test_metrics_are_followed_by_offset(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    assert tail.update() == []
    lines = [json.dumps({"kind": "train", "step": step, "x": 0.5}) + "\n" for step in range(4)]
    path.write_text(lines[0] + lines[1][:9])
    assert [record["step"] for record in tail.update()] == [0]
    path.write_text(lines[0] + lines[1] + "damaged\n[1]\n" + lines[2])
    assert [record["step"] for record in tail.update()] == [0, 1, 2]
    assert tail.generation == 0
    path.write_text(lines[0])  # resumed: forgotten steps
    assert [record["step"] for record in tail.update()] == [0]
    assert tail.generation == 1
    path.unlink()
    assert tail.update() == []


def test_runs_are_found_named_and_forgotten(tmp_path: Path) -> None:
    library = Library([tmp_path, tmp_path / "a" / "shop"])
    assert library.runs() == []
    for folder in ("a/shop", "b/shop", "b/deep/sh op"):
        make_run(tmp_path / folder)
    library = Library([tmp_path, tmp_path / "a" / "shop"])
    names = sorted(run.name for run in library.runs())
    assert names[0] == "sh_op"
    assert names[1] == "shop"
    assert names[2].startswith("shop~")
    assert len(names) == 3
    gone = library.run("sh_op").reader.path
    shutil.rmtree(gone)
    with pytest.raises(NotFound, match="moved, renamed or deleted"):
        library.run("sh_op")


def test_the_status_says_finished_running_or_no_news(tmp_path: Path) -> None:
    run = make_run(tmp_path / "shop", steps=3)
    [one] = Library([tmp_path]).runs()
    described = one.describe()
    assert (described["status"], described["steps"], described["total"]) == ("finished", 3, 3)
    assert described["spark"] == [(0, 0.2), (3, 0.5)]
    run.forget_after(2)
    assert one.describe()["status"] == "running"
    for path in run.path.iterdir():
        os.utime(path, (1, 1))
    assert one.describe()["status"] == "stopped"


def test_failures_are_no_success_whatever_they_earned(tmp_path: Path) -> None:
    run = make_run(tmp_path / "shop", steps=1)
    episode = make_episode("tea", 0, 1.0, make_step(), stop=StopReason.TIMEOUT)
    other = make_episode("milk", 0, 1.0, make_step())
    groups = make_groups(1)
    run.write_trajectories("train", 5, [type(groups[0])(row=groups[0].row, trajectories=[episode, other])])
    entry = read(run).statistics(1.0)["train"][-1]
    # Rows earned 0 (failed) and 1: squared deviations 1/4 + 1/4, variance 1/2, standard error sqrt(1/2 / 2) = 1/2.
    assert entry["success_stderr"] == pytest.approx(0.5)
    assert entry["reward_stderr"] == pytest.approx(0.5)


def test_the_hostile_text_of_these_tests_is_really_searched(run: RunDir) -> None:
    assert len(find(read(run), text=HOSTILE)) == 5
