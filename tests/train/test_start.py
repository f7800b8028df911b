"""The cache of created models and warm starts is reused and never stale."""

from __future__ import annotations

import os
import shutil
import time
import uuid
from pathlib import Path

import pytest

from agent_r1.build.models.source import put
from agent_r1.build.start import base_model, warm_start_key
from agent_r1.config import RunConfig, load_config
from agent_r1.disk import A_DAY
from agent_r1.runs.run_dir import RunDir

MINI = str(Path(__file__).parents[1] / "mini")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AGENT_R1_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def mini(*overrides: str) -> RunConfig:
    return load_config(MINI, overrides)


def key(*overrides: str) -> str:
    config = mini(*overrides)
    return warm_start_key(config, base_model(config))


def test_leftovers_of_killed_runs_are_deleted_a_day_later_even_if_all_is_cached(cache: Path) -> None:
    base_model(mini())
    left = cache / ".warm-mini-0123456789abcdef.4711.part"
    left.mkdir()
    base_model(mini())
    assert left.exists()  # its process may still be writing
    os.utime(left, (time.time() - 2 * A_DAY,) * 2)
    base_model(mini())
    assert not left.exists()


def test_a_model_is_created_once_per_seed(cache: Path) -> None:
    first = base_model(mini())
    before = (Path(first) / "model.safetensors").stat().st_mtime_ns
    assert base_model(mini("trainer.steps=9")) == first
    assert (Path(first) / "model.safetensors").stat().st_mtime_ns == before
    assert base_model(mini("seed=1")) != first


WARM = [
    *("seed=1", "sft.lr=1e-4", "sft.count=7", "task.env_kwargs.max_bad_calls=7", "rollout.max_steps=2"),
    *("learner.betas=[0.8,0.9]", "learner.weight_decay=0.1", "learner.max_grad_norm=0.5"),
    "model.template_kwargs.enable_thinking=false",
]
OF_RL_ALONE = ["learner.lr=1e-5", "trainer.steps=9", "rollout.group_size=2", "eval.rows=3"]


@pytest.mark.parametrize("override", [*WARM, *OF_RL_ALONE])
def test_what_changes_a_warm_start_and_nothing_else_changes_its_key(override: str) -> None:
    assert (key(override) != key()) is (override in WARM)


@pytest.mark.parametrize(
    ("file", "settings"),
    [
        ("run/trajectories/train_000001.jsonl", ["sft.trajectories={folder}/run", "sft.demos=null"]),
        ("chat.jinja", ["model.chat_template={folder}/chat.jinja"]),
        ("data/train.jsonl", ["data.path={folder}/data"]),
    ],
)
def test_other_content_under_the_same_path_gives_another_key(tmp_path: Path, file: str, settings: list[str]) -> None:
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text("one", encoding="utf-8")
    filled = [setting.format(folder=tmp_path) for setting in settings]
    before = key(*filled)
    (tmp_path / file).write_text("two more", encoding="utf-8")
    assert key(*filled) != before


def copied(folder: Path) -> Path:
    """A recipe that reads its demonstrations from a file."""
    shutil.copytree(MINI, folder, ignore=shutil.ignore_patterns("__pycache__"))
    with (folder / "task.py").open("a", encoding="utf-8") as file:
        file.write("\n\ndef written(count, seed):\n    return Path(__file__).with_name('demos.json').read_text()\n")
    (folder / "demos.json").write_text("one", encoding="utf-8")
    return folder


def test_files_beside_a_recipe_and_its_data_are_part_of_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, kept = copied(tmp_path / "mine"), tmp_path / "data" / "mine_data"
    (folder / "data.py").write_text("FOLDER = 'mine_data'\n", encoding="utf-8")
    monkeypatch.setenv("AGENT_R1_DATA", str(tmp_path / "data"))
    config = load_config(str(folder), ["sft.demos=task.written"])

    def now() -> str:
        return warm_start_key(config, "owner/model")

    seen = [now()]
    (folder / "demos.json").write_text("two", encoding="utf-8")
    seen.append(now())
    kept.mkdir(parents=True)
    (kept / "train.jsonl").write_text("one", encoding="utf-8")
    seen.append(now())
    (kept / "train.jsonl").write_text("other", encoding="utf-8")
    seen.append(now())
    assert len(set(seen)) == 4
    monkeypatch.setattr("agent_r1.build.recipe.READ_WHOLE", 2)  # of files that are large, the size is enough
    large = now()
    (folder / "demos.json").write_text("three", encoding="utf-8")
    assert now() != large


@pytest.mark.parametrize(
    "setting",
    [
        "sft.demos={}.demos",
        "task.env={}.World",
        "task.flow={}.Flow",
        "task.tools=[{}.shout]",
        "context={{policy: rewrite, function: {}.rewrite}}",
        "context={{policy: summary, max_tokens: 200, demo_summary: {}.rewrite}}",
        "model.make={}.make",
    ],
)
def test_code_elsewhere_that_the_config_names_is_part_of_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    module = f"elsewhere_{uuid.uuid4().hex[:8]}"
    file = tmp_path / f"{module}.py"
    file.write_text("demos = World = Flow = shout = rewrite = make = print\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = mini(setting.format(module))
    before = warm_start_key(config, "owner/model")
    assert warm_start_key(config, "owner/model") == before
    file.write_text("# with another answer\n" + file.read_text(encoding="utf-8"), encoding="utf-8")
    assert warm_start_key(config, "owner/model") != before


def test_a_run_in_the_folder_of_its_recipe_finds_its_warm_start_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied(tmp_path / "mine")
    monkeypatch.setenv("AGENT_R1_CACHE", str(folder / "cache"))
    config = load_config(str(folder))
    before = warm_start_key(config, base_model(config))
    RunDir.create(folder / "out", config)
    (folder / "README.md").write_text("how to", encoding="utf-8")
    (folder / "run.log").write_text("said", encoding="utf-8")
    (folder / "other.yaml").write_text("base: base.yaml\ntrainer: {steps: 9}\n", encoding="utf-8")
    assert warm_start_key(config, base_model(config)) == before


def test_the_first_of_two_concurrent_writers_wins(tmp_path: Path) -> None:
    folder = tmp_path / "made"

    def slow(part: Path) -> None:
        (part / "mine").write_text("late", encoding="utf-8")
        os.makedirs(folder)  # meanwhile another run has finished the same
        (folder / "theirs").write_text("first", encoding="utf-8")

    put(folder, slow)
    assert [path.name for path in folder.iterdir()] == ["theirs"]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    def broken(part: Path) -> None:
        (part / "half").write_text("x", encoding="utf-8")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        put(tmp_path / "made", broken)
    assert list(tmp_path.glob("*made*")) == []
    (tmp_path / "made").mkdir()  # an empty folder, which a user may have chosen, hides no error
    with pytest.raises(OSError, match="disk full"):
        put(tmp_path / "made", broken)
