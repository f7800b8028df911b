"""The recipes gsm8k and gsm8k_tool: demonstrations from marked solutions, the reward, access to the ground truth."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.build.plan import build_plan
from agent_r1.build.task import build_task
from agent_r1.config import load_config
from agent_r1.envs.base import merge_env_kwargs
from agent_r1.envs.check import check_env, check_tool
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.errors import ConfigError, DataError
from agent_r1.recipes.gsm8k import data, synthetic
from agent_r1.recipes.gsm8k import task as plain
from agent_r1.recipes.gsm8k_tool import synthetic as synthetic_tool
from agent_r1.recipes.gsm8k_tool import task
from agent_r1.tokens.formats.table import FORMATS
from agent_r1.tools.base import BaseTool
from agent_r1.tools.calculator import evaluate
from agent_r1.types import Action, Step, StopReason, TaskRow, ToolCallRecord, Trajectory

SHARED = os.environ.get("AGENT_R1_SHARED_DATA")
NATALIA = data.Problem(
    name="train-0",
    question="Natalia sold clips to 48 friends in April, and half as many in May. How many in all?",
    solution=(
        "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n"
        "Natalia sold 48+24 = <<48+24=72>>72 clips altogether in April and May."
    ),
    answer="72",
)
WENG = data.Problem(
    name="train-1",
    question="Weng earns $12 an hour. Yesterday she worked 50 minutes. How much did she earn?",
    solution=(
        "Weng earns 12/60 = $<<12/60=0.2>>0.2 per minute.\nWorking 50 minutes, she earned 0.2 x 50 = $<<0.2*50=10>>10."
    ),
    answer="10",
)


def call(expression: str) -> str:
    return FORMATS["hermes"].write_call("calculator", {"expression": expression})


def problem(solution: str) -> data.Problem:
    return data.Problem(name="p", question="?", solution=solution, answer="1")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """As published: one split plain, one gzipped."""
    train = [{"question": p.question, "answer": f"{p.solution}\n#### {p.answer}"} for p in (NATALIA, WENG)]
    test = [{"question": "How much is it?", "answer": "It is 500*2=<<500*2=1000>>1,000.\n#### 1,000"}]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, train)), encoding="utf-8")
    (tmp_path / "test.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, test)).encode()))
    return tmp_path


# Data


def test_files_are_read_plain_or_gzipped(folder: Path) -> None:
    assert data.problems("train", str(folder)) == [NATALIA, WENG]
    [test] = data.problems("test", str(folder))
    assert (test.name, test.answer) == ("test-0", "1000")  # without its comma


def test_bad_data_is_an_error_that_names_the_record(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'tran'.*'train'"):
        data.problems("tran", str(folder))
    with pytest.raises(DataError, match=r"train\.jsonl\.gz"):
        data.problems("train", str(tmp_path / "nowhere"))
    for line, message in (
        ('{"question": "?", "answer": "no mark"}', "record 1: .*####"),
        ('{"question": "?", "answer": "#### twelve"}', "record 1: .*'twelve'"),
        ('{"question": "?", "answer": "#### 1e3"}', "record 1: .*'1e3'"),
        ('{"question": "?"}', "record 1: .*KeyError"),
        ("[1]", "record 1: .*TypeError"),
        ("not json", "line 1 .*Expecting value"),
    ):
        (folder / "train.jsonl").write_text(line, encoding="utf-8")
        with pytest.raises(DataError, match=message):
            data.problems("train", str(folder))


def test_the_data_directory_is_the_default_path(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_R1_DATA", str(tmp_path / "data"))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "gsm8k").symlink_to(folder)
    assert data.problems("train", None) == [NATALIA, WENG]


def test_the_recipe_reads_its_rows_from_data_path(folder: Path) -> None:
    for recipe in ("gsm8k", "gsm8k_tool"):
        made_task = build_task(load_config(recipe, [f"data.path={folder}"]))
        assert [row.row_id for row in made_task.train_rows()] == ["train-0", "train-1"]
        assert [row.ground_truth for row in made_task.test_rows()] == ["1000"]


# Demonstrations


def test_plain_demonstrations_are_solutions_without_marks(folder: Path) -> None:
    shown = {row.row_id: texts for row, texts in plain.demos(count=5, seed=0, path=str(folder))}
    assert shown["train-0"] == [
        "Natalia sold 48/2 = 24 clips in May.\nNatalia sold 48+24 = 72 clips altogether in April and May.\n#### 72"
    ]


def test_every_mark_becomes_a_call_within_its_sentence() -> None:
    assert task.demonstration(NATALIA) == [
        f"Natalia sold 48/2 =\n{call('48/2')}",
        f"24 clips in May.\nNatalia sold 48+24 =\n{call('48+24')}",
        "72 clips altogether in April and May.\n#### 72",
    ]


def test_a_currency_sign_stays_with_its_number() -> None:
    assert task.demonstration(WENG) == [
        f"Weng earns 12/60 =\n{call('12/60')}",
        f"$0.2 per minute.\nWorking 50 minutes, she earned 0.2 x 50 =\n{call('0.2*50')}",
        "$10.\n#### 10",
    ]


@pytest.mark.parametrize(
    "solution",
    [
        "No calculation at all.",
        "It is 2+2 = <<2+2=5>>5.",
        "A third is <<100/3=33.33>>33.33.",  # rounded
        "First <<1+1=2>>2, then <<2*2=5>>5.",  # one wrong mark is enough
        "It is <<one+one=2>>2.",
        "It is <<1/0=0>>0.",
    ],
)
def test_solutions_with_missing_or_wrong_marks_give_no_demonstration(solution: str) -> None:
    assert task.demonstration(problem(solution)) == []


def test_demonstrations_depend_on_the_seed_and_end_with_the_data(folder: Path) -> None:
    for demos in (plain.demos, task.demos, task.oracle_demos):
        assert len(demos(count=99, seed=0, path=str(folder))) == 2
        assert demos(count=1, seed=3, path=str(folder)) == demos(count=1, seed=3, path=str(folder))


# Synthetic problems


def numbers_of(asked: data.Problem) -> tuple[int, ...]:
    """The three it was made from, in order of size."""
    first, second, third = map(int, plain.NUMBER.findall(asked.question))
    return tuple(sorted((first, second // first if "share" in asked.question else second, third)))


def test_synthetic_problems_solve_themselves_and_share_no_numbers_between_splits() -> None:
    train, test = synthetic.problems("train", 400, seed=0), synthetic.problems("test", 200, seed=0)
    assert not {numbers_of(p) for p in train} & {numbers_of(p) for p in test}
    for p in train + test:
        *_, (expression, result) = task.MARK.findall(p.solution)
        assert evaluate(expression) == evaluate(result) == int(p.answer)
        assert len(task.demonstration(p)) == 3  # two calculations, one answer
    assert synthetic.problems("train", 5, seed=0) == train[:5]
    assert synthetic.problems("train", 5, seed=1) != train[:5]
    with pytest.raises(ConfigError, match="unknown split 'tst'"):
        synthetic.problems("tst", 1, seed=0)


@given(st.tuples(*[st.integers(synthetic.SMALLEST, synthetic.LARGEST)] * 3))
def test_every_story_is_right_for_all_numbers(numbers: tuple[int, int, int]) -> None:
    for story in synthetic.STORIES:
        _, solution, answer = story(*numbers)
        marks = task.MARK.findall(solution)
        assert all(evaluate(expression) == evaluate(result) for expression, result in marks)
        assert marks[-1][1] == str(answer)


def test_synthetic_rows_name_their_source() -> None:
    for rows in (synthetic.rows, synthetic_tool.rows):
        assert {row.data_source for row in rows("test", 3)} == {"synthetic"}


# The reward


def ended(text: str, *calls: ToolCallRecord, stop: StopReason = StopReason.ANSWERED) -> Trajectory:
    step = Step(prompt_ids=[1], response_ids=[2], response_logprobs=[0.0], action_text=text, calls=calls)
    return Trajectory(row_id="r", trajectory_id="t", steps=[step], stop=stop)


@pytest.mark.parametrize(
    ("text", "truth", "reward", "form", "last_number"),
    [
        ("It is 72.\n#### 72", "72", 1, 1, 1),
        ("#### 1,000.00", "1000", 1, 1, 1),
        ("#### $5", "5", 1, 1, 1),
        ("####5", "5", 1, 1, 1),
        ("#### 5.", "5", 1, 1, 1),
        ("#### 0.50", ".5", 1, 1, 1),
        ("#### -3", "-3", 1, 1, 1),
        ("#### 72 clips", "72", 1, 1, 1),
        ("#### 72\nand 3 more words", "72", 1, 1, 0),  # text after it does no harm
        ("#### 71\n#### 72", "72", 1, 1, 1),  # the last counts
        ("#### 72\n#### 71", "72", 0, 1, 0),
        ("#### 71", "72", 0, 1, 0),
        ("#### 720", "72", 0, 1, 0),
        ("It is 72.", "72", 0, 0, 1),  # no mark
        ("It is 72.\n####", "72", 0, 0, 1),
        ("#### seventy-two", "72", 0, 0, 0),
        ("", "72", 0, 0, 0),
        ("#### " + "9" * 5000, "72", 0, 1, 0),  # more digits than Python turns into an int
        # markup and currency around the number
        ("#### **72**", "72", 1, 1, 1),
        ("#### `72`", "72", 1, 1, 1),
        ("**#### 72**", "72", 1, 1, 1),
        ("#### -$72", "-72", 1, 1, 1),
        ("#### $-72", "-72", 1, 1, 1),
        ("#### \\$1,250", "1250", 1, 1, 1),
        ("#### $72$", "72", 1, 1, 1),
        ("#### €72", "72", 1, 1, 1),
        ("####: 72", "72", 1, 1, 1),
        # the first number of something else is no answer
        ("#### 1/2", "1", 0, 0, 0),
        ("#### 1 / 2", "1", 0, 0, 0),
        ("#### 3 1/2", "3", 0, 0, 0),
        ("#### 3-5", "3", 0, 0, 0),
        ("#### $3-$5", "3", 0, 0, 0),
        ("#### 24 + 48 = 72", "24", 0, 0, 0),
        ("#### 2**3", "2", 0, 0, 0),
        ("#### 2x3", "2", 0, 0, 0),
        ("#### 2*(3+4)", "2", 0, 0, 0),
        ("#### 72 \u2212 10", "72", 0, 0, 0),  # a minus sign
        ("#### 72\u201375", "72", 0, 0, 0),  # a range
        ("#### 2\u00b73", "2", 0, 0, 0),
        ("#### 6\u00bd", "6", 0, 0, 1),
        ("#### 6 \u00bd", "6", 0, 0, 1),
        ("#### 2\u00b2", "2", 0, 0, 1),
        ("#### \u221272", "-72", 1, 1, 1),
        ("#### \u2212$72", "-72", 1, 1, 1),
        ("#### \u221272", "72", 0, 1, 0),
        ("#### 3:30", "3", 0, 0, 0),
        ("#### 1e3", "1", 0, 0, 0),
        ("#### 1.2.3", "1.2", 0, 0, 0),
        # but words, lists and punctuation after it are
        ("#### 72-hour", "72", 1, 1, 1),
        ("#### 72\n- 3 of them", "72", 1, 1, 0),
        ("#### 72, 3 of them", "72", 1, 1, 0),
        # a comma parts thousands, and nothing else
        ("#### 7,2", "72", 0, 0, 0),
        ("#### 7,2", "7", 0, 0, 0),
        ("#### 1,0000", "10000", 0, 0, 0),
        ("#### 1,000,00", "100000", 0, 0, 0),
        ("#### 12,345,678", "12345678", 1, 1, 1),
    ],
)
def test_the_number_after_the_last_mark_is_the_answer(
    text: str, truth: str, reward: float, form: float, last_number: float
) -> None:
    row = TaskRow(prompt=[], reward_model={"ground_truth": truth})
    parts = {"reward": reward, "format": form, "last_number": last_number}
    assert asyncio.run(plain.reward(row, ended(text))) == parts
    assert asyncio.run(task.reward(row, ended(text))) == parts | {"calls": 0, "bad_calls": 0}


@given(st.decimals(-(10**12), 10**12, places=2))
def test_thousands_separators_and_markup_do_not_change_a_number(number: Decimal) -> None:
    every_part = {"reward": 1, "format": 1, "last_number": 1}
    for text in (f"{number}", f"{number:,}", f"**{number:,}** clips", f"{number:,}".replace("-", "-$")):
        assert plain.judged(f"#### {text}", str(number)) == every_part


@pytest.mark.parametrize("stop", [stop for stop in StopReason if stop is not StopReason.ANSWERED])
def test_a_truncated_episode_has_no_answer(stop: StopReason) -> None:
    row, cut = TaskRow(prompt=[], reward_model={"ground_truth": "12"}), ended("#### 12", stop=stop)  # of #### 125
    nothing = {"reward": 0, "format": 0, "last_number": 0}
    assert asyncio.run(plain.reward(row, cut)) == nothing
    assert asyncio.run(task.reward(row, cut)) == nothing | {"calls": 0, "bad_calls": 0}


@given(st.text())
def test_no_text_breaks_the_reward(text: str) -> None:
    assert set(plain.judged(f"#### {text}", "72").values()) <= {0.0, 1.0}


def test_calls_are_counted_but_not_rewarded() -> None:
    good = ToolCallRecord(name="calculator", arguments={}, result="1", text_span=(0, 1))
    bad = ToolCallRecord(name="calculator", arguments={}, result="no", text_span=(0, 1), error="no")
    row = TaskRow(prompt=[], reward_model={"ground_truth": "1"})
    parts = asyncio.run(task.reward(row, ended("#### 1", good, bad, good)))
    assert (parts["reward"], parts["calls"], parts["bad_calls"]) == (1, 3, 1)


# Access to the ground truth


def play(row: TaskRow, tools: list[BaseTool], *texts: str) -> list[str]:
    """What the tools say."""

    async def episode() -> list[str]:
        env = ToolEnv(**merge_env_kwargs({"tools": tools}, row))
        await env.reset(row.without_ground_truth())
        transitions = [await env.step(Action(text=text, token_ids=[])) for text in texts]
        return [record.result for transition in transitions for record in transition.calls]

    return asyncio.run(episode())


def test_only_oracle_rows_give_the_tool_the_ground_truth(folder: Path) -> None:
    asked = [FORMATS["hermes"].write_call("oracle_check", {"answer": answer}) for answer in ("71", "72", "$72.00")]
    tools: list[BaseTool] = [task.calculator, task.oracle_check]
    [oracle] = task.oracle_rows("train", 1, str(folder))
    assert play(oracle, tools, *asked) == ["wrong", "right", "right"]
    [row] = task.rows("train", 1, str(folder))
    assert "72" not in repr(row.without_ground_truth())
    with pytest.raises(ConfigError, match=r"'oracle_check' .*'ground_truth'"):
        play(row, tools)


def test_the_oracle_never_shows_the_answer_to_the_model(folder: Path) -> None:
    assert list(task.oracle_check.schema["function"]["parameters"]["properties"]) == ["answer"]
    asyncio.run(check_tool(task.oracle_check, {"answer": "3"}, {"ground_truth": "72"}))


def test_only_the_preset_oracle_has_the_oracle(folder: Path) -> None:
    data_path = f"data.path={folder}"
    for preset in ("gsm8k_tool", "gsm8k_tool/qwen2_5_1_5b", "gsm8k_tool/qwen3_4b"):
        config = load_config(preset, [data_path])
        assert config.task.tools == ["task.calculator"]
        assert all(not row.env_kwargs for row in build_plan(config).train_rows)
    config = load_config("gsm8k_tool/oracle", [data_path])
    assert config.task.tools == ["task.calculator", "task.oracle_check"]
    assert all(row.env_kwargs for row in build_plan(config).train_rows)
    for row, texts in task.oracle_demos(count=2, seed=0, path=str(folder)):  # the warm start plays there too
        assert all(play(row, [task.calculator, task.oracle_check], *texts))


def test_the_env_keeps_its_contract_on_a_demonstration() -> None:
    row = plain.as_row(NATALIA, task.SYSTEM)
    asyncio.run(check_env(lambda: ToolEnv(tools=[task.calculator]), row, task.demonstration(NATALIA)))


# The published data


@pytest.mark.skipif(SHARED is None, reason="AGENT_R1_SHARED_DATA names no folder with the published files")
def test_nearly_all_training_problems_give_a_demonstration_that_is_right_when_played() -> None:
    path = f"{SHARED}/gsm8k"
    assert (len(data.problems("train", path)), len(data.problems("test", path))) == (7473, 1319)
    shown = task.demos(count=10_000, seed=0, path=path)
    assert len(shown) == 7152
    assert len({row.row_id for row, _ in shown}) == 7152

    async def play_all() -> None:
        for row, texts in shown:
            env = ToolEnv(tools=[task.calculator])
            await env.reset(row.without_ground_truth())
            *calls, last = [await env.step(Action(text=text, token_ids=[])) for text in texts]
            assert [record.error for transition in calls for record in transition.calls] == [None] * len(calls)
            assert last.stop is StopReason.ANSWERED
            assert plain.judged(texts[-1], row.ground_truth)["reward"] == 1
            assert "<<" not in "".join(texts)

    asyncio.run(play_all())
    for row, (text,) in plain.demos(count=10_000, seed=0, path=path):
        assert plain.judged(text, row.ground_truth) == {"reward": 1, "format": 1, "last_number": 1}
