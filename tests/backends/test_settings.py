from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agent_r1.backends.verl.settings import (
    CPU_ENGINE,
    check_settings,
    environment,
    num_agent_loops,
    num_workers,
    rollout_engine,
    verl_tree,
)
from agent_r1.build.plan import build_algorithm
from agent_r1.config import RunConfig, load_config
from agent_r1.errors import ConfigError
from tests.conftest import Cli

CPU = ("backend=verl", "verl.cpu=true")
GPU = ("backend=verl",)


def config(*overrides: str) -> RunConfig:
    return load_config("quickstart", overrides)


def tree(*overrides: str) -> Any:
    made = config(*overrides)
    return verl_tree(made, build_algorithm(made), model="/models/m")


def check(*overrides: str) -> None:
    made = config(*overrides)
    check_settings(made, build_algorithm(made))


def test_the_quickstart_runs_unchanged_on_both() -> None:
    check(*CPU)
    check(*GPU)


def test_the_section_needs_the_backend() -> None:
    with pytest.raises(ConfigError, match="verl does nothing without backend=verl"):
        config("verl.cpu=true")


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (["trainer.mode=async"], "trainer.mode=async"),
        (["trainer.deterministic=true"], "trainer.deterministic"),
        (["rollout.top_k=20"], "rollout.top_p and rollout.top_k"),
        (["algorithm.name=ppo", "critic.shared=true"], "critic.shared"),
        (["algorithm.name=ppo", "critic.normalize_returns=true"], "critic.normalize_returns"),
        (["model.fp32_head=true", "model.dtype=bfloat16"], "model.fp32_head"),
        (["model.device=cuda"], "model.device"),
        (["learner.compile=true"], "learner.compile"),
        (["learner.prefix_sharing=on"], "learner.prefix_sharing=on"),
        (["learner.offload_optimizer=true"], "learner.offload_optimizer"),
        (["learner.optimizer_state=8bit"], "learner.optimizer_state=8bit"),
        (["learner.mlp_chunk_tokens=64"], "learner.mlp_chunk_tokens"),
        (["lora.share_base=true"], "lora.share_base"),
        (["engine.kind=transformers"], "engine.kind=transformers"),
        (["verl.rollout=vllm"], "verl.rollout"),
        (["verl.strategy=megatron"], "verl.strategy=megatron"),
        (["verl.nodes=2"], "verl.nodes"),
    ],
)
def test_what_verl_cannot_do_is_refused_by_name(given: list[str], name: str) -> None:
    with pytest.raises(ConfigError) as error:
        check(*CPU, *given)
    assert str(error.value).startswith(f"{name} is not possible with backend=verl: ")


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ([], "learner.warmup_steps"),  # the quickstart's
        (["learner.warmup_steps=0", "learner.schedule=cosine"], "learner.schedule"),
        (["learner.warmup_steps=0", "lora.rank=4"], "lora"),
        (["learner.warmup_steps=0", "algorithm.name=ppo"], "algorithm 'ppo'"),
    ],
)
def test_megatron_has_an_optimizer_of_its_own(given: list[str], name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        check(*GPU, "verl.strategy=megatron", *given)


def test_sizes_have_defaults_for_a_laptop_and_for_a_node() -> None:
    assert (num_workers(config(*CPU)), num_agent_loops(config(*CPU))) == (2, 1)
    assert (num_workers(config(*GPU)), num_agent_loops(config(*GPU, "verl.nodes=4"))) == (8, 32)
    assert num_workers(config(*CPU, "verl.workers=3")) == 3


def test_the_engine_of_a_run() -> None:
    assert rollout_engine(config(*CPU)) == CPU_ENGINE
    assert rollout_engine(config(*GPU)) == "vllm"
    assert rollout_engine(config(*GPU, "verl.rollout=sglang")) == "sglang"


def test_our_settings_become_verls() -> None:
    made = tree(*GPU, "verl.nodes=4", "learner.max_grad_norm=0.5", "learner.adam_eps=1e-6", "rollout.temperature=0.7")
    assert made["trainer"] == {"nnodes": 4, "n_gpus_per_node": 8}
    actor, rollout = made["actor_rollout_ref"]["actor"], made["actor_rollout_ref"]["rollout"]
    assert made["actor_rollout_ref"]["model"]["path"] == "/models/m"
    assert actor["strategy"] == "fsdp2"
    assert actor["optim"]["lr"] == 3e-4
    assert actor["optim"]["clip_grad"] == 0.5
    assert actor["optim"]["betas"] == [0.9, 0.95]
    assert actor["optim"]["override_optimizer_config"] == {"role": "policy", "eps": 1e-6}
    assert actor["fsdp_config"]["mixed_precision"]["param_dtype"] == "bf16"
    assert actor["ppo_max_token_len_per_gpu"] == rollout["log_prob_max_token_len_per_gpu"] == 32_768
    assert rollout["name"] == "vllm"
    assert rollout["temperature"] == 0.7
    assert rollout["max_model_len"] == 256
    assert made["critic"] == {"enable": False}


def test_a_laptop_computes_in_float32_without_flash_attention() -> None:
    made = tree(*CPU)["actor_rollout_ref"]
    assert made["actor"]["fsdp_config"]["mixed_precision"]["param_dtype"] == "fp32"
    assert made["model"]["override_config"] == {"attn_implementation": "sdpa"}
    assert made["model"]["use_remove_padding"] is False
    assert made["rollout"]["dtype"] == "float32"


def test_a_critic_gets_its_own_optimizer() -> None:
    made = tree(*CPU, "algorithm.name=ppo")["critic"]
    assert made["enable"] is True
    assert made["optim"]["lr"] == pytest.approx(3e-3)  # ten times learner.lr
    assert made["optim"]["override_optimizer_config"]["role"] == "critic"
    assert tree(*CPU, "algorithm.name=ppo", "critic.lr=1e-4")["critic"]["optim"]["lr"] == 1e-4


def test_a_kl_builds_a_reference() -> None:
    assert tree(*CPU)["actor_rollout_ref"]["actor"]["use_kl_loss"] is False
    for where in ("loss", "reward"):
        made = tree(*CPU, "algorithm.kl_coef=0.1", f"algorithm.kl_in={where}")
        assert made["actor_rollout_ref"]["actor"]["use_kl_loss"] is True


def test_adapters_are_configured_and_merged_by_us() -> None:
    made = tree(*CPU, "lora.rank=4")["actor_rollout_ref"]
    assert made["model"]["lora_rank"] == 4
    assert made["model"]["lora_alpha"] == 8
    assert made["model"]["target_modules"] == "all-linear"
    assert "hf_model" not in made["actor"]["checkpoint"]["save_contents"]


def test_the_rest_passes_through() -> None:
    made = tree(*GPU, "verl.settings.actor_rollout_ref.rollout.tensor_model_parallel_size=2")
    assert made["actor_rollout_ref"]["rollout"]["tensor_model_parallel_size"] == 2
    assert tree(*GPU)["actor_rollout_ref"]["rollout"]["tensor_model_parallel_size"] == 1


def test_what_our_settings_decide_cannot_be_set_twice() -> None:
    with pytest.raises(ConfigError, match=r"verl\.settings\.\S+\.optim\.lr is decided by agent-r1's own"):
        tree(*GPU, "verl.settings.actor_rollout_ref.actor.optim.lr=1")
    with pytest.raises(ConfigError, match=r"verl\.settings\.critic\.enable is decided"):
        tree(*GPU, "verl.settings.critic.enable=true")


def test_processes_learn_where_they_are() -> None:
    assert environment(config(*CPU))["VERL_PLATFORM"] == "cpu"
    assert "VERL_PLATFORM" not in environment(config(*GPU))
    assert environment(config(*CPU))["OMP_NUM_THREADS"] == "1"  # trainer.threads of the quickstart


def test_a_dry_run_prints_both_trees_without_verl(cli: Cli) -> None:
    ended = cli("train", "quickstart", "--dry-run", *CPU)
    assert ended.code == 0, ended.err
    assert "backend: verl" in ended.out
    assert "verl's settings that follow from these" in ended.out
    assert "ppo_max_token_len_per_gpu: 8192" in ended.out


def test_without_the_extra_it_says_what_to_install(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("agent_r1.backends.verl.launch.find_spec", lambda name: None)
    ended = cli("train", "quickstart", *CPU, "--run", tmp_path / "run")
    assert ended.code != 0
    assert "backend=verl needs verl 0.9.1, which is not installed: install it with pip install 'agent-r1[verl]'" in (
        " ".join((ended.out + ended.err).split())
    )
    assert not (tmp_path / "run").exists()


def test_gpus_and_ranks_are_verls_business(cli: Cli) -> None:
    ended = cli("train", "quickstart", "--dry-run", "--gpus", "2", *CPU)
    assert ended.code != 0
    assert "backend=verl starts its own processes" in ended.out + ended.err
