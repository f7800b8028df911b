"""Stored episodes: scored with another reward, and trained on again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from agent_r1.doctor.rescore import Change, Rescored, spread
from agent_r1.runs.reader import list_checkpoints
from tests.cli.test_cli import recipe
from tests.conftest import Cli

pytestmark = pytest.mark.usefixtures("cache")

OTHERS = """
from agent_r1.rollout.rewards.judge import LLMJudge

def shortest(row, trajectory):
    return 1.0 / (1 + len(trajectory.final_text))

def same(row, trajectory):
    return reward(row, trajectory)

def breaks(row, trajectory):
    raise KeyError("gold")

judge = LLMJudge("http://127.0.0.1:9/v1", model="strict")

async def judged(row, trajectory):
    return 0.5 * await judge(row, trajectory)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recipe(tmp_path_factory.mktemp("recipes") / "mini", OTHERS)


def train(folder: Path | str, run: Path, settings: list[str]) -> Path:
    from agent_r1.build.plan import build_plan
    from agent_r1.cli.commands.train import run_training
    from agent_r1.cli.terminal import Terminal
    from agent_r1.config import load_config
    from agent_r1.runs.run_dir import RunDir

    config = load_config(str(folder), ["trainer.keep_checkpoints=9", *settings])
    directory = RunDir.create(run, config)
    run_training(config, build_plan(config), directory, Terminal(quiet=True), resume=False)
    return directory.path


@pytest.fixture(scope="module")
def trained(folder: Path, cache: None) -> Path:
    """A run of four steps that kept every second checkpoint."""
    return train(folder, folder.parent / "run", ["learner.num_epochs=2", "learner.num_minibatches=2"])


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def column(out: str, start: str) -> str:
    return next(line for line in out.splitlines() if line.split()[:1] == start.split()[:1])


# rescore


def test_the_same_reward_changes_nothing(cli: Cli, trained: Path) -> None:
    ended = cli("rescore", trained, "--reward", "task.same")
    assert (ended.code, ended.err) == (0, "")
    assert column(ended.out, "correlation").split()[1] == "1.000"
    assert column(ended.out, "pairs").split()[2] == "0"
    assert "largest changes" not in ended.out


def test_another_reward_is_compared_step_by_step(cli: Cli, trained: Path) -> None:
    ended = cli("rescore", trained, "--reward", "task:shortest", "--largest", "3")
    assert (ended.code, ended.err) == (0, "")
    steps = [line.split()[0] for line in ended.out.splitlines() if "->" in line and line.split()[0].isdigit()]
    assert steps == ["1", "2", "3", "4"]
    assert len(ended.out.partition("largest changes")[2].strip().splitlines()) == 3
    only = cli("rescore", trained, "--reward", "task.shortest", "--step", "3")
    assert column(only.out, "3") == column(ended.out, "3")


def test_the_numbers_are_those_of_the_records(folder: Path, trained: Path) -> None:
    import asyncio
    from statistics import fmean

    from agent_r1.config import parse_config
    from agent_r1.doctor.rescore import mean_change, rescore, with_reward
    from agent_r1.runs.reader import RunReader

    reader = RunReader.open(trained)
    found = asyncio.run(rescore(reader, with_reward(parse_config(reader.settings), "task.shortest"), step=2))
    records = [record for record in reader.files("train")[1] if record["stop"] not in ("error", "timeout")]
    texts = [record["steps"][-1]["action_text"] for record in records]
    assert [each.after for each in found.changes] == pytest.approx([1 / (1 + len(text)) for text in texts])
    before, after, _, succeeds = mean_change(found.changes)
    assert before == pytest.approx(fmean(record["total_reward"] for record in records))
    assert (after, succeeds) == (fmean(each.after for each in found.changes), fmean(not text for text in texts))


def test_a_reward_that_fails_is_reported_and_counts_as_nothing(cli: Cli, trained: Path) -> None:
    ended = cli("rescore", trained, "--reward", "task.breaks", "--step", "1")
    assert ended.code == 0
    assert "gold" in ended.out
    assert "-> 0.000" in column(ended.out, "1")


def test_a_judge_is_asked_only_if_that_is_allowed(cli: Cli, trained: Path) -> None:
    ended = cli("rescore", trained, "--reward", "task.judged")
    assert ended.code == 2
    assert "'strict'" in ended.err
    assert "--allow-services" in ended.err


@pytest.mark.parametrize("step", [1, 3])
def test_records_that_do_not_give_their_own_reward_are_not_trusted(cli: Cli, run: Path, step: int) -> None:
    path = run / "trajectories" / f"train_{step:06d}.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for line in lines:
        line["outcome_reward"] += 0.25
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    ended = cli("rescore", run, "--reward", "task.shortest")
    assert ended.code == 2
    assert "--trust-records" in ended.err
    assert cli("rescore", run, "--reward", "task.shortest", "--trust-records").code == 0


def test_the_steps_that_are_tried_reach_from_the_first_to_the_last() -> None:
    assert spread(range(100), 4) == [0, 33, 66, 99]
    assert spread([7, 8], 4) == [7, 8]


@pytest.mark.parametrize("change", [{"row_id": "gone-1"}, {"row": {"prompt": [], "ground_truth": 7}}])
def test_rows_that_are_gone_or_changed_are_named(cli: Cli, run: Path, change: dict[str, object]) -> None:
    path = run / "trajectories" / "train_000002.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    path.write_text("".join(json.dumps(line | change) + "\n" for line in lines), encoding="utf-8")
    ended = cli("rescore", run, "--reward", "task.shortest")
    assert ended.code == 2
    assert "train_000002.jsonl" in ended.err


def test_a_step_without_episodes_is_refused(cli: Cli, trained: Path) -> None:
    ended = cli("rescore", trained, "--reward", "task.same", "--step", "77")
    assert ended.code == 2
    assert "from 1 to 4" in ended.err


def change(trajectory: str, before: float, after: float, row: str = "r", step: int = 1) -> Change:
    return Change(
        step=step,
        row_id=row,
        trajectory_id=trajectory,
        before=before,
        after=after,
        succeeded=before >= 1,
        succeeds=after >= 1,
    )


def test_groups_are_compared_by_the_order_of_their_attempts() -> None:
    # a > b > c becomes b > a, c = a: one pair of three is swapped (a, b), and (a, c) is a tie now
    ordered = [change("a", 3, 1), change("b", 2, 2), change("c", 1, 1)]
    # the same rewards in another step and row: uniform before, different now
    gains = [change("d", 0.1 + 0.2, 1, row="s", step=2), change("e", 0.3, 0, row="s", step=2)]
    found = Rescored(changes=[*ordered, *gains], unscored=0)
    first, second = found.groups
    assert (first.step, first.row_id, first.swapped, first.pairs) == (1, "r", 1, 3)
    assert (second.was_uniform, second.is_uniform, second.swapped) == (True, False, 0)
    assert [each.trajectory_id for each in found.largest(2)] == ["a", "d"]  # by 2 and by 0.7


def test_a_constant_reward_has_no_correlation() -> None:
    found = Rescored(changes=[change("a", 0, 1), change("b", 1, 1)], unscored=0)
    assert found.correlation is None
    assert Rescored(changes=[change("a", 0, 1), change("b", 1, 0)], unscored=0).correlation == pytest.approx(-1)


# replay


@pytest.mark.parametrize(("first", "compared"), [("3", [4]), ("4", [4]), ("1", [2, 4])])
def test_a_replay_ends_at_the_same_weights(
    cli: Cli, trained: Path, tmp_path: Path, first: str, compared: list[int]
) -> None:
    ended = cli("replay", trained, "--from", first, "--run", tmp_path / "again")
    assert (ended.code, ended.err) == (0, "")
    assert "warning" not in ended.out
    said = [line for line in ended.out.splitlines() if line.startswith("weights")]
    assert said == [f"weights of step {step}: equal bit for bit" for step in compared]
    assert (tmp_path / "again" / "tokens.json").read_bytes() == (trained / "tokens.json").read_bytes()
    for step in compared:
        again = dict(list_checkpoints(tmp_path / "again" / "checkpoints"))[step]
        original = dict(list_checkpoints(trained / "checkpoints"))[step]
        assert (again / "model.safetensors").read_bytes() == (original / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    "settings",
    [
        ["algorithm.name=ppo", "learner.schedule=linear"],
        ["algorithm.name=dapo", "algorithm.kl_coef=0.1"],
        ["algorithm.kl_coef=0.1", "algorithm.kl_in=reward", "algorithm.kl_target=0.01", "rewards.process=running_std"],
        ["lora.rank=2", "rollout.top_p=0.9", "rollout.top_k=20", "correction.kind=truncate"],
    ],
    ids=lambda settings: settings[0],
)
def test_a_replay_is_exact_with_critics_references_adapters_and_running_scales(
    cli: Cli, folder: Path, tmp_path: Path, settings: list[str]
) -> None:
    short = ["sft.demos=null", "eval.rows=1", "rollout.max_response_tokens=12"]
    original = train(folder, tmp_path / "run", [*short, *settings])
    ended = cli("replay", original, "--from", "3", "--run", tmp_path / "again")
    assert (ended.code, ended.err) == (0, "")
    assert "weights of step 4: equal bit for bit" in ended.out


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        ("planner_worker/tiny", ["rollout.max_steps=4"]),  # roles
        ("gridworld/tiny", ["rollout.max_steps=2"]),  # pictures, with a trained vision tower
    ],
)
def test_a_replay_is_exact_with_roles_and_pictures(cli: Cli, tmp_path: Path, recipe: str, settings: list[str]) -> None:
    # An untrained model earns nothing, so entropy is what the updates follow.
    short = ["sft.demos=null", "eval.rows=1", "rollout.max_response_tokens=8", "trainer.save_every=1"]
    short += ["algorithm.entropy_coef=0.1", "algorithm.name=reinforce"]
    original = train(recipe, tmp_path / "run", [*short, *settings])
    ended = cli("replay", original, "--from", "1", "--run", tmp_path / "again")
    assert (ended.code, ended.err) == (0, "")
    assert [line for line in ended.out.splitlines() if line.startswith("weights")] == [
        f"weights of step {step}: equal bit for bit" for step in (1, 2)
    ]
    first, last = (load_file(original / "checkpoints" / f"step_{step:06d}" / "model.safetensors") for step in (1, 2))
    assert any(not first[name].equal(last[name]) for name in first)  # there was something to repeat


def test_a_replay_without_a_checkpoint_to_compare_with_fails(cli: Cli, run: Path, tmp_path: Path) -> None:
    shutil.rmtree(run / "checkpoints" / "step_000004")
    ended = cli("replay", run, "--from", "3", "--run", tmp_path / "again")
    assert ended.code == 1
    assert "weights of step" not in ended.out
    assert [step for step, _ in list_checkpoints(tmp_path / "again" / "checkpoints")] == [4]


def change_versions(run: Path, **changes: str) -> None:
    path = run / "versions.json"
    [made_by] = json.loads(path.read_text(encoding="utf-8"))
    assert made_by["device"] == "cpu"
    path.write_text(json.dumps([made_by | changes]), encoding="utf-8")


def test_other_versions_are_named_and_another_device_is_refused(cli: Cli, run: Path, tmp_path: Path) -> None:
    change_versions(run, torch="1.0.0")
    ended = cli("replay", run, "--from", "3", "--run", tmp_path / "again")
    assert ended.code == 0
    assert "torch 1.0.0 ->" in ended.out
    change_versions(run, device="NVIDIA H200")
    refused = cli("replay", run, "--from", "3", "--run", tmp_path / "elsewhere")
    assert refused.code == 2
    assert "NVIDIA H200" in refused.err
    assert not (tmp_path / "elsewhere").exists()


def test_a_replay_of_other_episodes_differs(cli: Cli, run: Path, tmp_path: Path) -> None:
    path = run / "trajectories" / "train_000003.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for number, line in enumerate(lines):
        line["outcome_reward"] = float(number % 3)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    ended = cli("replay", run, "--from", "3", "--run", tmp_path / "again")
    assert ended.code == 1
    assert "weights of step 4: differ by up to" in ended.out


def test_missing_checkpoints_and_episodes_are_named(cli: Cli, run: Path, tmp_path: Path) -> None:
    (run / "trajectories" / "train_000004.jsonl").unlink()
    ended = cli("replay", run, "--from", "3", "--run", tmp_path / "again")
    assert ended.code == 2
    assert "step 4" in ended.err
    shutil.rmtree(run / "checkpoints" / "step_000002")
    ended = cli("replay", run, "--from", "3", "--run", tmp_path / "again")
    assert ended.code == 2
    assert "kept: 4" in ended.err
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize(
    ("section", "setting", "value"),
    [("trainer", "mode", "async"), ("algorithm", "name", "remax")],
)
def test_runs_whose_updates_cannot_be_repeated_are_refused(
    cli: Cli, run: Path, tmp_path: Path, section: str, setting: str, value: str
) -> None:
    settings = json.loads((run / "config.json").read_text(encoding="utf-8"))
    settings[section][setting] = value
    if section == "algorithm":
        settings["learner"] |= {"num_epochs": 1, "num_minibatches": 1}
    (run / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    ended = cli("replay", run, "--from", "3", "--run", tmp_path / "again")
    assert ended.code == 2
    assert value in ended.err
