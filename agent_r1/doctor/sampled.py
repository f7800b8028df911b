"""Checks that sample a few rows with the model that training starts from, and pass them through the learner."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from agent_r1.build.collectors import train_collector
from agent_r1.build.engine import build_engine
from agent_r1.build.learner import build_learner, lora_settings, rehearse
from agent_r1.build.models.device import model_dtype
from agent_r1.build.models.load import Model, load_model
from agent_r1.build.plan import Plan, build_algorithm
from agent_r1.config import RunConfig
from agent_r1.config.schema import AlgorithmConfig, CorrectionConfig
from agent_r1.doctor.finding import Finding, green, red, refused, yellow
from agent_r1.doctor.watchdog import watched
from agent_r1.engines.base import Engine
from agent_r1.errors import AgentR1Error
from agent_r1.learn.learner import Learner
from agent_r1.learn.memory import fixed_bytes
from agent_r1.learn.rewards import is_uniform, is_valid
from agent_r1.places import anchored
from agent_r1.rollout.collect import too_many
from agent_r1.types import CreditedTrajectory, Group, StopReason, Trajectory

MANY_CUT, MOST_CUT = 0.25, 0.75
FEW_CALLS, MANY_BAD = 0.1, 0.5  # calls per episode; share of calls
# KL per token between sampler and learner, by dtype: (worth a look, not the same model)
GAPS = {"float32": (1e-4, 1e-2), "bfloat16": (1e-2, 1e-1)}
STATE = 3  # a checkpoint holds weights and two moments, in float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    config: RunConfig
    plan: Plan
    groups: list[Group]

    @property
    def episodes(self) -> list[Trajectory]:
        return [each for group in self.groups for each in group.trajectories]


async def check_engine(
    config: RunConfig, plan: Plan, start: str | Path, count: int, *, seconds: float, end: Callable[[str], None]
) -> list[Finding]:
    """Sample `count` rows with the model at `start` as the first step would. `seconds` and `end` are for `watched`."""
    model = load_model(config, start)
    lora = lora_settings(config)
    engine = build_engine(config, model, adapters=lora if lora is not None and not lora.merges else None)
    try:
        async with watched(seconds, end):
            sampled = await sample(config, plan, model, engine, count)
    finally:
        await engine.close()
    found = check_failed(sampled) + check_tool_use(sampled) + check_cut(sampled) + check_groups(sampled)
    learner = resting_learner(config, model)
    return found + check_gap(sampled, learner) + check_memory(config, learner) + check_disk(config, model)


async def sample(config: RunConfig, plan: Plan, model: Model, engine: Engine, count: int) -> Sampled:
    collector = train_collector(config, plan.task, model.renderer, engine)
    groups = await collector(plan.train_rows[:count], seed=config.seed)
    return Sampled(config=config, plan=plan, groups=await plan.task.scorer(groups))


def check_failed(sampled: Sampled) -> list[Finding]:
    name = "sampled episodes end without errors"
    failed = [each for each in sampled.episodes if each.stop.is_failure]
    if failed:
        evidence = f"{len(failed)} of {len(sampled.episodes)} failed, such as {failed[0].failure}"
        many = too_many(failed, sampled.episodes, sampled.config.rollout.max_error_fraction)
        return [(red if many else yellow)(name, evidence, "Correct the code that it names")]
    return [green(name, f"{len(sampled.episodes)} episodes, none failed")]


def check_tool_use(sampled: Sampled) -> list[Finding]:
    if not sampled.plan.task.calls_tools:
        return []
    name, calls = "the policy calls tools", [call for t in sampled.episodes for s in t.steps for call in s.calls]
    rate = len(calls) / len(sampled.episodes)
    bad = sum(call.error is not None for call in calls)
    evidence = f"{rate:.2g} calls per episode, {bad} of {len(calls)} refused or failed"
    if rate < FEW_CALLS:
        fix = (
            "Start with demonstrations (sft.demos) or show a call in the prompt: what is never tried is never rewarded"
        )
        return [yellow(name, evidence, fix)]
    if bad > MANY_BAD * len(calls):
        return [
            yellow(name, evidence, "Look at them with agent-r1 show; compare the call format and the tools' schemas")
        ]
    return [green(name, evidence)]


def check_cut(sampled: Sampled) -> list[Finding]:
    name, episodes = "responses are not cut off", sampled.episodes
    cut = sum(each.stop is StopReason.MAX_TOKENS or any(step.is_cut for step in each.steps) for each in episodes)
    evidence = f"{cut} of {len(episodes)} episodes were cut off by a token limit"
    fix = "Raise rollout.max_response_tokens or rollout.max_context_tokens, or let demonstrations be shorter"
    if cut > MOST_CUT * len(episodes):
        return [red(name, evidence, fix)]
    return [yellow(name, evidence, fix)] if cut > MANY_CUT * len(episodes) else [green(name, evidence)]


def check_groups(sampled: Sampled) -> list[Finding]:
    name, groups = "attempts at a row differ in reward", sampled.groups
    uniform = sum(is_uniform(group) for group in groups)
    evidence = f"{uniform} of {len(groups)} groups of {sampled.config.rollout.group_size} earned the same reward"
    if uniform == len(groups) and len(groups) > 1:
        rewards = [each.total_reward for each in sampled.episodes if not each.stop.is_failure]
        best = max(rewards, default=0.0)
        fix = (
            "Tasks are too easy: use harder rows"
            if best >= sampled.config.task.success_reward
            else "Tasks are too hard: use a better model, a longer warm start or easier rows, or pay for parts"
        )
        return [yellow(name, f"{evidence}: comparing them teaches nothing", fix)]
    return [green(name, evidence)]


def resting_learner(config: RunConfig, model: Model) -> Learner:
    """The run's learner with learning rate 0 and a plain loss, which compares sampler and learner."""
    at_rest = config.model_copy(
        update={
            "learner": config.learner.model_copy(
                update={"lr": 0.0, "weight_decay": 0.0, "num_epochs": 1, "num_minibatches": 1, "target_kl": None}
            ),
            "algorithm": AlgorithmConfig(),
            "critic": None,
            "correction": CorrectionConfig(kind="truncate"),
        }
    )
    return build_learner(at_rest, model, build_algorithm(at_rest), None)


def check_gap(sampled: Sampled, learner: Learner) -> list[Finding]:
    name, episodes = "sampler and learner agree", list(filter(is_valid, sampled.episodes))
    if not episodes:
        return []
    ones = [[[1.0] * len(step.response_ids) for step in each.steps] for each in episodes]
    metrics = learner.update(
        [CreditedTrajectory(trajectory=each, advantages=own) for each, own in zip(episodes, ones, strict=True)]
    )
    gap, most = metrics["mismatch_kl"], metrics["mismatch_max"]
    small, large = GAPS[str(model_dtype(sampled.config)).removeprefix("torch.")]
    evidence = f"KL per token {gap:.2g}, largest log-ratio {most:.2g}, at learning rate 0"
    fix = "Set model.dtype=float32 or model.fp32_head=true, or correction.kind=truncate"
    if not gap <= large:
        return [red(name, evidence, f"{fix}; if it stays, sampler and learner compute different models")]
    return [yellow(name, evidence, fix)] if gap > small else [green(name, evidence)]


def check_memory(config: RunConfig, learner: Learner) -> list[Finding]:
    """On a GPU measured, on a CPU only what is there in every step."""
    name, fixed, memory = "a step fits into memory", sum(fixed_bytes(learner).values()), _main_memory()
    if learner.policy.device.type == "cpu" and fixed > memory:
        evidence = f"weights, gradients and optimizer need {_gib(fixed)} of {_gib(memory)}"
        return [red(name, evidence, "Train a smaller model, or adapters (lora)")]
    apart = config.algorithm.kl_coef > 0 or build_algorithm(config).needs_critic
    try:
        return [green(name, f"{rehearse(config, learner)}{'; critic and reference come on top' if apart else ''}")]
    except AgentR1Error as error:
        return [refused(name, error)]


def check_disk(config: RunConfig, model: Model) -> list[Finding]:
    name = "checkpoints fit on the disk"
    size = STATE * 4 * sum(parameter.numel() for parameter in model.network.parameters())
    kept = config.trainer.keep_checkpoints + 1  # the next one is written before the oldest goes
    free = shutil.disk_usage(_existing(anchored(Path("runs")))).free
    evidence = f"about {kept} times {_gib(size)} of {_gib(free)} free under runs/"
    if kept * size > free:
        return [red(name, evidence, "Free some space, or set --run to another disk, or trainer.keep_checkpoints=1")]
    return [green(name, evidence)]


def _main_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _existing(path: Path) -> Path:
    return next(each for each in (path, *path.parents) if each.is_dir())


def _gib(size: float) -> str:
    return f"{size / 2**30:.{max(0, 1 - int(math.log10(max(size / 2**30, 0.001))))}f} GiB"
