"""One of two ranks of test_parallel.py: trains every algorithm on its share and leaves what it saw in a file."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from agent_r1.errors import TrainingError
from agent_r1.learn import ALGORITHMS, PolicyModel
from agent_r1.learn.parallel import DataParallel, OneProcess
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

WORLD = 2
CASES = [(name, False) for name in ALGORITHMS] + [(n, True) for n, row in ALGORITHMS.items() if row.needs_critic]


def train_all(ranks: OneProcess) -> dict[str, Any]:
    """By case: the gradient of the first optimizer step, and metrics and weights after several."""
    results: dict[str, Any] = {f"{name} {shared}": train(name, ranks, shared=shared) for name, shared in CASES}
    results["corrected"] = train(
        "grpo", ranks, correction=correction("reject", level="step", cap=1.2), kl_coef=0.1, entropy_coef=0.01
    )
    results["stopped"] = train("grpo", ranks, lr=1e-2, target_kl=0.02, num_epochs=2, own_old_logprobs=True)
    results["warming up"] = train("steppo", ranks, shared=True, warmup_updates=2)
    results["one trajectory"] = train("reinforce", ranks, take=1)
    results["nothing"] = train("grpo", ranks, take=0)
    results["poisoned"] = poisoned(ranks)
    return results


def train(
    name: str,
    ranks: OneProcess,
    *,
    shared: bool = False,
    warmup_updates: int = 0,
    take: int | None = None,
    **more: Any,
) -> dict[str, Any]:
    policy, rng = PolicyModel(tiny_model()), random.Random(11)
    groups = on_policy(random_groups(rng, rows=2, size=3), policy, rng, noise=0.2)

    def fresh(**overrides: Any) -> Any:
        own = policy.copy()
        critic = critic_of(own, shared=shared, warmup_updates=warmup_updates) if ALGORITHMS[name].needs_critic else None
        reference = PolicyModel(tiny_model(seed=3)) if "kl_coef" in more else None
        return learner_for(name, own, ranks=ranks, critic=critic, reference=reference, **(more | overrides))

    once = fresh(max_grad_norm=float("inf"))
    credited = credit_for(name, groups, once)[:take]
    if name == "dr_grpo":  # divides by a large constant: back to order 1
        for item in credited:
            item.advantages[:] = [[100 * advantage for advantage in row] for row in item.advantages]
    once.update(credited)
    learner = fresh(num_epochs=2, num_minibatches=2, weight_decay=0.1)
    metrics = [learner.update(credited) for _ in range(2)]
    weights = {key: tensor.clone() for key, tensor in learner.weights().items()}
    return {"gradient": gradients_of(once), "metrics": metrics, "weights": weights}


def poisoned(ranks: OneProcess) -> dict[str, Any]:
    """One trajectory, so one rank's, has a log-prob that is no number: all ranks must skip, and name it."""
    policy, rng = PolicyModel(tiny_model()), random.Random(11)
    groups = on_policy(random_groups(rng, rows=2, size=3), policy, rng, noise=0.2)
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


def partial_gradients(ranks: DataParallel, rank: int) -> list[Any]:
    """Gradients of a parameter that both ranks use, of one that rank 1 alone uses, and of one that nobody does."""
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
    parameters[0].grad = torch.tensor([1.0, 2.0]) * (rank + 1)
    parameters[1].grad = torch.tensor([5.0, 7.0]) if rank == 1 else None
    ranks.sum_gradients(parameters)
    return [None if p.grad is None else p.grad.tolist() for p in parameters]


def main(rank: int, folder: Path) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=WORLD)
    ranks = DataParallel()
    results = train_all(ranks) | {"partial": partial_gradients(ranks, rank), "gathered": ranks.gather((rank, None))}
    torch.save(results, folder / f"rank{rank}.pt")
    distributed.destroy_process_group()
