"""The vision quickstart's task: only pictures help, shortcuts fail, demonstrations play as written."""

from __future__ import annotations

import asyncio
import json
import random
import re
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

from agent_r1.build.plan import build_plan
from agent_r1.config import load_config
from agent_r1.engines.base import Sampling
from agent_r1.engines.scripted import ScriptedEngine
from agent_r1.envs.base import merge_env_kwargs
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.errors import ConfigError
from agent_r1.flows.budgets import Limits
from agent_r1.flows.flow import AgentEnvLoop
from agent_r1.recipes.vision_quickstart import task, tiny
from agent_r1.recipes.vision_quickstart.task import CELLS, Board, Caption, Shortcut
from agent_r1.rollout.collect import Collector
from agent_r1.tokens.formats.table import FORMATS
from agent_r1.tokens.rendering import Renderer
from agent_r1.tokens.template_check import verify_template
from agent_r1.tools.base import ToolError
from agent_r1.types import StopReason, TaskRow, Trajectory
from agent_r1.vision.picture_format import read_format
from agent_r1.vision.pictures import pictures_of

BOARD = Board(numbers=[1, 2, 3, 4, 5, 6, 7, 8, 9], red=3, blue=8, seed=5)  # red: 4 in a2, blue: 9 in c3
SCHEMAS = [task.peek.schema]


@cache
def tokenizer() -> Any:
    return tiny.make_tokenizer()


@cache
def renderer() -> Renderer:
    config = tiny.make_network(tokenizer(), seed=0).config
    with TemporaryDirectory() as folder:
        tiny.write_preprocessor(folder)
        return Renderer(tokenizer(), pictures=read_format(config, Path(folder), tokenizer().get_vocab()))


def play(row: TaskRow, texts: list[str]) -> Trajectory:
    """The texts as an episode, through the real env, tool and tokenizer."""
    collect = Collector(
        make_flow=lambda _: AgentEnvLoop(lambda row: ToolEnv(**merge_env_kwargs({"tools": [task.peek]}, row))),
        sampler=ScriptedEngine(texts, tokenizer=tokenizer()),
        renderer=renderer(),
        sampling=Sampling(max_tokens=32, stop_ids=renderer().stop_ids),
        limits=Limits(max_steps=5, max_response_tokens=32, max_context_tokens=160, episode_seconds=20),
        group_size=1,
    )
    [group] = asyncio.run(collect([row], seed=0))
    return group.trajectories[0]


def call(cell: str) -> str:
    return FORMATS["hermes"].write_call("peek", {"cell": cell})


def boards(count: int) -> list[Board]:
    rng = random.Random(7)
    return [task.draw_board("test", rng) for _ in range(count)]


def test_a_demonstration_by_hand() -> None:
    a2, c3 = (call(cell) for cell in ("a2", "c3"))
    shown = task.demonstrate(BOARD, None, random.Random(0))
    assert shown == [f"red a2 {a2}", f"4 blue c3 {c3}", "4 plus 9 #### 13"]
    assert BOARD.answer == 13


def test_looking_at_both_cards_earns_1() -> None:
    for board in boards(20):
        row = task.as_row(board, "r")
        trajectory = play(row, task.demonstrate(board, None, random.Random(0)))
        assert trajectory.stop is StopReason.ANSWERED
        assert task.reward(row, trajectory) == 1.0
        shown = [call.pictures for step in trajectory.steps for call in step.calls]
        assert shown == [(board.card(board.red),), (board.card(board.blue),)]


@pytest.mark.parametrize("shortcut", list(Shortcut))
def test_shortcuts_rarely_pay(shortcut: Shortcut) -> None:
    # At best one number is guessed, which is right once in nine times.
    rng = random.Random(1)
    texts = [(board, task.demonstrate(board, shortcut, rng)[-1]) for board in boards(400)]
    assert sum(text.endswith(f" {board.answer}") for board, text in texts) / 400 < 0.2


@pytest.mark.parametrize(("text", "earned"), [("4 plus 9 #### 13", 1), ("#### 13", 1), ("13", 0), ("#### 13.", 0)])
def test_only_the_right_number_at_the_end_is_rewarded(text: str, earned: float) -> None:
    row = task.as_row(BOARD, "r")
    assert task.reward(row, play(row, [text])) == earned


def test_pictures_show_colours_and_numbers() -> None:
    pixels = BOARD.picture().pixels.astype(int)
    assert pixels.shape == (48, 48, 3)
    centres = [pixels[16 * y + 8, 16 * x + 8] for y in range(3) for x in range(3)]
    looks = [min(("white", "red", "blue"), key=lambda name, c=c: _distance(c, name)) for c in centres]  # type: ignore[misc]
    assert [looks[BOARD.red], looks[BOARD.blue]] == ["red", "blue"]
    assert looks.count("white") == 7
    assert BOARD.card(0).pixels.shape == (32, 32, 3)
    same_number = Board(numbers=[1] * 9, red=3, blue=8, seed=5)
    assert same_number.card(0) == BOARD.card(0) != BOARD.card(1)


def _distance(pixel: Any, name: str) -> float:
    return float(np.abs(pixel - np.array({"white": task.WHITE, "red": task.RED, "blue": task.BLUE}[name])).sum())


def test_the_prompt_says_nothing_about_the_cards() -> None:
    texts = {
        renderer().decode([token for token in play(row, ["#### 5"]).steps[0].prompt_ids if token >= 0])
        for row in task.rows("test", 10)
    }
    assert len(texts) == 1
    assert list(task.peek.parameters["properties"]) == ["cell"]


def test_rows_are_reproducible_plain_and_disjoint() -> None:
    assert task.rows("test", 5) == task.rows("test", 8)[:5]
    assert task.rows("test", 5, seed=1) != task.rows("test", 5)
    train, test = ({p for row in task.rows(split, 50) for p in pictures_of(row.prompt)} for split in task.SPLITS)
    assert not train & test
    for row in task.rows("test", 3):
        assert json.loads(json.dumps(row.env_kwargs)) == row.env_kwargs
    with pytest.raises(ConfigError, match=r"'tset'.*'test'"):
        task.rows("tset", 1)


def test_peeking_outside_the_board_is_refused() -> None:
    with pytest.raises(ToolError, match="no cell 'd1'; cells are a1 to c3"):
        asyncio.run(task.peek("d1", {}))


def test_demonstrations_play_as_written_and_stay_short() -> None:
    for row, texts in task.demos(60, seed=1):
        trajectory = play(row, texts)
        assert [step.action_text for step in trajectory.steps] == texts
        assert trajectory.stop is StopReason.ANSWERED
        assert not any(call.error for step in trajectory.steps for call in step.calls)
        last = trajectory.steps[-1]
        assert len(last.prompt_ids) + len(last.response_ids) <= 100


def test_demonstrations_are_sloppy_as_configured() -> None:
    asks = [(row.prompt[0]["content"][-1]["text"], row, texts) for row, texts in task.demos(1200, seed=0)]
    shown = [(row, texts) for question, row, texts in asks if question == "red plus blue?"]
    assert len(shown) / 1200 == pytest.approx(1 - task.CAPTION_SHARE, abs=0.05)
    right = sum(texts[-1].endswith(f" #### {row.ground_truth}") for row, texts in shown) / len(shown)
    # a fifth does all the work; of the others, about one in ten is right by luck
    assert right == pytest.approx(0.2 + 0.8 / 9, abs=0.06)


@pytest.mark.parametrize("seed", [0, 1])
def test_captions_of_boards_name_both_places_in_any_order(seed: int) -> None:
    row, [text] = task.caption(Caption.BOARD, BOARD, "r", random.Random(seed))
    assert pictures_of(row.prompt) == [BOARD.picture()]
    assert text == {0: "blue c3 red a2", 1: "red a2 blue c3"}[seed]


def test_captions_of_cards_look_at_the_cells_that_are_asked_for() -> None:
    row, texts = task.caption(Caption.CARDS, BOARD, "r", random.Random(0))
    asked = row.prompt[0]["content"][0]["text"].removesuffix("?").split()
    numbers = [str(BOARD.numbers[CELLS.index(cell)]) for cell in asked]
    said = " ".join(texts)
    assert said == " ".join(part for cell, number in zip(asked, numbers, strict=True) for part in (call(cell), number))
    shown = [picture for step in play(row, texts).steps for each in step.calls for picture in each.pictures]
    assert shown == [BOARD.card(CELLS.index(cell)) for cell in asked]


def test_captions_of_sums_are_right_and_show_nothing() -> None:
    row, [text] = task.caption(Caption.SUMS, BOARD, "r", random.Random(0))
    assert not pictures_of(row.prompt)
    for left, right, total in re.findall(r"(\d+) plus (\d+) #### (\d+)", text):
        assert int(left) + int(right) == int(total)


def test_blank_splits_have_the_same_rows_with_black_pictures_of_the_same_size() -> None:
    for seen, blank in zip(task.rows("test", 5), task.rows("blank_test", 5), strict=True):
        assert blank.ground_truth == seen.ground_truth
        [board], [nothing] = pictures_of(seen.prompt), pictures_of(blank.prompt)
        assert nothing.pixels.shape == board.pixels.shape
        shown = [play(row, [call("a2"), "#### 5"]).steps[0].calls[0].pictures[0] for row in (seen, blank)]
        assert shown[0].pixels.shape == shown[1].pixels.shape
        assert not nothing.pixels.any()
        assert not shown[1].pixels.any()
    demos, blank_demos = (made(count=40, seed=3) for made in (task.demos, task.blank_demos))
    assert [texts for _, texts in demos] == [texts for _, texts in blank_demos]
    assert not any(picture.pixels.any() for row, _ in blank_demos for picture in pictures_of(row.prompt))


def test_the_preset_blank_trains_and_evaluates_without_seeing() -> None:
    plan = build_plan(load_config("vision_quickstart/blank", ["task.train_count=20", "eval.rows=10"]))
    for row in (*plan.train_rows, *plan.test_rows):
        assert not any(picture.pixels.any() for picture in pictures_of(row.prompt))


def test_cells_and_numbers_are_one_token_each_everywhere() -> None:
    encode = tokenizer().encode
    for word in (*CELLS, *map(str, range(1, 19))):
        [token] = encode(word)
        for text in (f"#### {word}", f"{word} plus 3", call(word), f"red {word} blue b2"):
            assert token in encode(text)


def test_a_board_takes_9_tokens_and_a_card_4() -> None:
    trajectory = play(task.as_row(BOARD, "r"), task.demonstrate(BOARD, None, random.Random(0)))
    assert [sum(token < 0 for token in step.prompt_ids) for step in trajectory.steps] == [9, 13, 17]


def test_the_template_passes_all_checks() -> None:
    assert verify_template(renderer(), SCHEMAS).problems == ()
    assert renderer().stop_ids == (tokenizer().eos_token_id,)


def test_the_template_refuses_unknown_roles_and_parts() -> None:
    for message in ({"role": "critic", "content": "?"}, {"role": "user", "content": [{"type": "video"}]}):
        with pytest.raises(Exception, match=r"unknown role critic|unknown part video"):
            tokenizer().apply_chat_template([message], tokenize=False)


def test_the_tiny_model_is_an_ordinary_directory_and_depends_only_on_its_seed(tmp_path: Path) -> None:
    state = torch.random.get_rng_state()
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        tiny.make_tiny_model(tmp_path / name, seed)
    assert torch.equal(torch.random.get_rng_state(), state)  # the caller's random numbers are untouched
    files = {name: (tmp_path / name / "model.safetensors").read_bytes() for name in "abc"}
    assert files["a"] == files["b"] != files["c"]
    loaded, config = AutoTokenizer.from_pretrained(tmp_path / "a"), AutoConfig.from_pretrained(tmp_path / "a")
    assert config.model_type == "qwen3_vl"
    assert config.image_token_id == loaded.convert_tokens_to_ids(tiny.PICTURE)
    form = read_format(config, tmp_path / "a", loaded.get_vocab())
    assert [form.shape(picture) for picture in (BOARD.picture(), BOARD.card(0))] == [(3, 3), (2, 2)]
    assert len(files["a"]) < 8_000_000  # bytes: at most two million parameters
