"""Devices, number formats, adapters and determinism, from the config to the run directory."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from agent_r1.build.learner import build_learner, build_sft_learner, rehearse
from agent_r1.build.models.device import model_device, model_dtype
from agent_r1.build.models.load import load_model
from agent_r1.build.plan import build_algorithm, build_plan
from agent_r1.build.start import base_model, warm_start_key
from agent_r1.cli.commands.play import run_eval
from agent_r1.compute.compiling import repeated_layers
from agent_r1.config import RunConfig, parse_config
from agent_r1.errors import ConfigError
from agent_r1.runs.reader import latest_checkpoint
from agent_r1.runs.run_dir import RunDir
from agent_r1.train.checkpoint import load_state
from agent_r1.train.rng import deterministic
from tests.train.test_pipeline import console, mini, numbers, resumed, trained

ADAPTERS = ("lora={rank: 2, target_modules: [q_proj, v_proj, down_proj]}",)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENT_R1_CACHE", str(tmp_path_factory.mktemp("cache")))
        torch.set_num_threads(1)
        yield


def auto(*overrides: str) -> RunConfig:
    """The mini recipe on the available device."""
    return mini("model.device=auto", *overrides)


def learner_of(*overrides: str) -> Any:
    config = mini(*overrides)
    model = load_model(config, base_model(config))
    return build_learner(config, model, build_algorithm(config), None)


def on_a_machine_with_a_gpu(patch: pytest.MonkeyPatch, *, has_one: bool) -> None:
    patch.setattr(torch.cuda, "is_available", lambda: has_one)


def test_without_a_gpu_a_run_is_on_the_cpu_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_machine_with_a_gpu(monkeypatch, has_one=False)
    assert (model_device(auto()).type, model_dtype(auto())) == ("cpu", torch.float32)
    assert model_dtype(auto("model.dtype=bfloat16")) == torch.bfloat16
    with pytest.raises(ConfigError, match=r"model\.device=cuda"):
        build_plan(mini("model.device=cuda"))


def test_with_a_gpu_a_run_is_on_it_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_machine_with_a_gpu(monkeypatch, has_one=True)
    assert (model_device(auto()).type, model_dtype(auto())) == ("cuda", torch.bfloat16)
    assert model_dtype(auto("model.dtype=float32")) == torch.float32
    cpu = mini()
    assert (model_device(cpu).type, model_dtype(cpu)) == ("cpu", torch.float32)


def test_settings_arrive_at_the_learner() -> None:
    usual = learner_of()
    assert (usual.prefix_sharing, usual.offload_optimizer, usual.policy.compiled) == ("auto", False, False)
    assert usual.policy.autocast_dtype is None
    assert not any(layer.training for layer in repeated_layers(usual.policy.model))
    assert (usual.policy.mlp_chunk_tokens, usual.eight_bit_optimizer) == (None, False)
    other = learner_of(
        "model.dtype=bfloat16",
        "learner.prefix_sharing=off",
        "learner.activation_checkpointing=true",
        "learner.mlp_chunk_tokens=100",
        "learner.optimizer_state=8bit",
    )
    assert (other.policy.mlp_chunk_tokens, other.eight_bit_optimizer) == (100, True)
    assert (other.prefix_sharing, other.policy.autocast_dtype) == ("off", torch.bfloat16)
    assert all(layer.training for layer in repeated_layers(other.policy.model))
    assert {p.dtype for p in other.policy.model.parameters()} == {torch.float32}
    assert other.policy.head_dtype == torch.bfloat16
    assert learner_of("model.dtype=bfloat16", "model.fp32_head=true").policy.head_dtype is None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["learner.offload_optimizer=true"], r"learner\.offload_optimizer"),
        (["model.fp32_head=true"], r"model\.fp32_head"),
        (["learner.activation_checkpointing=maybe"], r"activation_checkpointing"),
        (["learner.optimizer_state=int4"], r"optimizer_state"),
        (["learner.mlp_chunk_tokens=64", "learner.max_tokens_per_pack=64"], r"mlp_chunk_tokens=64 does nothing"),
        (["lora.share_base=true", "engine={kind: vllm, urls: [http://x]}"], r"lora\.share_base needs"),
    ],
)
def test_what_cannot_work_is_refused_before_a_model_is_loaded(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_plan(mini(*overrides))


def test_pack_size_depends_on_the_device_unless_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(mini(), base_model(mini()))
    on_a_machine_with_a_gpu(monkeypatch, has_one=True)

    def sizes(*overrides: str) -> tuple[int, int]:
        config = auto("learner.compile=false", *overrides)
        learner = build_learner(config, model, build_algorithm(config), None)
        return learner.max_tokens_per_pack, build_sft_learner(config, model, num_updates=1).max_tokens_per_pack

    assert sizes("model.device=cpu") == (8192, 8192)
    assert sizes() == (131_072, 131_072)
    assert sizes("learner.max_tokens_per_pack=100") == (100, 100)


def test_the_estimate_chooses_only_what_the_config_leaves_open(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int | None, bool]] = []

    def note(learner: Any, *, longest: int | None, may_checkpoint: bool) -> str:
        asked.append((longest, may_checkpoint))
        return "fits"

    monkeypatch.setattr("agent_r1.build.learner.estimate", note)
    for overrides in (
        (),
        ("learner.max_tokens_per_pack=100",),
        ("learner.activation_checkpointing=true",),
        ("learner.activation_checkpointing=false",),
    ):
        assert rehearse(mini(*overrides), learner_of(*overrides)) == "fits"
    # rollout.max_context_tokens of the recipe; checkpointing is chosen only if the config leaves it open
    assert asked == [(512, True), (None, True), (512, False), (512, False)]


@pytest.mark.parametrize("sampling", [("eval.temperature=1", "eval.top_p=0.9"), ("rollout.top_k=9", "rollout.top_p=1")])
def test_top_p_and_top_k_are_refused_with_deterministic_kernels_on_a_gpu(
    sampling: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ("trainer.deterministic=true", *sampling, "learner.compile=false")
    build_plan(mini(*settings))
    on_a_machine_with_a_gpu(monkeypatch, has_one=True)
    section = sampling[0].partition(".")[0]
    with pytest.raises(ConfigError, match=rf"{section}\.top_p .*trainer\.deterministic"):
        build_plan(auto(*settings))


def test_without_peft_adapters_are_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"lora needs the package peft: pip install 'agent-r1\[lora\]'"):
        build_plan(mini("lora={rank: 4}"))


def test_without_a_compiler_compiling_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=r"learner\.compile needs a C\+\+ compiler"):
        build_plan(mini("learner.compile=true"))


def test_what_a_warm_start_depends_on_changes_its_key() -> None:
    base = base_model(mini())
    keys = {warm_start_key(mini(*o), base) for o in ((), ADAPTERS, ("model.dtype=bfloat16",))}
    keys |= {warm_start_key(mini(*o), base) for o in (("model.fp32_head=true",), ("learner.adam_eps=1e-5",))}
    keys.add(warm_start_key(mini("learner.optimizer_state=8bit"), base))
    keys.add(warm_start_key(mini("rollout.roles={critic: {max_response_tokens: 8}}"), base))
    keys.add(warm_start_key(mini("rollout.roles={critic: {max_response_tokens: 9}}"), base))
    assert len(keys) == 8
    unrelated = mini(
        "rollout.roles={critic: {temperature: 2}}",
        "learner.activation_checkpointing=true",
        "trainer.deterministic=true",
    )
    assert warm_start_key(unrelated, base) == warm_start_key(mini(), base)


def extended(path: Path, steps: int) -> RunDir:
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    config["trainer"]["steps"] = steps
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return RunDir.open(path)


def assert_resumes_exactly(folder: Path, *settings: str) -> None:
    """Train a run `whole`, and continue a copy of it that was killed before its last save."""
    trained(folder / "whole", *settings)
    shutil.copytree(folder / "whole", folder / "half")
    shutil.rmtree(folder / "half" / "checkpoints" / "step_000004")
    resumed(RunDir.open(folder / "half"))
    assert numbers(folder / "half") == numbers(folder / "whole")


@pytest.mark.parametrize("share", ["lora.share_base=false", "lora.share_base=true"])
def test_a_run_with_adapters_resumes_exactly_and_leaves_a_plain_model(tmp_path: Path, share: str) -> None:
    pytest.importorskip("peft")
    settings = (*ADAPTERS, share, "algorithm.kl_coef=0.1", "learner.lr=1e-2")
    assert_resumes_exactly(tmp_path, *settings)
    steps = [record for record in numbers(tmp_path / "whole") if record["kind"] == "train"]
    assert all(record["mismatch_max"] < 1e-4 for record in steps)  # the engine has the adapters, merged or not
    assert steps[-1]["kl_to_reference"] > 0

    _, checkpoint = latest_checkpoint(tmp_path / "whole" / "checkpoints")
    merged, initial = (load_file(folder / "model.safetensors") for folder in (checkpoint, tmp_path / "whole/reference"))
    assert merged.keys() == initial.keys()
    changed = {name.split(".")[-2] for name in merged if not torch.equal(merged[name], initial[name])}
    assert changed == {"q_proj", "v_proj", "down_proj"}
    state = load_state(checkpoint)["learner"]
    assert {name.rpartition(".")[2] for name in state["adapter"]} == {"lora_A", "lora_B"}
    # evaluated as any other model is, the last evaluation comes out again
    run = RunDir.open(tmp_path / "whole")
    last = [record for record in numbers(run.path) if record["kind"] == "eval"][-1]
    again = run_eval(parse_config(run.settings), run, console())
    assert again.metrics["success"] == last["success"]


def test_a_checkpoint_with_other_adapters_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    trained(tmp_path / "run", "trainer.steps=1", *ADAPTERS)
    run = extended(tmp_path / "run", 2)
    config = json.loads((run.path / "config.json").read_text(encoding="utf-8"))
    config["lora"]["rank"] = 3
    (run.path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"adapters do not fit .* lora"):
        resumed(RunDir.open(run.path))


def test_memory_and_number_format_change_how_a_run_computes_and_not_what_it_does(tmp_path: Path) -> None:
    few = ("trainer.steps=2", "eval.rows=2")
    trained(tmp_path / "plain", *few)
    trained(tmp_path / "thrifty", *few, "learner.activation_checkpointing=true", "trainer.deterministic=true")
    assert numbers(tmp_path / "thrifty") == numbers(tmp_path / "plain")
    trained(tmp_path / "half", *few, "model.dtype=bfloat16")
    steps = [record for record in numbers(tmp_path / "half") if record["kind"] == "train"]
    assert all(0 < record["mismatch_kl"] < 1e-3 for record in steps if not record["empty_update"])


def test_a_float32_head_reduces_the_mismatch_of_sampler_and_learner(tmp_path: Path) -> None:
    def mismatch(name: str, *overrides: str) -> float:
        trained(tmp_path / name, "trainer.steps=2", "eval.rows=2", "model.dtype=bfloat16", *overrides)
        steps = [record for record in numbers(tmp_path / name) if record["kind"] == "train"]
        return max(float(record["mismatch_kl"]) for record in steps if not record["empty_update"])

    assert 0 < mismatch("fine", "model.fp32_head=true") < mismatch("coarse")


def test_a_run_with_a_schedule_reshuffled_epochs_and_a_normalising_critic_resumes_exactly(tmp_path: Path) -> None:
    settings = (
        "algorithm.name=ppo",
        "learner.lr=1e-3",
        "learner.warmup_steps=2",
        "learner.schedule=cosine",
        "learner.num_epochs=2",
        "learner.num_minibatches=2",
        "learner.target_kl=0.02",
        "critic={schedule: linear, normalize_returns: true, value_clip: 0.5}",
        "eval.rows=2",
    )
    assert_resumes_exactly(tmp_path, *settings)
    steps = [record for record in numbers(tmp_path / "whole") if record["kind"] == "train"]
    # 4 steps of 4 planned updates each, after which the rate is a tenth; dropped updates are counted as planned
    assert steps[-1]["lr"] < 0.5e-3 < steps[0]["lr"]
    assert all("kl_dropped_updates" in record for record in steps)


@pytest.mark.parametrize("changes", [("algorithm.name=ppo",), ("lora={rank: 8}",)], ids=["critic", "adapters"])
def test_a_run_with_moments_in_8_bits_resumes_exactly(tmp_path: Path, changes: tuple[str, ...]) -> None:
    if "lora" in changes[0]:
        pytest.importorskip("peft")
    settings = (*changes, "learner.optimizer_state=8bit", "learner.lr=1e-3", "eval.rows=2")
    assert_resumes_exactly(tmp_path, *settings)
    _, checkpoint = latest_checkpoint(tmp_path / "whole" / "checkpoints")
    codes = load_state(checkpoint)["learner"]["optimizer"]["adam"]["state"][0]
    assert (codes["exp_avg"].dtype, codes["exp_avg_sq"].dtype) == (torch.int8, torch.uint8)
    assert (checkpoint / "trainer_state").is_dir()


def test_the_estimate_is_made_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*_: Any, **__: Any) -> str:
        raise ConfigError("does not fit")

    monkeypatch.setattr("agent_r1.build.learner.estimate", too_large)
    with pytest.raises(ConfigError, match="does not fit"):
        trained(tmp_path / "large")
    assert [record for record in numbers(tmp_path / "large") if record["kind"] == "train"] == []


def test_deterministic_kernels_are_used_only_inside_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # restored after the test
    with deterministic(True):
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert not torch.are_deterministic_algorithms_enabled()
    with pytest.raises(RuntimeError), deterministic(True):
        raise RuntimeError
    with deterministic(False):
        assert not torch.are_deterministic_algorithms_enabled()
