"""The recipe geometry3k: published and converted rows, the tool that looks closer, answers, the template."""

from __future__ import annotations

import asyncio
import io
import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from agent_r1.build.recipe import prepare_data
from agent_r1.build.task import build_task
from agent_r1.config import load_config
from agent_r1.envs.base import merge_env_kwargs
from agent_r1.envs.check import check_env, check_tool
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.errors import ConfigError, DataError
from agent_r1.recipes.geometry3k import synthetic, task, tiny
from agent_r1.recipes.geometry3k.task import enlarged, reward, rows, zoom
from agent_r1.recipes.gridworld.tiny import VISION_TOKENS
from agent_r1.recipes.quickstart.tiny import make_tokenizer
from agent_r1.recipes.vision_quickstart.tiny import make_network
from agent_r1.tokens.formats.infer import template_format
from agent_r1.tokens.formats.table import FORMATS
from agent_r1.tokens.rendering import Renderer
from agent_r1.tokens.template_check import verify_template
from agent_r1.tools.base import ToolError
from agent_r1.types import Action, Observation, Step, StopReason, TaskRow, Trajectory
from agent_r1.vision.picture_format import read_format
from agent_r1.vision.pictures import Picture, as_picture, pictures_of

# Answers in the spelling of the published rows.
ANSWERS = ["97", "30.2", "2 \\sqrt { 221 }", "\\frac { 8 } { \\sqrt { 3 } }", "18 \\pi", "4 \\sqrt 3"]


def png(shade: int, width: int = 60, height: int = 40) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), (shade, shade, shade)).save(file, "PNG")
    return file.getvalue()


def published(shade: int, answer: str, problem: str = "<image>Find $x$.") -> dict[str, Any]:
    """A record of hiyouga/geometry3k."""
    return {"images": [{"bytes": png(shade), "path": None}], "problem": problem, "answer": answer}


def converted(shade: int, answer: str) -> dict[str, Any]:
    """The same as verl's geo3k.py writes it."""
    prompt = "<image>Find $x$. The final answer MUST BE put in \\boxed{}."
    return {
        "data_source": "hiyouga/geometry3k",
        "prompt": [{"role": "user", "content": prompt}],
        "images": [{"bytes": png(shade), "path": None}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": "train", "index": 0, "answer": answer, "question": "<image>Find $x$."},
    }


def write(path: Path, records: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(records), path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Laid out as on the hub."""
    splits = {
        "train": [published(shade, answer) for shade, answer in enumerate(ANSWERS)] + [published(101, "5")],
        "validation": [published(100, "12")],
        "test": [published(101, "5"), published(102, "7") | {"id": 3, "choices": ["6", "7"], "ground_truth": "B"}],
    }
    for split, records in splits.items():
        write(tmp_path / "data" / f"{split}-00000-of-00001.parquet", records)
    return tmp_path


def said(text: str, stop: StopReason = StopReason.ANSWERED) -> Trajectory:
    step = Step(prompt_ids=[1], response_ids=[2], response_logprobs=[0.0], action_text=text)
    return Trajectory(row_id="r", trajectory_id="t", steps=[step], stop=stop)


# Rows


def test_published_rows_become_prompts_with_pictures(folder: Path) -> None:
    row = rows("train", path=str(folder))[2]
    system, user = row.prompt
    assert "\\boxed" in system["content"]
    assert user["content"] == [
        {"type": "image", "image": Picture.from_bytes(png(2))},
        {"type": "text", "text": "Find $x$."},
    ]
    assert (row.row_id, row.ground_truth, row.data_source) == ("train-2", "2 \\sqrt { 221 }", "geometry3k")
    assert row.env_kwargs == {"tools_kwargs": {"zoom": {"pictures": [Picture.from_bytes(png(2))]}}}


def test_converted_rows_keep_their_prompt_and_do_not_show_the_answer_to_tools(tmp_path: Path) -> None:
    for split, shade in (("train", 1), ("test", 2)):
        write(tmp_path / f"{split}.parquet", [converted(shade, "48")])
    [row] = rows("train", path=str(tmp_path))
    [message] = row.prompt
    assert [part["type"] for part in message["content"]] == ["image", "text"]
    assert message["content"][1]["text"] == "Find $x$. The final answer MUST BE put in \\boxed{}."
    assert row.ground_truth == "48"
    assert "48" not in repr(row.without_ground_truth())


def test_training_rows_that_are_evaluation_rows_are_left_out(folder: Path) -> None:
    assert [row.ground_truth for row in rows("train", path=str(folder))] == ANSWERS
    assert [row.ground_truth for row in rows("test", path=str(folder))] == ["5", "7"]
    assert [row.ground_truth for row in rows("validation", path=str(folder))] == ["12"]


def test_a_split_may_have_several_files(tmp_path: Path) -> None:
    for number in (0, 1):
        write(tmp_path / f"test-0000{number}-of-00002.parquet", [published(number, str(number))])
    found = rows("test", path=str(tmp_path))
    assert [(row.row_id, row.ground_truth) for row in found] == [("test-0", "0"), ("test-1", "1")]
    assert len(rows("test", count=1, path=str(tmp_path))) == 1


def test_paths_of_pictures_start_in_the_folder_of_the_file(tmp_path: Path) -> None:
    record = published(7, "48") | {"images": [{"bytes": None, "path": "figures/one.png"}]}
    write(tmp_path / "data" / "test-00000-of-00001.parquet", [record])
    (tmp_path / "data" / "figures").mkdir()
    (tmp_path / "data" / "figures" / "one.png").write_bytes(png(7))
    [row] = rows("test", path=str(tmp_path))
    assert pictures_of(row.prompt) == [Picture.from_bytes(png(7))]


def test_the_recipe_reads_data_path_and_builds_its_env(folder: Path) -> None:
    for preset in ("geometry3k", "geometry3k/qwen2_5_vl_3b"):
        made = build_task(load_config(preset, [f"data.path={folder}"]))
        assert [len(found) for found in (made.train_rows(), made.test_rows())] == [len(ANSWERS), 2]
        assert made.make_flow(made.test_rows()[0]) is not None
        assert made.calls_tools


def test_preparing_keeps_existing_files_and_reports_every_split(folder: Path) -> None:
    lines: list[str] = []
    assert prepare_data("geometry3k", folder, lines.append) == folder
    assert lines == ["train: 6 problems", "validation: 1 problems", "test: 2 problems"]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"answer": "1", "images": [{"bytes": png(0), "path": None}]}, r"record 1 .*'problem'"),
        (published(0, ""), r"record 1: 'answer'"),
        (published(0, "1", problem="Find $x$."), r"record 1 has 1 (images|pictures)"),
        ({**published(0, "1"), "images": []}, r"record 1"),
        ({**published(0, "1"), "images": [{"bytes": b"no picture", "path": None}]}, r"record 1: (image|picture) 0"),
        ({"problem": "Find $x$.", "answer": "1"}, r"record 1 has no pictures"),
    ],
)
def test_malformed_records_are_errors_that_name_their_file(
    record: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write(tmp_path / "test.parquet", [record])
    with pytest.raises(DataError, match=rf"test\.parquet {message}"):
        rows("test", path=str(tmp_path))


def test_missing_files_and_unknown_splits_are_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"test\.parquet nor test-\*\.parquet"):
        rows("test", path=str(tmp_path))
    with pytest.raises(ConfigError, match=r"'tset'.*'test'"):
        rows("tset", path=str(tmp_path))


# The tool


def quarters() -> Picture:
    """Four colours, in an oblong of 40 x 20."""
    pixels = np.zeros((20, 40, 3), np.uint8)
    pixels[:10, 20:], pixels[10:, :20], pixels[10:, 20:] = 60, 120, 180
    return Picture.from_pixels(pixels)


def look(*box: float, shown: list[Picture], picture: int = 1) -> Picture:
    x0, y0, x1, y1 = box
    [found] = zoom(picture, x0, y0, x1, y1, shown).images
    return as_picture(found)


def test_zoom_enlarges_the_part_to_the_longer_side() -> None:
    part = look(0, 500, 500, 1000, shown=[quarters()])  # 20 x 10 pixels, bottom left
    assert (part.width, part.height) == (40, 20)
    assert np.unique(part.pixels).tolist() == [120]
    narrow = look(600, 0, 700, 1000, shown=[quarters()])  # 4 x 20
    assert (narrow.width, narrow.height) == (8, 40)
    assert look(0, 0, 1000, 1000, shown=[quarters()]) == quarters()


def test_parts_of_less_than_a_pixel_are_rounded_outwards() -> None:
    assert enlarged(quarters(), (500, 500, 520, 520)).pixels[0, 0].tolist() == [180, 180, 180]


def test_a_result_can_be_looked_at_again() -> None:
    shown = [quarters()]
    first = look(500, 0, 1000, 1000, shown=shown)  # the right half
    assert shown == [quarters(), first]
    assert np.unique(look(0, 600, 1000, 1000, shown=shown, picture=2).pixels).tolist() == [180]
    assert zoom(1, 0, 0, 500, 500, shown).text == "Picture 4:"


@pytest.mark.parametrize(
    ("box", "picture"),
    [
        ((0, 0, 500, 500), 0),
        ((0, 0, 500, 500), 2),
        ((-1, 0, 500, 500), 1),
        ((0, 0, 500, 1001), 1),
        ((500, 0, 500, 500), 1),
        ((600, 0, 500, 500), 1),
        ((0.1, 0.1, 0.4, 0.4), 1),  # shares instead of thousandths
    ],
)
def test_impossible_parts_are_refused(box: tuple[float, ...], picture: int) -> None:
    with pytest.raises(ToolError):
        look(*box, shown=[quarters()], picture=picture)


def test_damaged_pictures_are_a_failed_call() -> None:
    cut = Picture.from_bytes(png(9, 400, 400)[:-30])  # only its header was read so far
    with pytest.raises(ToolError, match="cannot be decoded"):
        look(0, 0, 500, 500, shown=[cut])


def test_the_tool_and_the_env_keep_their_contracts() -> None:
    arguments = {"picture": 1, "x0": 0, "y0": 0, "x1": 500, "y1": 500}
    # not deterministic: pictures are numbered in the order of the calls
    asyncio.run(check_tool(zoom, arguments, context={"pictures": [quarters()]}, deterministic=False))
    [(row, texts)] = synthetic.demos(1, seed=3)
    call = FORMATS["hermes"].write_call("zoom", {**arguments, "picture": 2})
    asyncio.run(check_env(lambda: ToolEnv(**merge_env_kwargs({"tools": [zoom]}, row)), row, [texts[0], call, texts[1]]))


def test_pictures_of_one_episode_are_not_seen_by_another() -> None:
    [(row, texts)] = synthetic.demos(1, seed=3)

    async def play() -> list[str]:
        env = ToolEnv(**merge_env_kwargs({"tools": [zoom]}, row))
        await env.reset(row)
        return [(await env.step(Action(text=texts[0], token_ids=[]))).feedback for _ in range(2)]

    assert asyncio.run(play()) == asyncio.run(play()) == ["zoom: Picture 2:", "zoom: Picture 3:"]
    assert len(row.env_kwargs["tools_kwargs"]["zoom"]["pictures"]) == 1


# The reward


def test_the_reward_accepts_every_gold_answer(folder: Path) -> None:
    pytest.importorskip("math_verify", reason="pip install 'agent-r1[math]'")
    found = [*rows("train", path=str(folder)), *rows("test", path=str(folder)), *synthetic.rows("test", 50)]
    for row in found:
        parts = asyncio.run(reward(row, said(f"So it is \\boxed{{{row.ground_truth}}}.")))
        assert (parts["reward"], parts["format"]) == (1.0, 1.0), row.ground_truth


@pytest.mark.parametrize(
    ("truth", "answer", "same"),
    [
        ("97", "97^\\circ", True),
        ("97", "97°", True),
        ("97", "m\\angle H = 97°", True),
        ("48", "AC = 48", True),
        ("48", "48 \\text{ cm}", True),
        ("18 \\pi", "18π", True),
        ("4 \\sqrt 3", "4√3", True),
        ("2 \\sqrt { 221 }", "29.7", False),
        ("97", "79", False),
    ],
)
def test_answers_may_have_units_and_names(truth: str, answer: str, same: bool) -> None:
    pytest.importorskip("math_verify", reason="pip install 'agent-r1[math]'")
    row = TaskRow(prompt=[], reward_model={"ground_truth": truth})
    assert asyncio.run(reward(row, said(f"\\boxed{{{answer}}}")))["reward"] == same


def test_only_a_boxed_answer_at_the_end_counts() -> None:
    row = TaskRow(prompt=[], reward_model={"ground_truth": "97"})
    for trajectory in (said("97"), said("\\boxed{}"), said("\\boxed{97}", StopReason.MAX_TOKENS)):
        parts = asyncio.run(reward(row, trajectory))
        assert parts == {"reward": 0.0, "correct": 0.0, "format": 0.0, "zooms": 0.0}


# Synthetic problems, template


def test_synthetic_problems_are_right_and_their_splits_disjoint() -> None:
    rng = random.Random(0)
    for _ in range(50):
        figure = synthetic.third_angle(rng)
        assert sum(int(text) for text, _ in figure.labels[:2]) + figure.answer == 180
        figure = synthetic.hypotenuse(rng)
        short, long = (int(text) for text, _ in figure.labels[:2])
        assert short**2 + long**2 == figure.answer**2
    assert synthetic.rows("test", 5) == synthetic.rows("test", 8)[:5]
    prompts = [{repr(row.prompt) for row in synthetic.rows(split, 100)} for split in synthetic.SPLITS]
    assert not prompts[0] & prompts[1]
    with pytest.raises(ConfigError, match=r"'tset'.*'test'"):
        synthetic.draw("tset", rng)


def test_a_demonstration_looks_at_a_label() -> None:
    figure = synthetic.hypotenuse(random.Random(0))
    call = json.loads(synthetic.demonstrate(figure)[0].split("<tool_call>")[1].split("</tool_call>")[0])["arguments"]
    x, y = (at / synthetic.PIXELS * task.SCALE for at in figure.place(figure.labels[0][1]))
    assert call["x0"] <= x <= call["x1"]
    assert call["y0"] <= y <= call["y1"]
    part = look(*(call[edge] for edge in ("x0", "y0", "x1", "y1")), shown=[figure.picture])
    assert max(part.width, part.height) == synthetic.PIXELS


@cache
def renderer() -> Renderer:
    tokenizer = make_tokenizer(synthetic.demos(50, seed=0), [zoom], template=tiny.CHAT_TEMPLATE, special=VISION_TOKENS)
    config = make_network(tokenizer, seed=0).config
    return Renderer(tokenizer, pictures=read_format(config, None, tokenizer.get_vocab()))


def test_the_template_passes_all_checks_and_shows_pictures_in_results() -> None:
    assert verify_template(renderer(), [zoom.schema]).problems == ()
    assert template_format(renderer()).name == "hermes"
    picture = quarters()
    result = [{"type": "text", "text": "Picture 2:"}, {"type": "image", "image": picture}]
    shown = renderer().render(
        Observation(messages=[{"role": "user", "content": "?"}, {"role": "tool", "content": result}]), [zoom.schema]
    )
    first = next(index for index, token in enumerate(shown) if token < 0)
    count = sum(token < 0 for token in shown)
    assert renderer().decode(shown[:first]).endswith("<tool_response>\nPicture 2:<|vision_start|>")
    assert renderer().decode(shown[first + count :]).startswith("<|vision_end|>\n</tool_response><|im_end|>")


def test_the_template_refuses_unknown_roles_and_parts() -> None:
    for message in ({"role": "critic", "content": "?"}, {"role": "user", "content": [{"type": "video"}]}):
        with pytest.raises(DataError, match=r"unknown role critic|unknown part video"):
            renderer().render(Observation(messages=[message]))


def test_pictures_of_the_prompt_are_those_of_the_row(folder: Path) -> None:
    [row, *_] = rows("test", path=str(folder))
    assert pictures_of(row.prompt) == row.env_kwargs["tools_kwargs"]["zoom"]["pictures"]
