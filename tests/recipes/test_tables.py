"""The recipe `tables`: data, rows, rewards, programs and the demonstrations made of them.

Nothing here needs the real data; where $AGENT_R1_SHARED_DATA names a folder that has them, they are checked too.
"""

from __future__ import annotations

import asyncio
import io
import json
import math
import os
import random
import tarfile
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from transformers import AutoTokenizer

from agent_r1.build.start import load_demos
from agent_r1.build.task import build_task
from agent_r1.config import load_config
from agent_r1.envs.check import check_env
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.errors import ConfigError, DataError
from agent_r1.flows.replay import replay
from agent_r1.recipes.tables import data, synthetic, task, tiny
from agent_r1.recipes.tables.answers import same_answers
from agent_r1.recipes.tables.programs import Condition, Kind, Program, as_python, as_sql, execute
from agent_r1.recipes.tables.sandbox import setup
from agent_r1.recipes.tables.sql import Database, SqlTool
from agent_r1.recipes.tables.synthesis import candidates, guess, synthesize
from agent_r1.recipes.tables.table import Table, make_table
from agent_r1.tools.python.sandbox import what_is_missing
from agent_r1.types import Step, StopReason, TaskRow, ToolCallRecord, Trajectory

HEADER = "id\tutterance\tcontext\ttargetValue\n"
FILES = {
    "data/training.tsv": f"{HEADER}nt-0\thow many  times did the reds play?\tcsv/1-csv/0.csv\t2\n"
    "nt-1\twhich teams played?\tcsv/1-csv/0.csv\tReds|Blues\n",
    "data/pristine-unseen-tables.tsv": f"{HEADER}nu-0\twho?\tcsv/1-csv/1.csv\tA\\pB\\\\n\\nC\n",
    "data/random-split-1-train.tsv": f"{HEADER}nt-0\thow many?\tcsv/1-csv/0.csv\t2\n",
    "data/random-split-1-dev.tsv": f"{HEADER}nt-1\twhich?\tcsv/1-csv/0.csv\tReds|Blues\n",
    "csv/1-csv/0.csv": '"Year","Team"\n"2001","Reds"\n"2002","Blues"\n"2003","Reds"\n',
    "csv/1-csv/1.csv": '"Name","Also\nknown as"\n"Craig \\"Buster\\" Davis","a,\nb"\n',
    "README.md": "not needed",
}
TEAMS = make_table(
    ["Year", "Team", "City", "Points", "Date"],
    [
        ["2001", "Reds", "Alby", "12", "June 20, 2001"],
        ["2002", "Blues", "Corford", "30", "May 1, 2002"],
        ["2003", "Greens", "Alby", "25", "July 4, 2003"],
        ["2004", "Golds", "Dunham", "", "March 3, 2004"],
    ],
)


def write_clone(folder: Path, changes: Mapping[str, str] | None = None) -> Path:
    for name, text in {**FILES, **(changes or {})}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def pack(to: Path, within: str = "") -> Path:
    with tarfile.open(to, "w:gz") as archive:
        for name, text in FILES.items():
            member = tarfile.TarInfo(within + name)
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    return to


# Data


def test_a_clone_of_the_repository_and_the_archive_give_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clone, kept = write_clone(tmp_path / "clone"), tmp_path / "kept"
    kept.mkdir()
    fetched = pack(kept / f"{data.COMMIT}.tar.gz", within="WikiTableQuestions-7d455a5/")  # as if it had been downloaded
    monkeypatch.setattr(data, "SHA256", data.content_hash(data.needed_files(fetched)))
    said: list[str] = []
    data.prepare(kept, said.append)
    data.prepare(kept, said.append)  # there is nothing left to do
    assert said[:4] == ["train: 2 questions", "test: 1 questions", "dev_train: 1 questions", "dev: 1 questions"]
    assert [path.name for path in kept.iterdir()] == [data.ARCHIVE]
    for split in data.SPLITS:
        assert task.rows(split, path=str(kept)) == task.rows(split, path=str(clone))


def test_a_download_that_changed_is_refused_and_not_kept(tmp_path: Path) -> None:
    pack(tmp_path / f"{data.COMMIT}.tar.gz")
    with pytest.raises(DataError, match=r"have the sha256 .*, but .* was expected: they changed"):
        data.prepare(tmp_path, lambda line: None)
    assert not (tmp_path / data.ARCHIVE).exists()


def test_the_hash_covers_names_and_contents() -> None:
    files = {"a": b"12", "b": b"3"}
    changed = [{"a": b"1", "b": b"23"}, {"a": b"12"}, {"a": b"12", "c": b"3"}]
    assert data.content_hash(files) not in {data.content_hash(each) for each in changed}
    assert data.content_hash(files) == data.content_hash(dict(reversed(files.items())))


def test_rows_ask_about_a_table_and_keep_the_answer_from_the_agent(tmp_path: Path) -> None:
    first, second = task.rows("train", path=str(write_clone(tmp_path)))
    assert first.prompt[0]["content"].splitlines() == [
        "Table t has 3 rows. Its columns, and its first rows:",
        "row | year | team",
        "1 | 2001 | Reds",
        "2 | 2002 | Blues",
        "3 | 2003 | Reds",
        "",
        "how many times did the reds play?",
        task.INSTRUCTION,
    ]
    assert (first.row_id, first.ground_truth, second.ground_truth) == ("nt-0", ["2"], ["Reds", "Blues"])
    assert len(task.rows("train", 1, path=str(tmp_path))) == 1
    asyncio.run(check_env(lambda: ToolEnv(tools=[SqlTool()], **first.env_kwargs), first, ["done"]))


def test_escapes_in_answers_and_tables_are_read(tmp_path: Path) -> None:
    read = data.opened(write_clone(tmp_path))
    (asked,) = data.questions("test", read)
    assert asked.answers == ("A|B\\n\nC",)
    table = data.read_table(asked.table, read)
    assert table.columns == ("row", "name", "also_known_as")
    assert table.rows == ((1, 'Craig "Buster" Davis', "a, b"),)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"data/training.tsv": "a\tb\n"}, r"training\.tsv has the columns 'a\\tb'"),
        ({"data/training.tsv": f"{HEADER}nt-0\tq\n"}, r"training\.tsv line 2 has 2 fields, expected 4"),
        ({"csv/1-csv/0.csv": '"a","b"\n"1"\n'}, r"csv/1-csv/0\.csv is not a table: row 1 of a table has 1 cells"),
        ({"csv/1-csv/0.csv": ""}, r"csv/1-csv/0\.csv is not a table"),
        ({"data/training.tsv": f"{HEADER}nt-0\tq\tcsv/9.csv\ta\n"}, r"csv/9\.csv cannot be read"),
    ],
)
def test_damaged_data_are_errors_that_name_the_file(tmp_path: Path, changes: dict[str, str], problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        task.rows("train", path=str(write_clone(tmp_path, changes)))


def test_missing_data_and_unknown_splits_are_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="agent-r1 data recipe tables"):
        task.rows("train", path=str(tmp_path))
    (tmp_path / data.ARCHIVE).write_bytes(b"not an archive")
    with pytest.raises(DataError, match=r"wtq\.tar\.xz cannot be read"):
        task.rows("train", path=str(tmp_path))
    with pytest.raises(ConfigError, match=r"unknown split 'tset'.*test"):
        task.rows("tset", path=str(write_clone(tmp_path)))


# Rewards

ROW = TaskRow(prompt=[{"role": "user", "content": "q"}], reward_model={"ground_truth": ["Chile", "Peru"]})


def episode(final: str, *errors: str | None, version: int = 0, stop: StopReason = StopReason.ANSWERED) -> Trajectory:
    """One call per step, each with its error, then the final text."""

    def step(text: str, calls: tuple[ToolCallRecord, ...] = ()) -> Step:
        versions = ((version, 1),)
        ids: dict[str, Any] = {"prompt_ids": [1], "response_ids": [2], "response_logprobs": [0.0]}
        return Step(**ids, action_text=text, calls=calls, versions=versions)

    calls = [ToolCallRecord(name="sql", arguments={}, result="", text_span=(0, 1), error=error) for error in errors]
    steps = [*(step("call", (call,)) for call in calls), step(final)]
    return Trajectory(row_id="r", trajectory_id="t", steps=steps, stop=stop)


def test_the_published_reward_is_the_sum_of_its_parts() -> None:
    right = asyncio.run(task.reward(ROW, episode("<answer>peru | chile</answer>", None, "no such column")))
    # three turns, one good call: 0.5 - 0.01 * 9 = 0.41
    parts = {"accuracy": 1.0, "format": 1.0, "tool": 0.41, "turns": 3.0, "good_calls": 1.0}
    assert right == pytest.approx({"reward": 1 + 1 + 0.41, **parts})
    wrong = asyncio.run(task.reward(ROW, episode("<answer>Chile</answer>", None)))
    assert wrong["reward"] == 1.0  # the format; the term for tools is paid with a right answer alone
    assert wrong["tool"] == pytest.approx(0.5 - 0.04)
    alone = asyncio.run(task.reward_accuracy(ROW, episode("<answer>peru | chile</answer>", None, "no such column")))
    assert alone == pytest.approx({"reward": 1.0, **parts})


def test_the_term_for_tools_decays_with_the_training_step() -> None:
    late = task.parts_of(ROW, episode("<answer>peru | chile</answer>", None, version=20))
    assert late["tool"] == pytest.approx(math.exp(-0.05 * 20) * (0.5 - 0.01 * 4))
    assert task.tool_term(0, turns=2, good_calls=0) == pytest.approx(-0.04)


@pytest.mark.parametrize(
    ("final", "accuracy", "form"),
    [
        ("<answer>Chile | Peru</answer>", 1.0, 1.0),
        ("So: <answer>Chile|Peru</answer>", 1.0, 0.0),
        ("<answer>Peru</answer> no, <answer>Chile|Peru</answer>", 1.0, 0.0),  # the last counts
        ("Chile | Peru", 0.0, 0.0),
        ("<answer></answer>", 0.0, 0.0),
        ("<answer>|</answer>", 0.0, 0.0),
        ("<answer>Chile | Peru", 0.0, 0.0),
    ],
)
def test_only_text_in_tags_is_an_answer(final: str, accuracy: float, form: float) -> None:
    parts = task.parts_of(ROW, episode(final, None))
    assert (parts["accuracy"], parts["format"]) == (accuracy, form)


def test_an_episode_that_was_cut_off_has_no_answer() -> None:
    parts = task.parts_of(ROW, episode("<answer>Chile|Peru</answer>", None, stop=StopReason.MAX_STEPS))
    assert (parts["accuracy"], parts["format"]) == (0.0, 0.0)


def test_the_threshold_of_success_separates_right_answers_in_the_format_from_all_others() -> None:
    config = load_config("tables", [])
    turns = range(1, config.rollout.max_steps + 1)
    terms = [task.tool_term(step, turns=t, good_calls=good) for step in (0, 10, 1000) for t in turns for good in (0, 1)]
    with_format, without = min(1 + 1 + term for term in terms), max(1 + term for term in terms)
    wrong = 1.0
    assert max(without, wrong) < config.task.success_reward < with_format


# Programs


@pytest.mark.parametrize(
    ("program", "sql", "items"),
    [
        (
            Program(
                kind=Kind.VALUES,
                target="team",
                conditions=(Condition(column="city", operator="contains", value="alby"),),
            ),
            "SELECT team FROM t WHERE city LIKE '%alby%'",
            ["Reds", "Greens"],
        ),
        (
            Program(kind=Kind.COUNT, conditions=(Condition(column="points", operator=">", value=20),)),
            "SELECT count(*) FROM t WHERE points > 20",
            ["2"],
        ),
        (Program(kind=Kind.DISTINCT, target="city"), "SELECT count(DISTINCT city) FROM t", ["3"]),
        (Program(kind=Kind.SUM, target="points"), "SELECT sum(points) FROM t", ["67"]),
        (Program(kind=Kind.LAST, target="team", by="points"), "SELECT team FROM t ORDER BY points DESC LIMIT 1", None),
        (
            Program(kind=Kind.FIRST, target="team", by="points"),
            "SELECT team FROM t ORDER BY points NULLS LAST LIMIT 1",
            ["Reds"],
        ),
        (
            Program(kind=Kind.LAST, target="team", by="date"),
            "SELECT team FROM t ORDER BY iso(date) DESC LIMIT 1",
            ["Golds"],
        ),
        (
            Program(
                kind=Kind.NEXT,
                target="team",
                conditions=(Condition(column="team", operator="contains", value="it's"),),
            ),
            "SELECT team FROM t WHERE row = (SELECT row FROM t WHERE team LIKE '%it''s%') + 1",
            [],
        ),
        (
            Program(
                kind=Kind.DIFFERENCE,
                by="points",
                conditions=(
                    Condition(column="team", operator="contains", value="Reds"),
                    Condition(column="team", operator="contains", value="Blues"),
                ),
            ),
            "SELECT abs((SELECT points FROM t WHERE team LIKE '%Reds%') - "
            "(SELECT points FROM t WHERE team LIKE '%Blues%'))",
            ["18"],
        ),
        (
            Program(
                kind=Kind.SAME,
                target="team",
                by="city",
                conditions=(Condition(column="team", operator="contains", value="Reds"),),
            ),
            "SELECT team FROM t WHERE city = (SELECT city FROM t WHERE team LIKE '%Reds%') "
            "AND NOT (team LIKE '%Reds%')",
            ["Greens"],
        ),
    ],
)
def test_programs_are_queries(program: Program, sql: str, items: list[str] | None) -> None:
    assert as_sql(program, TEAMS) == sql
    database = Database(TEAMS, seconds=5)
    assert execute(program, TEAMS, database) == (["Blues"] if items is None else items)
    database.close()


def printed(code: str, table: Table) -> list[str]:
    """What a program prints in the sandbox; programs are our own, so they may run here."""
    lines: list[str] = []
    exec(f"{setup(table)}\n{code}", {"print": lambda value: lines.append(str(value))})
    return lines


def test_programs_in_python_print_what_the_queries_return() -> None:
    for asked, table, program, items in islice(synthetic.draw("train", random.Random(0)), 100):
        code = as_python(program, table)
        assert code is not None
        assert same_answers(printed(code, table), items), (asked.text, code)


@pytest.mark.parametrize(
    ("kind", "items"),
    [
        (Kind.COMMON, ["Alby"]),
        (Kind.RARE, ["Corford"]),  # like Dunham; the first in the alphabet counts
        (Kind.VALUES, ["Alby", "Corford", "Dunham"]),
        (Kind.NEXT, ["Dunham"]),
        (Kind.PREVIOUS, ["Corford"]),
        (Kind.SAME, ["Alby"]),
    ],
)
def test_programs_in_both_languages_agree_on_ties_and_places(kind: Kind, items: list[str]) -> None:
    placed = kind in (Kind.NEXT, Kind.PREVIOUS, Kind.SAME)
    greens = (Condition(column="team", operator="contains", value="Greens"),) if placed else ()
    program = Program(kind=kind, target="city", by="city" if kind is Kind.SAME else "row", conditions=greens)
    database, code = Database(TEAMS, seconds=5), as_python(program, TEAMS)
    assert code is not None
    assert execute(program, TEAMS, database) == list(dict.fromkeys(printed(code, TEAMS))) == items
    database.close()


@pytest.mark.parametrize(
    ("question", "answers", "kind"),
    [
        ("which team had the most points?", ["Blues"], Kind.LAST),
        ("how many teams are from alby?", ["2"], Kind.COUNT),
        ("what city are the blues from?", ["Corford"], Kind.VALUES),
        ("who came after the blues?", ["Greens"], Kind.NEXT),
        ("which team is listed before the greens?", ["Blues"], Kind.PREVIOUS),
        ("what is the difference in points between the reds and the blues?", ["18"], Kind.DIFFERENCE),
        ("how many teams had more than 20 points?", ["2"], Kind.COUNT),
        ("what is the total number of points?", ["67"], Kind.SUM),
        ("who had more points, the reds or the greens?", ["Greens"], Kind.LAST),
        ("which other team is from the same city as the reds?", ["Greens"], Kind.SAME),
        ("how many different cities are there?", ["3"], Kind.DISTINCT),
        ("what was the date of the last game?", ["March 3, 2004"], Kind.LAST),
    ],
)
def test_questions_are_answered_by_programs_that_they_suggest(question: str, answers: list[str], kind: Kind) -> None:
    database = Database(TEAMS, seconds=5)
    found = synthesize(question, TEAMS, answers, database)
    assert found is not None
    program, items = found
    assert same_answers(items, answers)
    assert program.kind is kind, as_sql(program, TEAMS)
    database.close()


def test_a_question_without_a_program_is_left_out() -> None:
    database = Database(TEAMS, seconds=5)
    assert synthesize("why?", TEAMS, ["because"], database) is None
    assert guess("why?", TEAMS, database) is None
    assert len(candidates("how many teams are there?", TEAMS)) == len(
        set(candidates("how many teams are there?", TEAMS))
    )
    database.close()


# Demonstrations


def score(row: TaskRow, texts: list[str], tool: Any) -> dict[str, float]:
    trajectory = asyncio.run(replay(ToolEnv, row, texts, tools=[tool]))
    return asyncio.run(task.reward(row, trajectory))


def test_synthetic_demonstrations_earn_the_reward() -> None:
    shown = synthetic.demos(40, 0)
    assert shown == synthetic.demos(40, 0)
    for row, texts in shown:
        assert score(row, texts, SqlTool())["reward"] == pytest.approx(2.46)  # 1 + 1 + 0.5 - 0.01 * 2^2


def test_synthetic_splits_do_not_overlap() -> None:
    train, test = ({json.dumps(row.prompt) for row in synthetic.rows(split, 200)} for split in ("train", "test"))
    assert not train & test
    with pytest.raises(ConfigError, match="unknown split 'dev'"):
        synthetic.rows("dev")


def test_test_tables_have_people_and_headers_that_no_training_table_has() -> None:
    headers, people = {}, {}
    for split in ("train", "test"):
        drawn = [table for _, table, _, _ in islice(synthetic.draw(split, random.Random(0)), 300)]
        headers[split] = {frozenset(table.columns) for table in drawn}
        people[split] = {name for table in drawn for name in table.values(table.columns[1])}
        assert len(headers[split]) > 50
    assert not headers["train"] & headers["test"]
    assert not people["train"] & people["test"]


def test_generated_questions_are_of_all_kinds_and_reproducible() -> None:
    assert synthetic.rows("test", 5) == synthetic.rows("test", 60)[:5]
    kinds = {row.data_source for row in synthetic.rows("test", 200)}
    asked = {Kind.COUNT, Kind.DISTINCT, Kind.FIRST, Kind.LAST, Kind.NEXT, Kind.PREVIOUS, Kind.SUM, Kind.VALUES}
    assert kinds == {f"tables/{kind}" for kind in asked}


def test_loose_demonstrations_make_valid_queries_and_are_mostly_wrong() -> None:
    shown = synthetic.loose_demos(200, 0)
    assert shown == synthetic.loose_demos(200, 0)
    parts = [score(row, texts, SqlTool(seconds=10.0)) for row, texts in shown]
    assert {(each["format"], each["good_calls"]) for each in parts} == {(1.0, 1.0)}
    assert 0.3 < fmean(each["accuracy"] for each in parts) < 0.5


def test_the_likeliest_program_answers_four_fifths_of_the_held_out_questions() -> None:
    right = []
    for asked, table, _, items in islice(synthetic.draw("test", random.Random("rows:test")), 200):
        database = Database(table, seconds=synthetic.SECONDS)
        found = guess(asked.text, table, database)
        right.append(found is not None and same_answers(found[1], items))
        database.close()
    assert sum(right) == 164  # 82 %, as README.md says


def test_a_name_or_a_column_is_as_many_tokens_in_a_query_as_in_the_question(tmp_path: Path) -> None:
    tiny.make_tiny_model(tmp_path, 0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)

    def pieces(text: str) -> list[str]:
        return [tokenizer.decode([each]) for each in tokenizer.encode(text)]

    assert {"Ada", "Ash", " points"} <= set(pieces("how many points does Ada Ash have?"))
    assert {"Ada", "Ash", " points"} <= set(pieces("SELECT points FROM t WHERE player LIKE '%Ada Ash%'"))
    assert len(pieces(task.INSTRUCTION)) == 1


def test_demonstrations_answer_training_questions(tmp_path: Path) -> None:
    path = str(write_clone(tmp_path))
    for row, texts in task.demos(10, 0, path):
        assert score(row, texts, SqlTool())["accuracy"] == 1.0
    assert [row.row_id for row, _ in task.demos(10, 0, path)] == ["demo-nt-0"]
    assert [row.row_id for row, _ in task.python_demos(10, 0, path)] == ["demo-nt-0"]
    assert [row.row_id for row, _ in task.dev_demos(10, 0, path)] == ["demo-nt-0"]
    nothing = {"data/training.tsv": f"{HEADER}nt-0\twhy?\tcsv/1-csv/0.csv\tbecause\n"}
    other = str(write_clone(tmp_path / "other", nothing))
    with pytest.raises(DataError, match="no program answers any of 1 questions"):
        task.demos(10, 0, other)


def test_python_demonstrations_earn_the_reward_in_the_sandbox() -> None:
    level = "process" if what_is_missing("namespaces") else "namespaces"
    tool = task.TablePython(level=level)
    for row, texts in synthetic.python_demos(6, 0):
        assert score(row, texts, tool)["reward"] == pytest.approx(2.46)


@pytest.mark.parametrize("preset", ["tables", "tables/steppo", "tables/python"])
def test_every_preset_builds_with_a_local_copy(preset: str, tmp_path: Path) -> None:
    built = build_task(load_config(preset, [f"data.path={write_clone(tmp_path)}"]))
    assert [row.row_id for row in built.train_rows()] == ["nt-0", "nt-1"]


@pytest.mark.parametrize("preset", ["tables/dev", "tables/steppo+dev"])
def test_runs_that_are_evaluated_on_dev_neither_train_nor_start_on_its_questions(preset: str, tmp_path: Path) -> None:
    same = {"data/random-split-1-train.tsv": FILES["data/training.tsv"].rpartition("nt-1")[0]}
    same["data/random-split-1-dev.tsv"] = f"{HEADER}nt-1\thow many teams are there?\tcsv/1-csv/0.csv\t3\n"
    same["data/training.tsv"] = (
        same["data/random-split-1-train.tsv"] + same["data/random-split-1-dev.tsv"].split("\n")[1]
    )
    config = load_config(preset, [f"data.path={write_clone(tmp_path, same)}"])
    built = build_task(config)
    asked = [row.row_id for row in built.train_rows()] + [row.row_id for row, _ in load_demos(config)]
    assert asked == ["nt-0", "demo-nt-0"]
    [held_out] = built.test_rows()
    assert held_out.row_id == "nt-1"
    assert {row.row_id for row, _ in task.demos(10, 0, config.data.path)} == {"demo-nt-0", "demo-nt-1"}  # has both


# The real data


@pytest.mark.skipif("AGENT_R1_SHARED_DATA" not in os.environ, reason="needs a local copy of the data")
def test_the_reward_accepts_the_answer_of_every_real_row() -> None:
    folder = Path(os.environ["AGENT_R1_SHARED_DATA"]) / "wikitablequestions"
    assert data.content_hash(data.needed_files(folder / data.ARCHIVE)) == data.SHA256
    read = data.opened(folder)
    sizes = {split: len(data.questions(split, read)) for split in data.SPLITS}
    assert sizes == {"train": 14152, "test": 4344, "dev_train": 11321, "dev": 2831}
    tables = {split: {asked.table for asked in data.questions(split, read)} for split in data.SPLITS}
    assert not tables["train"] & tables["test"]
    assert not tables["dev_train"] & tables["dev"]
    for split in ("train", "test"):
        for row in task.rows(split, path=str(folder)):
            gold = episode(f"<answer>{' | '.join(row.ground_truth)}</answer>", None)
            assert asyncio.run(task.reward(row, gold))["reward"] == pytest.approx(2.46), row.row_id
