"""The quickstart's task: shortcuts fail, work pays, splits are disjoint, demonstrations play as written."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from agent_r1.engines.base import Sampling
from agent_r1.engines.scripted import ScriptedEngine
from agent_r1.envs.base import merge_env_kwargs
from agent_r1.envs.check import check_env, check_tool
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.errors import ConfigError
from agent_r1.flows.budgets import Limits
from agent_r1.flows.flow import AgentEnvLoop
from agent_r1.recipes.quickstart import task, tiny
from agent_r1.recipes.quickstart.task import Kind, Puzzle, Shortcut
from agent_r1.rollout.collect import Collector
from agent_r1.tokens.formats.table import FORMATS
from agent_r1.tokens.rendering import Renderer
from agent_r1.tokens.template_check import verify_template
from agent_r1.tools.base import ToolError
from agent_r1.types import StopReason, TaskRow, Trajectory

TOOLS = [task.lookup, task.calculate]
SCHEMAS = [tool.schema for tool in TOOLS]


@cache
def tokenizer() -> Any:
    return tiny.make_tokenizer()


@cache
def renderer() -> Renderer:
    return Renderer(tokenizer())


def make_env(row: TaskRow) -> ToolEnv:
    return ToolEnv(**merge_env_kwargs({"tools": TOOLS}, row))


def play(row: TaskRow, texts: list[str]) -> Trajectory:
    """The texts as an episode, through the real env, tools and tokenizer."""
    collect = Collector(
        make_flow=lambda _: AgentEnvLoop(make_env),
        sampler=ScriptedEngine(texts, tokenizer=tokenizer()),
        renderer=renderer(),
        sampling=Sampling(max_tokens=24, stop_ids=renderer().stop_ids),
        limits=Limits(max_steps=5, max_response_tokens=24, max_context_tokens=160, episode_seconds=20),
        group_size=1,
    )
    [group] = asyncio.run(collect([row], seed=0))
    return group.trajectories[0]


def puzzles(split: str = "test", count: int = 60) -> list[Puzzle]:
    rng = random.Random(7)
    return [task.draw_puzzle(split, rng) for _ in range(count)]


def asked_people(row: TaskRow) -> set[str]:
    return {name for name in row.env_kwargs["tools_kwargs"]["lookup"]["table"] if name in row.prompt[0]["content"]}


def test_questions_and_answers_by_hand() -> None:
    table = {"Mira Reed": 41, "Bek Snow": 12}
    both = ("Mira Reed", "Bek Snow")
    total = Puzzle(kind=Kind.TOTAL, table=table, people=both, factor=3)
    assert total.question == "How many coins do Mira Reed and Bek Snow have together?"
    assert total.answer == 53  # 41 + 12
    assert Puzzle(kind=Kind.DIFFERENCE, table=table, people=both, factor=3).answer == 29  # 41 - 12
    assert Puzzle(kind=Kind.MULTIPLE, table=table, people=both[:1], factor=3).answer == 123  # 3 * 41


def test_calling_the_tools_and_answering_earns_1() -> None:
    for index, puzzle in enumerate(puzzles()):
        row = task.as_row(puzzle, f"r{index}")
        trajectory = play(row, task.demonstrate(puzzle, None, random.Random(0)))
        assert trajectory.stop is StopReason.ANSWERED
        assert task.reward(row, trajectory) == 1.0
        called = [call.name for step in trajectory.steps for call in step.calls]
        assert called == ["lookup"] * len(puzzle.people) + ["calculate"]


@pytest.mark.parametrize("shortcut", list(Shortcut))
def test_shortcuts_earn_nothing(shortcut: Shortcut) -> None:
    for index, puzzle in enumerate(puzzles()):
        row = task.as_row(puzzle, f"r{index}")
        trajectory = play(row, task.demonstrate(puzzle, shortcut, random.Random(index)))
        assert trajectory.stop is StopReason.ANSWERED
        assert task.reward(row, trajectory) == 0.0


def test_the_answer_has_two_digits_and_is_in_no_table() -> None:
    for row in task.rows("train", 500):
        assert 10 <= int(row.ground_truth) < 100
        assert int(row.ground_truth) not in row.env_kwargs["tools_kwargs"]["lookup"]["table"].values()


@pytest.mark.parametrize("text", ["#### 531", "53", "#### 53.", "#### 53 #### 53", "#### 5", "####53", "#### fifty"])
def test_only_the_right_number_is_rewarded(text: str) -> None:
    row = TaskRow(prompt=[{"role": "user", "content": "?"}], row_id="r", reward_model={"ground_truth": "53"})
    assert task.reward(row, play(row_with_table(row), [text])) == 0.0
    assert task.reward(row, play(row_with_table(row), ["#### 53"])) == 1.0


def row_with_table(row: TaskRow) -> TaskRow:
    return TaskRow(
        prompt=row.prompt,
        row_id=row.row_id,
        reward_model=row.reward_model,
        env_kwargs={"tools_kwargs": {"lookup": {"table": {"Mira Reed": 41}}}},
    )


def test_rows_are_reproducible_and_a_longer_list_only_adds() -> None:
    assert task.rows("test", 20) == task.rows("test", 50)[:20]
    assert task.rows("test", 20, seed=1) != task.rows("test", 20)
    ids = [row.row_id for split in task.SPLITS for seed in (0, 1) for row in task.rows(split, 50, seed)]
    assert len(set(ids)) == len(ids)


def test_no_person_is_in_both_splits() -> None:
    train, test = set(task.people("train")), set(task.people("test"))
    assert not train & test
    assert len(train | test) == len(task.FIRST_NAMES.split()) * len(task.LAST_NAMES.split())
    assert 0.2 < len(test) / len(train | test) < 0.3
    for row in task.rows("test", 200):
        assert asked_people(row) <= test
    for row in [*task.rows("train", 200), *(row for row, _ in task.demos(200, seed=3))]:
        assert asked_people(row) <= train


def test_an_unknown_split_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"'tset'.*'test'"):
        task.rows("tset", 1)


def test_the_env_keeps_its_contract_and_never_shows_the_answer() -> None:
    for puzzle in puzzles(count=6):
        row = task.as_row(puzzle, "r")
        texts = task.demonstrate(puzzle, None, random.Random(0))
        asyncio.run(check_env(lambda row=row: make_env(row), row, ["<tool_call>{", *texts]))  # type: ignore[misc]


def test_the_model_is_shown_neither_the_table_nor_the_answer() -> None:
    assert list(task.lookup.parameters["properties"]) == ["name"]
    for row in task.rows("test", 100):
        prompt = renderer().decode(renderer().render(first_observation(row), SCHEMAS))
        assert "lookup(name): How many coins a person has, by full name." in prompt
        assert row.prompt[0]["content"] in prompt
        assert re.findall("[0-9]+", prompt) == re.findall("[0-9]+", row.prompt[0]["content"])  # a multiple's factor


def first_observation(row: TaskRow) -> Any:
    return asyncio.run(make_env(row).reset(row.without_ground_truth()))


def test_tools_keep_their_contract() -> None:
    table = {"Mira Reed": 41}
    asyncio.run(check_tool(task.lookup, {"name": "Mira Reed"}, {"table": table}, deterministic=True))
    asyncio.run(check_tool(task.calculate, {"expression": "41 + 54"}, deterministic=True))
    assert asyncio.run(task.lookup("Mira Reed", table)) == "41"
    with pytest.raises(ToolError, match="'Mira'"):
        asyncio.run(task.lookup("Mira", table))


@given(st.integers(-(10**9) + 1, 10**9 - 1), st.sampled_from("+-*"), st.integers(-(10**9) + 1, 10**9 - 1))
def test_the_calculator_is_right(left: int, operation: str, right: int) -> None:
    expected = {"+": left + right, "-": left - right, "*": left * right}[operation]
    assert task.evaluate(f"{left} {operation} {right}") == task.evaluate(f"{left}{operation}{right}") == expected


@given(
    st.text(max_size=20)
    | st.sampled_from(["9**9", "1 + 2 + 3", "1 / 2", "", "7", "__import__('os')", "\u0661 + \u0662"])
)
def test_the_calculator_refuses_everything_else(expression: str) -> None:
    if task.EXPRESSION.fullmatch(expression) is None:
        with pytest.raises(ToolError, match="is not of the form"):
            asyncio.run(task.calculate(expression))


def test_demonstrations_are_wrong_as_often_as_configured() -> None:
    shown = task.demos(4000, seed=0)
    kinds = Counter(row.extra_info["kind"] for row, _ in shown)
    right = Counter(row.extra_info["kind"] for row, texts in shown if texts[-1] == f"#### {row.ground_truth}")
    for kind in Kind:
        expected = 1 - sum(task.SLOPPINESS[kind].values())
        assert right[kind] / kinds[kind] == pytest.approx(expected, abs=0.05)
    # three fifths of the rows are totals, a fifth each differences and multiples: 0.6 * 0.21 + 0.2 * 0.4 + 0.2 * 0.7
    assert right.total() / len(shown) == pytest.approx(0.346, abs=0.04)


def test_demonstrations_play_as_written_and_stay_short() -> None:
    for row, texts in task.demos(60, seed=1):
        trajectory = play(row, texts)
        assert [step.action_text for step in trajectory.steps] == texts
        assert trajectory.stop is StopReason.ANSWERED
        assert not any(call.error for step in trajectory.steps for call in step.calls)
        last = trajectory.steps[-1]
        assert len(trajectory.steps[0].prompt_ids) <= 40
        assert len(last.prompt_ids) + len(last.response_ids) <= 110


def test_encoding_the_text_of_an_episode_gives_its_ids() -> None:
    for row, texts in task.demos(20, seed=2):
        last = play(row, texts).steps[-1]
        ids = last.prompt_ids + last.response_ids
        assert tokenizer().encode(renderer().decode(ids[:-1]), add_special_tokens=False) == ids[:-1]


@settings(max_examples=300)
@given(st.text() | st.text(alphabet="<|>/imstarendoolc_ \n0Aé") | st.sampled_from([tiny.TURN_END, *tiny.CALL_TAGS]))
def test_encoding_and_decoding_round_trips(text: str) -> None:
    assert tokenizer().decode(tokenizer().encode(text)) == text


def test_names_and_numbers_have_the_same_tokens_everywhere() -> None:
    encode = tokenizer().encode
    for name in task.people("test"):
        first, blank, last = encode(name)
        for text in (f"How many coins do {name} and Ada Ash have together?", f'{{"name": "lookup", "name": "{name}"}}'):
            assert f" {first} {blank} {last} " in " ".join(map(str, encode(text)))
    for number in range(10, 100):
        [token] = encode(str(number))
        for text in (f"#### {number}", f'{{"expression": "{number} + 5"}}', f'{{"expression": "5 * {number}"}}'):
            assert encode(text).count(token) == 1


def test_the_template_passes_all_checks() -> None:
    assert verify_template(renderer(), SCHEMAS).problems == ()
    assert renderer().stop_ids == (tokenizer().eos_token_id,)


def test_the_template_renders_structured_calls_like_text() -> None:
    text = FORMATS["hermes"].write_call("lookup", {"name": "Mira Reed"})
    call = {"type": "function", "function": {"name": "lookup", "arguments": {"name": "Mira Reed"}}}
    as_data = {"role": "assistant", "content": "", "tool_calls": [call]}
    render = tokenizer().apply_chat_template
    assert render([as_data], tokenize=False) == render([{"role": "assistant", "content": text}], tokenize=False)


def test_the_template_refuses_unknown_roles_and_images() -> None:
    for message in ({"role": "critic", "content": "?"}, {"role": "user", "content": [{"type": "image"}]}):
        with pytest.raises(Exception, match=r"unknown role critic|must be text"):
            tokenizer().apply_chat_template([message], tokenize=False)


def test_the_tiny_model_is_an_ordinary_directory_and_depends_only_on_its_seed(tmp_path: Path) -> None:
    state = torch.random.get_rng_state()
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        tiny.make_tiny_model(tmp_path / name, seed)
    assert torch.equal(torch.random.get_rng_state(), state)  # the caller's random numbers are untouched
    files = {name: (tmp_path / name / "model.safetensors").read_bytes() for name in "abc"}
    assert files["a"] == files["b"] != files["c"]
    assert (tmp_path / "a" / "tokenizer.json").read_bytes() == (tmp_path / "c" / "tokenizer.json").read_bytes()

    loaded, network = (
        AutoTokenizer.from_pretrained(tmp_path / "a"),
        AutoModelForCausalLM.from_pretrained(tmp_path / "a"),
    )
    text = tokenizer().apply_chat_template(task.rows("test", 1)[0].prompt, tools=SCHEMAS, tokenize=False)
    assert loaded.apply_chat_template(task.rows("test", 1)[0].prompt, tools=SCHEMAS, tokenize=False) == text
    ids = loaded.encode(text, add_special_tokens=False)
    assert ids == tokenizer().encode(text, add_special_tokens=False)
    with torch.no_grad():
        logits = network(input_ids=torch.tensor([ids])).logits
    assert logits.shape == (1, len(ids), len(loaded))
    assert sum(parameter.numel() for parameter in network.parameters()) < 2_000_000
