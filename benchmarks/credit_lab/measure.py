"""The whole lab in several processes: learning curves, quality of gradients, scaling of process rewards.

The results are plain data, ready for JSON.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from multiprocessing import get_context
from statistics import NormalDist, mean, stdev
from typing import Any, Protocol, TypeVar, get_args

import torch
from torch import Tensor

from agent_r1.learn.rewards import ProcessScaling
from benchmarks.credit_lab.estimate import EPISODES, estimate_gradients, judge
from benchmarks.credit_lab.exact import best_return, expected_return, half_trained
from benchmarks.credit_lab.play import EPISODES_PER_ROW, ROWS_PER_BATCH, initial_policy
from benchmarks.credit_lab.train import EXACT, LEARNING_RATES, Curve, Run, train
from benchmarks.credit_lab.variants import CRITIC_LR, VARIANTS, variants_for
from benchmarks.credit_lab.worlds import SUMMARIES, WORLDS

POLICIES = ("initial", "half")
PROCESS_WORLDS = ("dense_rewards", "misleading_reward")  # those with process rewards
PROCESS_VARIANTS = ("grpo", "reinforce", "steppo", "gigpo")
FIRST_SELECTION_SEED = 1_000  # far from the seeds of the reported curves
GRADIENT_SEED = 2_000
CURVE_POINTS = 41

Job = TypeVar("Job")
Result = TypeVar("Result")


class RunAll(Protocol):
    """Runs jobs in any order and process; returns results in the order of the jobs."""

    def __call__(self, function: Callable[[Job], Result], jobs: Sequence[Job]) -> list[Result]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Sizes of the measurement."""

    worlds: tuple[str, ...]
    seeds: int  # of the reported curves, from 0
    selection_seeds: int = 3  # for choosing the learning rate
    learning_rates: tuple[float, ...] = LEARNING_RATES
    episodes: int = 80 * EPISODES
    gradient_batches: int = 600
    critic_batches: int = 60  # for fitting a learned critic before gradients are measured


def quick(plan: Plan) -> Plan:
    """A smoke test; its numbers mean little."""
    return replace(
        plan,
        seeds=2,
        learning_rates=(0.2,),
        episodes=4 * EPISODES,
        gradient_batches=6,
        critic_batches=2,
    )


def measure(plan: Plan, workers: int) -> dict[str, Any]:
    for name in plan.worlds:  # before forking, so that the processes inherit it
        _policy(name, "half")
    with _processes(workers) as run_all:
        return {
            "episodes_per_batch": f"{ROWS_PER_BATCH} rows x {EPISODES_PER_ROW} attempts",
            "critic_lr": CRITIC_LR,
            "plan": asdict(plan),
            "worlds": [_describe(name) for name in plan.worlds],
            "learning": _learning(plan, run_all),
            "gradients": run_all(_gradient_quality, _gradient_jobs(plan)),
            "process": _process_scaling(plan, run_all),
        }


@contextmanager
def _processes(workers: int) -> Iterator[RunAll]:
    # Forked, so that processes need not import torch and transformers again.
    with ProcessPoolExecutor(workers, mp_context=get_context("fork"), initializer=_one_thread) as pool:
        yield lambda function, jobs: list(pool.map(function, jobs))


def _one_thread() -> None:
    torch.set_num_threads(1)


def _describe(name: str) -> dict[str, Any]:
    world, policy_PA = WORLDS[name], initial_policy(WORLDS[name])
    return {
        "name": name,
        "summary": SUMMARIES[name],
        "states": world.num_states,
        "horizon": world.horizon,
        "initial_return": round(float(expected_return(world, policy_PA)), 4),
        "best_return": round(best_return(world), 4),
    }


# Learning.


def _learning(plan: Plan, run_all: RunAll) -> list[dict[str, Any]]:
    cells = [
        Run(world=world, variant=variant, lr=0.0, seed=0, episodes=plan.episodes)
        for world in plan.worlds
        for variant in (*variants_for(WORLDS[world]), EXACT)
    ]
    return [
        {"world": cell.world, "variant": cell.variant, **summary}
        for cell, summary in zip(cells, _curves(cells, plan, run_all), strict=True)
    ]


def _process_scaling(plan: Plan, run_all: RunAll) -> list[dict[str, Any]]:
    cells = [
        Run(world=world, variant=variant, lr=0.0, seed=0, episodes=plan.episodes, process=process)
        for world in PROCESS_WORLDS
        if world in plan.worlds
        for variant in PROCESS_VARIANTS
        for process in get_args(ProcessScaling)
    ]
    summaries = _curves(cells, plan, run_all)
    return [
        {"world": cell.world, "variant": cell.variant, "process": cell.process}
        | {name: value for name, value in summary.items() if name != "curve"}
        for cell, summary in zip(cells, summaries, strict=True)
    ]


def _curves(cells: Sequence[Run], plan: Plan, run_all: RunAll) -> list[dict[str, Any]]:
    if len(plan.learning_rates) == 1:
        chosen = [replace(cell, lr=plan.learning_rates[0]) for cell in cells]
    else:
        chosen = _with_best_rate(cells, plan, run_all)
    curves = iter(run_all(train, [replace(cell, seed=seed) for cell in chosen for seed in range(plan.seeds)]))
    return [{"lr": cell.lr, **summarise([next(curves) for _ in range(plan.seeds)], plan.episodes)} for cell in chosen]


def _with_best_rate(cells: Sequence[Run], plan: Plan, run_all: RunAll) -> list[Run]:
    """Choose the best learning rate for every cell, on separate seeds."""
    trials = [
        replace(cell, lr=lr, seed=FIRST_SELECTION_SEED + seed)
        for cell in cells
        for lr in plan.learning_rates
        for seed in range(plan.selection_seeds)
    ]
    areas = iter([area(curve, plan.episodes) for curve in run_all(train, trials)])
    chosen = []
    for cell in cells:
        scores = {lr: mean(next(areas) for _ in range(plan.selection_seeds)) for lr in plan.learning_rates}
        chosen.append(replace(cell, lr=max(scores, key=scores.__getitem__)))
    return chosen


def area(curve: Curve, episodes: int) -> float:
    """Mean share gained over the run: large for runs that learn early and keep it."""
    return mean(curve.at(list(range(0, episodes + 1, EPISODES))))


def summarise(curves: Sequence[Curve], episodes: int) -> dict[str, Any]:
    grid = [episodes * point // (CURVE_POINTS - 1) for point in range(CURVE_POINTS)]
    by_seed = [curve.at(grid) for curve in curves]
    points = [interval(column) for column in zip(*by_seed, strict=True)]
    return {
        "area": interval([area(curve, episodes) for curve in curves]),
        "final": interval([values[-1] for values in by_seed]),
        "final_by_seed": [round(values[-1], 4) for values in by_seed],
        "curve": {"episodes": grid, "mean": [point[0] for point in points], "margin": [point[1] for point in points]},
    }


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and the half-width of its 95 % confidence interval (Student's t)."""
    return round(mean(values), 4), round(student_t(len(values) - 1) * stdev(values) / math.sqrt(len(values)), 4)


def student_t(freedom: int, probability: float = 0.975) -> float:
    """The quantile, by its expansion around the normal one (A. Hill, 1970); within 1 % from 4 degrees on."""
    z = NormalDist().inv_cdf(probability)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


# Gradients.


@dataclass(frozen=True, slots=True, kw_only=True)
class _GradientJob:
    world: str
    variant: str
    policy: str
    batches: int
    critic_batches: int


def _gradient_jobs(plan: Plan) -> list[_GradientJob]:
    return [
        _GradientJob(
            world=world,
            variant=variant,
            policy=policy,
            batches=plan.gradient_batches,
            critic_batches=plan.critic_batches,
        )
        for world in plan.worlds
        for variant in variants_for(WORLDS[world])
        for policy in POLICIES
    ]


@cache
def _policy(world: str, kind: str) -> Tensor:
    policy_PA = initial_policy(WORLDS[world])
    return policy_PA if kind == "initial" else half_trained(WORLDS[world], policy_PA)


def _gradient_quality(job: _GradientJob) -> dict[str, Any]:
    gradients = estimate_gradients(
        WORLDS[job.world],
        VARIANTS[job.variant],
        _policy(job.world, job.policy),
        batches=job.batches,
        critic_batches=job.critic_batches,
        seed=GRADIENT_SEED,
    )
    numbers = {name: None if value is None else round(value, 4) for name, value in asdict(judge(gradients)).items()}
    return {
        "world": job.world,
        "variant": job.variant,
        "policy": job.policy,
        **numbers,
        "episodes_per_batch": round(gradients.episodes_per_batch, 1),
    }
