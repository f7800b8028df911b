"""The recipe retool: training data without evaluation problems, answers, demonstrations, reward."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_r1.build.plan import build_plan
from agent_r1.build.recipe import prepare_data
from agent_r1.config import load_config
from agent_r1.envs.check import check_env, check_tool
from agent_r1.envs.python_env import PythonEnv
from agent_r1.errors import ConfigError, DataError
from agent_r1.recipes.retool import answers, data, gsm8k, synthetic
from agent_r1.recipes.retool.answers import same_answer
from agent_r1.recipes.retool.data import (
    EVALUATION,
    SOURCES,
    Problem,
    boxed,
    clean,
    find,
    judged,
    marks,
    problems,
    reduced,
    split_problems,
)
from agent_r1.recipes.retool.paid import PaidPythonTool
from agent_r1.recipes.retool.task import reward, rows
from agent_r1.tokens.formats.table import FORMATS
from agent_r1.tools.base import ToolError
from agent_r1.tools.python.process import KilledBy, Outcome
from agent_r1.tools.python.sandbox import GUARANTEES, LEVELS, what_is_missing
from agent_r1.tools.python.tool import PythonTool
from agent_r1.types import Action, Step, StopReason, TaskRow, ToolCallRecord, Trajectory

SHARED = os.environ.get("AGENT_R1_SHARED_DATA")
NATALIA = (
    "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n"
    "Natalia sold 48+24 = <<48+24=72>>72 clips altogether in April and May.\n#### 72"
)


def write_folder(folder: Path) -> Path:
    """The layout of the published files, with a problem or two in each."""
    lines = {
        "math500.jsonl": [{"problem": "What is $1+1$?", "answer": "2"}],
        "math_test_5000.jsonl.gz": [{"problem": "Find $x$.", "solution": "It is $\\boxed{\\frac{1}{2}}$."}],
        "aime24.jsonl": [{"input": "A24", "output": "45"}],
        "aime25.jsonl.gz": [{"input": "A25", "output": "70"}],
        "gsm8k/train.jsonl": [
            {"question": "How many clips?", "answer": NATALIA},
            {"question": "How much?", "answer": "It is 500*2 = <<500*2=1000>>1,000.\n#### 1,000"},  # judged
        ],
        "gsm8k/test.jsonl": [{"question": "How much?", "answer": "It is 1,000.\n#### 1,000"}],
    }
    whole = {
        "math_train_7474_deepscaler.json": [
            {"problem": "what is \\(1 + 1\\)?", "answer": "2"},  # MATH-500 again, written otherwise
            {"problem": "Kept.", "answer": "(3, -1)"},
            {"problem": "Kept!", "answer": "(3, -1)"},  # a second time
            {"problem": "No answer.", "answer": None},
        ],
        "amc23_deepscaler.json.gz": [{"problem": "AMC", "answer": 142.0}],
    }
    texts = {name: "\n".join(map(json.dumps, records)) for name, records in lines.items()}
    for name, text in {**texts, **{name: json.dumps(records) for name, records in whole.items()}}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "math")


def ended(text: str, stop: StopReason = StopReason.ANSWERED) -> Trajectory:
    step = Step(prompt_ids=[1], response_ids=[2], response_logprobs=[0.0], action_text=text)
    return Trajectory(row_id="r", trajectory_id="t", steps=[step], stop=stop)


def row_with(answer: str) -> TaskRow:
    return TaskRow(prompt=[{"role": "user", "content": "?"}], reward_model={"ground_truth": answer})


# -- data -------------------------------------------------------------------------------------------------------------


def test_plain_and_gzipped_files_with_any_known_columns_are_read(folder: Path) -> None:
    assert problems(folder, "math_test") == [Problem(text="Find $x$.", answer="\\frac{1}{2}")]
    assert [p.answer for p in problems(folder, "amc23")] == ["142"]
    assert [p.answer for p in problems(folder, "gsm8k_test")] == ["1000"]
    assert [p.answer for p in problems(folder, "aime25")] == ["70"]


def test_training_excludes_evaluation_problems_duplicates_and_problems_without_answer(folder: Path) -> None:
    assert [p.text for _, p in split_problems(folder, "math_train")] == ["Kept."]
    assert [p.text for _, p in split_problems(folder, "test")] == ["What is $1+1$?"], "evaluation sets are not filtered"


def test_preparing_skips_existing_files_and_reports_every_split(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dapo = {"prompt": [{"role": "user", "content": "D"}], "reward_model": {"ground_truth": "34"}}
    pq.write_table(pa.Table.from_pylist([dapo]), folder / "dapo_math_17k.parquet")
    monkeypatch.setenv("AGENT_R1_DATA", str(folder.parent))
    folder.rename(folder.parent / "retool")  # where runs look for the data of this recipe
    said: list[str] = []
    assert prepare_data("retool", None, said.append) == folder.parent / "retool"
    assert [line.partition(":")[0] for line in said] == list(data.SPLITS)
    assert {"dapo: 1 problems", "math_train: 1 problems", "train: 2 problems"} <= set(said)


def test_gsm8k_records_are_read_by_the_gsm8k_recipe(folder: Path) -> None:
    (folder / "gsm8k" / "test.jsonl").write_text('{"question": "How much?", "answer": "no mark"}', encoding="utf-8")
    with pytest.raises(DataError, match=r"gsm8k/test.jsonl record 1: .*####"):
        problems(folder, "gsm8k_test")


def test_gsm8k_is_also_found_beside_the_folder(folder: Path) -> None:
    (folder / "gsm8k").rename(folder.parent / "gsm8k")
    assert find(folder, SOURCES["gsm8k_train"]) == folder.parent / "gsm8k" / "train.jsonl"
    assert len(judged(folder)) == 12  # two marks of each of six problems
    for file in (folder.parent / "gsm8k").iterdir():
        file.unlink()
    assert len(judged(folder)) == 10, "GSM8K is optional"


def test_training_requires_all_evaluation_sets(folder: Path) -> None:
    (folder / "aime24.jsonl").unlink()
    with pytest.raises(DataError, match=r"aime24.jsonl .*agent-r1 data recipe retool"):
        split_problems(folder, "math_train")


def test_broken_files_and_unknown_splits_are_errors(folder: Path) -> None:
    (folder / "math500.jsonl").write_text("{", encoding="utf-8")
    with pytest.raises(DataError, match=r"math500.jsonl"):
        problems(folder, "math500")
    with pytest.raises(ConfigError, match=r"'aime42'.*'aime2"):
        rows("aime42", path=str(folder))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("aime24", '{"input": "A24", "output": "45"}\n{"problem": "A24", "answer": "45"}'),
        ("aime24", '{"input": "A24", "output": "45"}\n{"input": "A24", "output": 45}'),
        ("aime24", '{"input": "A24", "output": "45"}\n["A24", "45"]'),
        ("amc23", '[{"problem": "AMC", "answer": "1"}, {"problem": "AMC"}]'),
        ("gsm8k_test", '{"question": "?", "answer": "#### 1"}\n{"question": "?", "answer": "#### twelve"}'),
    ],
)
def test_a_malformed_record_is_an_error_that_names_its_file(folder: Path, name: str, text: str) -> None:
    (folder / SOURCES[name].file).write_text(text, encoding="utf-8")  # taken before the gzipped one
    with pytest.raises(DataError, match=rf"{SOURCES[name].file} record 2: "):
        problems(folder, name)


def test_rows_ask_for_a_boxed_answer_and_hide_the_ground_truth(folder: Path) -> None:
    [row] = rows("aime24", path=str(folder))
    assert (row.row_id, row.data_source, row.ground_truth) == ("aime24-0", "aime24", "45")
    assert "\\boxed" in row.prompt[0]["content"]
    assert row.prompt[1]["content"] == "A24"


@given(st.text(), st.text(alphabet=" \t\n$\\{}.,()"))
def test_comparison_keys_contain_only_letters_and_digits(text: str, noise: str) -> None:
    assert reduced(text + noise) == reduced(noise + text) == reduced(reduced(text))


@given(st.lists(st.sampled_from("abcdef")), st.sets(st.sampled_from("abcdef")))
def test_cleaning_keeps_the_first_of_each_and_no_excluded_problem(texts: list[str], taboo: set[str]) -> None:
    kept = [p.text for _, p in clean([("s", Problem(text=text, answer="")) for text in texts], taboo)]
    assert kept == [text for text in dict.fromkeys(texts) if text not in taboo]


def test_problems_with_the_same_beginning_and_answer_are_copies() -> None:
    start = "A rectangle with perimeter 176 is divided into five congruent rectangles as shown."
    told = Problem(text=f"{start} What is the perimeter of one?", answer="80")
    again = Problem(text=f"{start} Find the perimeter of each of them.", answer=" 80")
    other = Problem(text=f"{start} What is the area of one?", answer="384")
    assert clean([("s", again), ("s", other)], marks(told)) == [("s", other)]
    assert clean([("s", told), ("s", again), ("s", other)], set()) == [("s", told), ("s", other)]


@pytest.mark.skipif(SHARED is None, reason="AGENT_R1_SHARED_DATA names no folder with the published files")
def test_the_published_files_overlap_as_recorded() -> None:
    folder = Path(SHARED or "") / "math"
    dapo = {reduced(p.text) for p in problems(folder, "dapo")}
    inside = {name: sum(reduced(p.text) in dapo for p in problems(folder, name)) for name in EVALUATION}
    assert (len(problems(folder, "dapo")), len(dapo)) == (17917, 16054)
    assert inside == {"math500": 7, "math_test": 976, "aime24": 0, "aime25": 0, "amc23": 14, "gsm8k_test": 0}
    kept = split_problems(folder, "train")
    assert len(kept) == 19969
    assert not {mark for _, problem in kept for mark in marks(problem)} & judged(folder)
    assert len(gsm8k.demos(5000, 0, str(folder))) == 5000


# -- answers and reward -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("so \\boxed{34}", "34"),
        ("\\boxed{1} no, \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("\\boxed{}", ""),
        ("\\boxed{never closed", None),
        ("34", None),
        ("\\boxed{a{b}c}}", "a{b}c"),
    ],
)
def test_the_last_box_counts_with_nested_braces(text: str, inside: str | None) -> None:
    assert boxed(text) == inside


def test_plain_numbers_are_compared_as_numbers() -> None:
    async def play() -> list[bool]:
        pairs = [("34", "34"), ("142", "142.0"), ("1000", "1,000"), ("-5", "5"), ("7", "")]
        return [await same_answer(truth, answer) for truth, answer in pairs]

    assert asyncio.run(play()) == [True, True, True, False, False]


@given(st.integers(-(10**14), 10**14))
def test_a_number_is_the_same_with_and_without_thousands_separators(number: int) -> None:
    assert asyncio.run(same_answer(str(number), f"{number:,}"))
    assert asyncio.run(same_answer(f"{number:,}", f"${number}$"))
    assert not asyncio.run(same_answer(str(number), f"{number + 1:,}"))


@pytest.mark.parametrize(
    ("truth", "answer", "same"),
    [
        ("[0,500]", "[0, 500]", True),
        ("(100,101)", "(100, 101)", True),
        ("(20,100)", "\\left(20, 100\\right)", True),
        ("(4,112)", "(4, 112)", True),
        ("[-36,104]", "[-36, 104]", True),
        ("(6,235^\\circ)", "(6, 235^\\circ)", True),
        ("(2,12) \\cup (12,102)", "(2, 12) \\cup (12, 102)", True),
        ("\\{3,125\\}", "\\{3, 125\\}", True),
        ("5,100,20", "5, 100, 20", True),  # no thousands: the last group is short
        ("(3,125)", "3125", False),
        ("3125", "(3,125)", False),
        ("(20,100)", "(20100)", False),
        ("\\{3,125\\}", "\\{3125\\}", False),
        ("3125", "3,125", True),
        ("12345.5", "12,345.50", True),
        ("1000\\pi", "1,000\\pi", True),
        ("1000", "1,\\!000", True),
        ("1000", "\\$1,000", True),
        ("10000", "10\\,000", True),
        ("10\\,000", "10000", True),
        ("-1234567.5", "-1\\,234\\,567.5", True),
        ("(10000, 2)", "(10\\,000, 2)", True),
        ("10000", "10~000", True),
        ("10000\\pi", "10\\ 000\\pi", True),
        ("10", "10\\,000", False),
        ("0.123456", "0.123\\,456", False),  # not thousands
        ("5", "5.", True),
        ("0.333", "0.333...", False),
    ],
)
def test_commas_separate_thousands_in_a_number_and_entries_in_brackets(truth: str, answer: str, same: bool) -> None:
    pytest.importorskip("math_verify", reason="pip install 'agent-r1[math]'")
    assert asyncio.run(same_answer(truth, answer)) is same


@settings(max_examples=20, deadline=None)  # each example is three questions to another process
@given(st.sets(st.integers(0, 999), min_size=2, max_size=3).map(sorted), st.sampled_from([("(", ")"), ("[", "]")]))
def test_a_tuple_is_the_same_with_and_without_spaces_and_never_a_number(
    numbers: list[int], brackets: tuple[str, str]
) -> None:
    pytest.importorskip("math_verify", reason="pip install 'agent-r1[math]'")
    opening, closing = brackets
    close, wide = (f"{opening}{comma.join(map(str, numbers))}{closing}" for comma in (",", ", "))
    assert asyncio.run(same_answer(close, wide))
    assert asyncio.run(same_answer(wide, close))
    assert not asyncio.run(same_answer(close, "".join(map(str, numbers))))


def test_other_answers_are_compared_symbolically_and_huge_powers_are_wrong() -> None:
    pytest.importorskip("math_verify", reason="pip install 'agent-r1[math]'")

    async def play() -> list[bool]:
        pairs = [
            ("\\frac{1}{2}", "0.5"),
            ("\\left( 3, \\frac{\\pi}{2} \\right)", "(3, \\pi/2)"),
            ("x^2+1", "1+x^2"),
            ("[0,3)", "[0,3]"),
            ("34", "thirty"),
            ("34", "9^{9^{9^{9^9}}}"),  # would never return
            ("\\frac{1}{2}", "\\frac{2}{4}"),  # and the next one is judged as ever
        ]
        return [await same_answer(truth, answer) for truth, answer in pairs]

    assert asyncio.run(play()) == [True, True, True, False, False, False, True]


def test_a_failing_checker_does_not_make_an_answer_wrong() -> None:
    pytest.importorskip("math_verify", reason="pip install 'agent-r1[math]'")

    async def play() -> bool:
        sessions = [f"checker-{number}" for number in range(answers.PROCESSES)]
        for session in sessions:  # as if each had no memory left
            await answers._checker().run("import math_verify\nmath_verify.parse = None", session=session)
        try:
            return await same_answer("\\frac{1}{2}", "\\frac{2}{4}")
        finally:
            for session in sessions:
                await answers._checker().release(session)

    assert asyncio.run(play())


def test_the_reward_is_correctness_and_format_is_reported_separately() -> None:
    def parts(text: str, stop: StopReason = StopReason.ANSWERED) -> tuple[float, float, float]:
        scored = asyncio.run(reward(row_with("34"), ended(text, stop)))
        return scored["reward"], scored["correct"], scored["format"]

    assert parts("It is \\boxed{34}.") == (1, 1, 1)
    assert parts("It is \\boxed{35}.") == (0, 0, 1)
    assert parts("It is 34.") == (0, 0, 0)
    assert parts("It is \\boxed{34}.", StopReason.MAX_TOKENS) == (0, 0, 0), "an episode that we cut gave no answer"


# -- process rewards --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def paid() -> Iterator[PaidPythonTool]:
    tool = PaidPythonTool(libraries=[], level="process", output_chars=200, ran=0.25, raised=-0.5, stopped=-1)
    yield tool
    asyncio.run(tool.sandbox.close())


def played(python: PythonTool, *responses: list[str]) -> list[tuple[ToolCallRecord, ...]]:
    """The calls of an episode, whose responses call these programs."""

    async def play() -> list[tuple[ToolCallRecord, ...]]:
        env = PythonEnv(tools=[python])
        await env.reset(row_with("42"))
        texts = [
            "\n".join(FORMATS["hermes"].write_call("python", {"code": code}) for code in each) for each in responses
        ]
        calls = [(await env.step(Action(text=text, token_ids=[]))).calls for text in texts]
        await env.close()
        return calls

    return asyncio.run(play())


def test_programs_earn_process_rewards(paid: PaidPythonTool) -> None:
    loud = "print('x' * 500)"  # exceeds a limit; nothing waits for a time limit here
    episode = played(paid, ["x = 6", "1 / 0"], ["x * 7", "x * 7"], [loud, "import os; os._exit(3)"])
    assert [[call.reward for call in calls] for calls in episode] == [[0, -0.5], [0.25, 0], [-1, -0.5]]
    assert [[call.fault for call in calls] for calls in episode] == [[None, "failed"], [None, None], ["failed"] * 2]
    [[first]] = played(paid, ["6 * 7"])
    assert (first.result, first.reward) == ("42", 0.25), "each episode has a first program"


def test_a_program_that_runs_out_of_time_was_stopped(paid: PaidPythonTool) -> None:
    for killed_by, cost in ((KilledBy.TIME, -1), (KilledBy.CPU, -1), (KilledBy.SIGNAL, -1), (None, -0.5)):
        with pytest.raises(ToolError) as error:
            paid.result(Outcome(stdout="so far\n", error="ended", killed_by=killed_by))
        assert (str(error.value), error.value.reward) == ("so far\nended", cost)


def test_process_rewards_are_reported_beside_the_outcome(paid: PaidPythonTool) -> None:
    # 0.25 for 6 * 7, -0.5 for 1 / 0
    trajectory = ended("It is \\boxed{42}.")
    calls = tuple(call for calls in played(paid, ["6 * 7", "1 / 0", "7 * 6"]) for call in calls)
    with_calls = replace(trajectory, steps=[replace(trajectory.steps[0], calls=calls), *trajectory.steps[1:]])
    parts = asyncio.run(reward(row_with("42"), with_calls))
    assert parts == {"reward": 1, "correct": 1, "format": 1, "ran": 2, "failed": 1, "earned": -0.25}


@pytest.mark.parametrize("settings", [{"ran": -0.1}, {"raised": 0.1}, {"stopped": float("nan")}, {"ran": "0.1"}])
def test_process_rewards_of_the_wrong_sign_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        PaidPythonTool(libraries=[], level="process", **settings)


def test_the_preset_process_combines_with_the_others() -> None:
    for presets in ("process", "gsm8k+process", "tiny+process"):
        config = load_config(f"retool/{presets}", ["task.tool_kwargs.python.ran=0.05"])
        assert (config.task.tools, config.rewards.process) == (["task.PaidPythonTool"], "raw")
    assert load_config("retool/gsm8k+process").task.train_split == "gsm8k_train"
    plan = build_plan(load_config("retool/tiny+process", ["task.tool_kwargs.python.level=process"]))
    assert len(plan.train_rows) == 16


# -- demonstrations ---------------------------------------------------------------------------------------------------


def test_marked_calculations_become_a_program() -> None:
    assert gsm8k.as_program(NATALIA, "72") == (
        "# Natalia sold 48/2 clips in May.\nstep1 = 48/2\n"
        "# Natalia sold 48+24 clips altogether in April and May.\nstep2 = 48+step1\nprint(step2)"
    )
    assert gsm8k.as_program(NATALIA, "73") is None, "a program that does not print the answer is no demonstration"
    assert gsm8k.as_program("She has 5% = <<5%=0.05>>0.05.\n#### 0.05", "0.05") is None


@pytest.mark.parametrize("text", ["__import__('os')", "2**9", "f(1)", "1/0", "1+", "True and 2", "x"])
def test_nothing_but_arithmetic_is_evaluated(text: str) -> None:
    assert gsm8k.evaluate(text, {}) is None


@given(st.integers(0, 99), st.integers(0, 99), st.integers(1, 99))
def test_evaluation_is_exact(a: int, b: int, c: int) -> None:
    assert gsm8k.evaluate(f"({a} - {b}) / {c} + y", {"y": Fraction(1, 3)}) == Fraction(a - b, c) + Fraction(1, 3)


def test_gsm8k_demonstrations_exclude_evaluation_problems(folder: Path) -> None:
    [(row, texts)] = gsm8k.demos(10, 0, str(folder))
    assert row.prompt[1]["content"] == "How many clips?"
    assert texts[-1] == "The answer is \\boxed{72}."


def test_synthetic_problems_are_reproducible_and_their_splits_fixed() -> None:
    train, test = synthetic.rows("train", 60), synthetic.rows("test", 30)
    assert train[:10] == synthetic.rows("train", 10)
    assert not {r.prompt[1]["content"] for r in train} & {r.prompt[1]["content"] for r in test}
    with pytest.raises(ConfigError, match="unknown split 'tset'"):
        synthetic.rows("tset", 1)


# -- episodes ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def python() -> PythonTool:
    if (missing := what_is_missing("namespaces")) is not None:
        pytest.skip(missing)
    return PythonTool(libraries=[], seconds=5)


def test_demonstrations_played_with_the_real_tool_earn_the_reward(python: PythonTool) -> None:
    async def play() -> None:
        for row, texts in synthetic.demos(8, 0):
            await check_env(lambda: PythonEnv(tools=[python]), row, texts)
            outcome = await python.sandbox.run(_program(texts[0]))
            assert outcome.stdout.strip() == row.ground_truth
            assert (await reward(row, ended(texts[-1])))["reward"] == 1

    asyncio.run(play())


def _program(text: str) -> str:
    call = json.loads(text.partition("<tool_call>")[2].partition("</tool_call>")[0])
    program: str = call["arguments"]["code"]
    return program


def test_the_tool_keeps_the_contract_of_tools(python: PythonTool) -> None:
    asyncio.run(check_tool(python, {"code": "print(6 * 7)"}, deterministic=True))


def test_the_table_of_the_readme_is_the_table_of_the_code() -> None:
    readme = (Path(data.__file__).parent / "README.md").read_text(encoding="utf-8")
    lines = [line for line in readme.splitlines() if line.startswith("|")]
    [head] = [line for line in lines if line.startswith("| level |")]
    names = [cell.strip() for cell in head.split("|")[2:-1]]
    assert names == [*GUARANTEES]
    for name, guarantees in LEVELS.items():
        row = f"| `{name}` | " + " | ".join("yes" if each in guarantees else "no" for each in GUARANTEES) + " |"
        assert row in lines


def test_the_presets_can_be_read_and_the_tiny_one_planned_without_data(python: PythonTool) -> None:
    assert load_config("retool").task.test_split == "test"
    assert load_config("retool/gsm8k").task.test_split == "gsm8k_test"
    plan = build_plan(load_config("retool/tiny"))
    assert (len(plan.train_rows), len(plan.test_rows)) == (16, 4)
