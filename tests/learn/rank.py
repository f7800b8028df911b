"""One rank of test_parallel.py: trains every case on its share and leaves what it saw in a file."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from transformers import LlamaForCausalLM

from agent_r1.errors import TrainingError
from agent_r1.learn.algorithms import ALGORITHMS
from agent_r1.learn.learner import Learner
from agent_r1.learn.model.lora import LoRA
from agent_r1.learn.model.policy import PolicyModel
from agent_r1.learn.model.sharding import local, whole
from agent_r1.ranks.crew import OneProcess
from agent_r1.ranks.rank_crew import Ranks
from agent_r1.train.checkpoint import load_state, save_checkpoint
from agent_r1.types import Group
from tests.learn.builders import (
    correction,
    credit_for,
    critic_of,
    gradients_of,
    learner_for,
    on_policy,
    random_groups,
    tiny_model,
)
from tests.models.architectures import ARCHITECTURES

ADAPTERS = LoRA(rank=2, alpha=4.0, target_modules=None, seed=1)
LONG = ("grpo", "ppo", "steppo", "gigpo")  # compared over several updates: some contexts are rewritten, others grow
# Others give the same losses other advantages, which ranks do not compute.
OTHER_LOSSES = ("dr_grpo", "gspo", "cispo", "reinforce")
FAMILIES = ("Qwen3-MoE", "gpt-oss", "LFM2")  # experts; sinks and sliding windows too; convolutions
TREES: dict[str, Any] = {"kind": "append", "prefix_sharing": "on", "updates": 3}
# By name: the algorithm and how its learner differs from the plain one.
CASES: dict[str, dict[str, Any]] = {
    **{name: {"name": name, "updates": 3} for name in LONG},
    **{name: {"name": name} for name in OTHER_LOSSES},
    "two epochs": {"name": "ppo", "num_epochs": 2},
    "steppo shared": {"name": "steppo", "shared": True},
    "corrected": {
        "name": "grpo",
        "correction": correction("reject", level="step", cap=1.2),
        "kl_coef": 0.1,
        "entropy_coef": 0.01,
    },
    "warming up": {"name": "steppo", "shared": True, "warmup_updates": 1, "updates": 2},
    "one trajectory": {"name": "reinforce", "take": 1},
    "trees": {"name": "gigpo", **TREES},
    "rewritten contexts": {"name": "grpo", "kind": "broken", "updates": 3},
    "adapters, grpo": {"name": "grpo", "kl_coef": 0.1, "model": {"lora": ADAPTERS}, **TREES},
    "adapters, ppo": {"name": "ppo", "model": {"lora": ADAPTERS, "checkpoint_activations": True}, **TREES},
    **{family: {"name": "reinforce", "family": family} for family in FAMILIES},
    "tied": {"name": "steppo", "family": "llama-tied", "model": {"checkpoint_activations": True}},
    "offloaded": {"name": "ppo", "offload_optimizer": True, "family": "qwen3"},
    "MLPs in chunks": {"name": "ppo", "model": {"checkpoint_activations": True, "mlp_chunk_tokens": 5}},
    "8-bit state": {"name": "ppo", "eight_bit_optimizer": True, "updates": 2},
    "soft-capped": {"name": "grpo", "family": "gemma3", "own_old_logprobs": True},
    "bfloat16 policy": {"name": "reinforce", "model": {"autocast_dtype": torch.bfloat16}},
    "bfloat16 critic": {"name": "ppo", "model": {"autocast_dtype": torch.bfloat16}},
}
THREE = [
    *(name for name, case in CASES.items() if case.get("updates") == 3),
    "steppo shared",
    "Qwen3-MoE",
    "8-bit state",
]


def train_all(ranks: OneProcess, cases: list[str]) -> dict[str, Any]:
    """By case: metrics, weights and the last gradient of several optimizer steps."""
    results: dict[str, Any] = {name: train(ranks=ranks, **CASES[name]) for name in cases}
    stopping: dict[str, Any] = {"lr": 1e-2, "target_kl": 0.02, "own_old_logprobs": True, "num_epochs": 2}
    results["stopped"] = train("grpo", ranks, updates=2, **stopping)
    results["nothing"] = train("grpo", ranks, take=0, updates=2)
    results["poisoned"] = poisoned(ranks)
    return results


def attempts(policy: PolicyModel, kind: str) -> list[Group]:
    """Three rows of two attempts: with two ranks, one of them has more to compute."""
    rng = random.Random(11)
    groups = on_policy(random_groups(rng, rows=3, size=2, kind=kind), policy, rng, noise=0.2)
    return [
        replace(
            group,
            trajectories=[replace(each, row_id=f"r{number}") for each in group.trajectories],
            greedy=replace(group.greedy, row_id=f"r{number}") if group.greedy is not None else None,
        )
        for number, group in enumerate(groups)
    ]


def train(name: str, ranks: OneProcess, *, take: int | None = None, updates: int = 1, **case: Any) -> dict[str, Any]:
    learner, groups = new_learner(name, ranks, **case)
    credited = credit_for(name, groups, learner)[:take]
    if name == "dr_grpo":  # divides by a large constant: back to order 1
        for item in credited:
            item.advantages[:] = [[100 * advantage for advantage in row] for row in item.advantages]
    trajectories = [item.trajectory for item in credited]
    kl = learner.kl_to_reference(trajectories) if learner.reference is not None else []
    metrics = [learner.update(credited) for _ in range(updates)]
    return {
        "gradient": gradients_of(learner),  # of the last optimizer step
        "metrics": metrics,
        "weights": {key: tensor.clone() for key, tensor in learner.weights().items()},
        "kl": kl,
        "values": [item.values for item in credited],
        "sizes": sizes(learner),
        "noted": [list(notes.values()) for notes in learner.noted.values()],
    }


def new_learner(  # noqa: PLR0913 (the ways in which cases differ)
    name: str,
    ranks: OneProcess,
    *,
    kind: str = "mixed",
    shared: bool = False,
    warmup_updates: int = 0,
    family: str = "llama",
    model: dict[str, Any] | None = None,
    network: Any = None,
    **more: Any,
) -> tuple[Learner, list[Group]]:
    policy = PolicyModel(network or made(family), **(model or {}))
    groups = attempts(policy, kind)
    critic = critic_of(policy, shared=shared, warmup_updates=warmup_updates) if ALGORITHMS[name].needs_critic else None
    reference = None
    if "kl_coef" in more:
        has_adapters = policy.adapter_state() is not None
        reference = policy.without_adapters() if has_adapters else PolicyModel(tiny_model(family, seed=3))
    settings: dict[str, Any] = {
        "lr": 1e-4,
        "adam_eps": 1e-4,  # large: Adam divides by the size of a gradient, and would show the rounding of tiny ones
        "weight_decay": 0.1,
        "num_minibatches": 2,
        "ranks": ranks,
        "critic": critic,
        "reference": reference,
    }
    return learner_for(name, policy, **(settings | more)), groups


def made(family: str) -> Any:
    others = {each.name: each for each in ARCHITECTURES}
    return others[family].make() if family in others else tiny_model(family)


FEW = replace(ADAPTERS, target_modules=("q_proj", "down_proj"))  # each tensor of a checkpoint takes time
SAVED: dict[str, dict[str, Any]] = {
    "critic": {"name": "ppo", "family": "llama-tied"},
    "adapters": {"name": "grpo", "offload_optimizer": True, "model": {"lora": FEW}},
    "8-bit critic": {"name": "ppo", "eight_bit_optimizer": True},
    "8-bit adapters": {
        **{"name": "grpo", "offload_optimizer": True, "eight_bit_optimizer": True},
        "model": {"lora": replace(FEW, rank=8)},
    },
}


def resume_all(ranks: OneProcess, folder: Path) -> dict[str, Any]:
    """Save a checkpoint with these ranks, then train on: straight, and from the checkpoints of 1, 2 and 3 ranks."""
    results: dict[str, Any] = {}
    batches = {}
    for case, settings in SAVED.items():
        learner, groups = new_learner(ranks=ranks, **settings)
        credited = batches[case] = credit_for(settings["name"], groups, learner)
        learner.update(credited)
        state = {"learner": learner.state_dict(), "rank": ranks.rank}
        own = folder / case / str(ranks.size)
        save_checkpoint(own, 1, model=learner.policy, input_files=NoTokenizer(), state=state, keep=1, ranks=ranks)
        learner.update(credited)
        results[f"{case} straight"] = all_weights(learner)
    for case, settings in SAVED.items():
        for size in (1, 2, 3):
            path = wait_for(folder / case / str(size) / "step_000001")
            network = LlamaForCausalLM.from_pretrained(path) if "critic" in case else None  # adapters need the base
            learner, _ = new_learner(ranks=ranks, network=network, **settings)
            saved = load_state(path, ranks)
            assert saved["rank"] == 0
            learner.load_state_dict(saved["learner"])
            learner.update(batches[case])
            results[f"{case} from {size}"] = all_weights(learner)
    return results


def all_weights(learner: Learner) -> dict[str, torch.Tensor]:
    weights = {key: tensor.clone() for key, tensor in learner.weights().items()}
    if learner.critic is not None:
        states = {"head": learner.critic.head.state_dict(), "body": learner.critic.backbone.trained_state()}
        weights |= {f"{part}.{key}": whole(t).clone() for part, state in states.items() for key, t in state.items()}
    return weights


class NoTokenizer:
    def save_pretrained(self, save_directory: str) -> None:
        pass


def wait_for(path: Path) -> Path:
    """Other processes write it."""
    while not path.exists():
        time.sleep(0.05)
    return path


def sizes(learner: Learner) -> dict[str, int]:
    """Numbers that this rank holds: parameters and Adam's moments."""
    models = [learner.policy.model, *([learner.critic.backbone.model] if learner.critic else [])]
    moments = [
        s[key] for o in learner.optimizers.values() for s in o._adam.state.values() for key in ("exp_avg", "exp_avg_sq")
    ]
    return {
        "parameters": sum(local(p).numel() for model in models for p in model.parameters()),
        "moments": sum(local(moment).numel() for moment in moments),
    }


def poisoned(ranks: OneProcess) -> dict[str, Any]:
    """One trajectory, so one rank's, has a log-prob that is no number: all ranks must skip, and name it."""
    policy = PolicyModel(tiny_model())
    groups = attempts(policy, "mixed")
    learner = learner_for("reinforce++", policy, ranks=ranks, max_nonfinite_updates=3)
    credited = credit_for("reinforce++", groups, learner)
    credited[1].trajectory.steps[0].response_logprobs[0] = float("nan")
    metrics = [learner.update(credited) for _ in range(2)]
    error = ""
    try:
        learner.update(credited)
    except TrainingError as caught:
        error = str(caught)
    return {"metrics": metrics, "error": error, "name": credited[1].trajectory.trajectory_id}


def main(rank: int, world: int, folder: Path, checkpoints: Path) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=world)
    ranks = Ranks()
    results = train_all(ranks, list(CASES) if world == 2 else THREE)
    results["resumed"] = resume_all(ranks, checkpoints)
    results["gathered"] = ranks.gather((rank, None))
    results["broadcast"] = ranks.broadcast(f"from {ranks.rank} of {ranks.size}, main: {ranks.is_main}")
    torch.save(results, folder / f"rank{rank}.pt")
    distributed.destroy_process_group()
