"""Every command on a model that sees: train, resume, evaluate, collect, imitate, chat; and what is refused by name."""

from __future__ import annotations

import asyncio
import io
import os
from base64 import b64encode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from agent_r1.backends.verl.reader import load_reader
from agent_r1.build.models.load import load_model
from agent_r1.build.plan import build_plan
from agent_r1.cli.commands.chat import Chat, answer, chat_loop, open_chat
from agent_r1.cli.commands.train import run_training
from agent_r1.config import RunConfig, load_config, parse_config
from agent_r1.errors import ConfigError
from agent_r1.runs.reader import latest_checkpoint
from agent_r1.runs.run_dir import RunDir
from agent_r1.runs.trajectories import read_trajectories
from agent_r1.serve.api.limits import ServeLimits
from agent_r1.serve.api.open_model import choose, open_server
from agent_r1.vision.pictures import pictures_of
from tests.conftest import Cli
from tests.serve.api_server import ask, serving
from tests.vision.mini.task import PREPROCESSOR
from tests.vision.played import check_exact, shown_in
from tests.vision.tiny_models import picture

MINI = str(Path(__file__).parent / "mini")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Share one warm start among the tests of this file."""
    before = os.environ.get("AGENT_R1_CACHE")
    os.environ["AGENT_R1_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    torch.set_num_threads(1)
    yield
    if before is None:
        del os.environ["AGENT_R1_CACHE"]
    else:
        os.environ["AGENT_R1_CACHE"] = before


def train(path: Path, *overrides: str) -> str:
    """Returns what was printed."""
    config = load_config(MINI, overrides)
    console = Console(file=io.StringIO(), width=160)
    run_training(config, build_plan(config), RunDir.create(path, config), console, resume=False)
    printed: str = console.file.getvalue()  # type: ignore[attr-defined]
    return printed


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    path = tmp_path_factory.mktemp("runs") / "seen"
    return path, train(path)


@pytest.fixture(scope="module")
def finished(printed: tuple[Path, str]) -> Path:
    return printed[0]


def metrics(run: Path, kind: str) -> list[dict[str, Any]]:
    return RunDir.open(run).read_metrics(kind)


def test_a_run_trains_on_what_was_sampled(printed: tuple[Path, str]) -> None:
    finished, said = printed
    for record in metrics(finished, "train"):
        assert record["mismatch_kl"] < 1e-6
    played = list(read_trajectories(finished / "trajectories", "train_*"))
    assert len(played) == 2 * 2 * 2
    for trajectory in played:
        check_exact(trajectory)
        assert shown_in(trajectory.steps[0])
    assert "[image 24x16 " in said  # the transcript at the end names the row's picture
    assert (finished / "checkpoints" / latest_checkpoint(finished / "checkpoints")[1].name).is_dir()


@pytest.mark.parametrize(
    "overrides",
    [
        ("trainer.mode=async", "algorithm.name=gigpo", "context.policy=drop_results", "context.keep=1"),
        ("algorithm.name=ppo", "learner.train_vision=true", "algorithm.kl_coef=0.1"),
        ("lora.rank=4", "algorithm.kl_coef=0.1", "learner.prefix_sharing=on"),
    ],
    ids=lambda overrides: overrides[0],
)
def test_every_mode_trains_with_pictures(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    train(tmp_path / "run", *overrides, "eval.rows=1")
    records = metrics(tmp_path / "run", "train")
    assert len(records) == 2
    assert all(record["mismatch_kl"] < 1e-5 for record in records if "mode=async" not in overrides[0])
    assert records[-1]["grad_norm"] > 0


def test_a_run_continues_where_it_was_stopped(finished: Path, tmp_path: Path) -> None:
    config = load_config(MINI, ["trainer.steps=1"])
    run = RunDir.create(tmp_path / "half", config)
    run_training(config, build_plan(config), run, Console(file=io.StringIO()), resume=False)
    more = load_config(MINI, [])
    run_training(more, build_plan(more), run, Console(file=io.StringIO()), resume=True)
    for name in ("loss", "grad_norm", "reward/mean"):
        assert metrics(run.path, "train")[-1][name] == metrics(finished, "train")[-1][name]


def test_a_checkpoint_takes_pictures_as_its_run_did_and_its_card_says_how_to_load_it(
    finished: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(MINI)
    assert cli("sft", MINI, "--run", tmp_path / "imitated", "sft.count=1").code == 0
    assert cli("export", finished, tmp_path / "exported").code == 0
    checkpoints = [latest_checkpoint(run / "checkpoints")[1] for run in (finished, tmp_path / "imitated")]
    for place in (*checkpoints, tmp_path / "exported"):
        form = load_model(config, place).pictures
        assert form is not None
        assert form.stored == PREPROCESSOR
        assert (form.mean, form.std) == ((0.4, 0.5, 0.6), (0.3, 0.2, 0.1))
    card = (tmp_path / "exported" / "README.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    named: dict[str, Any] = {}
    exec(card.split("```python\n")[1].split("```")[0], named)
    assert type(named["model"]).__name__ == "Qwen3VLForConditionalGeneration"


def test_evaluation_collecting_and_imitation_know_pictures(finished: Path, tmp_path: Path, cli: Cli) -> None:
    ended = cli("eval", finished)
    assert ended.code == 0, ended.out
    collected = cli("collect", MINI, "--run", tmp_path / "collected", f"model.path={finished}", "sft.demos=null")
    assert collected.code == 0, collected.out + collected.err
    assert len(list((tmp_path / "collected" / "trajectories" / "pictures").iterdir())) >= 8
    imitate = ["sft", MINI, "--run", tmp_path / "imitated", f"sft.trajectories={tmp_path / 'collected'}",
               f"model.path={finished}", "sft.demos=null", "sft.min_reward=0"]  # fmt: skip
    ended = cli(*imitate)
    assert ended.code == 0, ended.out + ended.err


def test_a_recipe_with_pictures_is_checked_by_playing_it(cli: Cli) -> None:
    ended = cli("check", MINI, "--rows", "2")
    assert "episodes of the" not in ended.out  # none failed
    assert "pictures" not in ended.out + ended.err
    assert "calls" in ended.out


# chat


@pytest.fixture
def chat(finished: Path) -> Chat:
    return open_chat(parse_config(RunDir.open(finished).settings), str(finished))


def text_of_answers(chat: Chat, *questions: Any) -> str:
    console = Console(file=io.StringIO(), width=200)

    async def ask() -> None:
        for question in questions:
            await answer(chat, question, console)

    asyncio.run(ask())
    printed: str = console.file.getvalue()  # type: ignore[attr-defined]
    return printed


def test_chat_shows_the_pictures_of_the_row_and_those_that_are_given(chat: Chat, tmp_path: Path) -> None:
    own = pictures_of(chat.row.prompt)
    assert pictures_of([{"content": chat.question}]) == own
    given = picture(5, 32, 32)
    (tmp_path / "my picture.png").write_bytes(given.encoded)
    text_of_answers(chat, chat.question)
    assert pictures_of(chat.history)[:1] == own
    chat.forget()
    chat.show(str(tmp_path / "my picture.png"))
    text_of_answers(chat, "and this?")
    assert [p.encoded for p in pictures_of(chat.history)][:1] == [given.encoded]
    assert chat.shown == []  # only with one question


def test_the_chat_takes_pictures_by_command(chat: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a b.png").write_bytes(picture(5, 32, 32).encoded)
    (tmp_path / "bad.png").write_bytes(b"no")
    typed = f"/image {tmp_path}/a b.png\n/image {tmp_path}/bad.png\n/image /absent.png\nwhat?\n/quit\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    console = Console(file=io.StringIO(), width=300)
    chat_loop(chat, console)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "[image 32x32 " in said
    assert "is not a readable picture" in said
    assert "/absent.png" in said
    assert len(pictures_of(chat.history)) >= 1


def test_one_question_may_come_with_pictures(finished: Path, tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "a.png").write_bytes(picture(5, 32, 32).encoded)
    ended = cli("chat", finished, "--ask", "what?", "--image", tmp_path / "a.png", "--image", tmp_path / "a.png")
    assert ended.code == 0, ended.err
    assert ended.out.count("[image 32x32 ") == 2
    ended = cli("chat", finished, "--ask", "what?", "--image", tmp_path / "absent.png")
    assert ended.code == 2
    assert "absent.png" in ended.err


# refused


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["engine.kind=transformers"], "engine.kind=transformers takes no pictures"),
        (["lora.rank=4", "lora.share_base=true"], "lora.share_base"),
        (["lora.rank=4", "learner.train_vision=true"], "learner.train_vision has no effect with lora"),
    ],
)
def test_what_pictures_do_not_work_with_is_refused_by_name(tmp_path: Path, overrides: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        train(tmp_path / "run", *overrides, "sft.demos=null")


def test_verl_is_refused_by_name(finished: Path) -> None:
    config: RunConfig = load_config(MINI, [])
    with pytest.raises(ConfigError, match="backend=verl trains on text only"):
        load_reader(config, str(latest_checkpoint(finished / "checkpoints")[1]))


def test_settings_of_pictures_have_no_effect_on_a_model_of_text(tmp_path: Path) -> None:
    plain = str(Path(__file__).parents[1] / "mini")
    for setting in ("model.max_pixels=1000", "learner.train_vision=true"):
        config = load_config(plain, [setting, "sft.demos=null"])
        with pytest.raises(ConfigError, match=setting.partition("=")[0]):
            run_training(
                config, build_plan(config), RunDir.create(tmp_path / setting, config), Console(file=io.StringIO()),
                resume=False,
            )  # fmt: skip


# served


def test_a_damaged_picture_fails_only_the_request_that_shows_it(finished: Path) -> None:
    server = open_server(choose(str(finished), [], name="seen"), agent=False, limits=ServeLimits())
    whole = picture(5, 24, 24).encoded

    def question(data: bytes) -> list[dict[str, Any]]:
        url = f"data:image/png;base64,{b64encode(data).decode()}"
        return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]

    with serving(server) as address, ThreadPoolExecutor(8) as pool:
        others = [pool.submit(ask, address, model="seen", messages=question(whole), max_tokens=60) for _ in range(4)]
        bad = [pool.submit(ask, address, model="seen", messages=question(whole[:-60])) for _ in range(4)]
        refused = [each.result() for each in bad]
        assert [each.result().status_code for each in others] == [200] * 4
    assert [each.status_code for each in refused] == [400] * 4
    assert all("cannot be decoded" in each.json()["error"]["message"] for each in refused)
