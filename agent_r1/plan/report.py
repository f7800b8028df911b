"""`agent-r1 plan`: what a run would need and cost on given GPUs, and which way to run it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agent_r1.config import RunConfig
from agent_r1.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from agent_r1.plan.layouts import Estimate, Load
    from agent_r1.plan.shapes import Shape

LIKE_STEPS = 10  # the last steps of a run whose episodes are averaged
OVERLAP_PAYS = 1.3  # from this speed-up on, the asynchronous loop is recommended


def run_plan(  # noqa: PLR0913 (the options of the command)
    config: RunConfig,
    console: Console,
    *,
    gpus: int,
    gpu: str,
    model: str | None,
    like: Path | None,
    tool_seconds: float,
    as_json: bool,
) -> None:
    from agent_r1.plan.formulas import gpu_of
    from agent_r1.plan.layouts import estimate, methods
    from agent_r1.plan.shapes import MEASURED

    if gpu not in MEASURED["gpus"]:
        raise ConfigError(f"--gpu {gpu} is unknown.{did_you_mean(gpu, MEASURED['gpus'])}")
    shape, load, on = _shape(config, model), describe_load(config, like, tool_seconds), gpu_of(gpu)
    rank = None if config.lora is None else config.lora.rank
    estimates = [estimate(shape, on, load, method, gpus=gpus) for method in methods(gpus=gpus, adapter_rank=rank)]
    advice = advise(estimates, gpus=gpus)
    hours = config.trainer.steps * gpus / 3600
    if as_json:
        ways = [each.to_json() | {"gpu_hours": hours * each.step} for each in estimates]
        about = {"model": asdict(shape) | {"parameters": shape.parameters}, "gpu": gpu, "gpus": gpus}
        plan = about | {"episodes": asdict(load), "ways": ways, "advice": advice}
        console.print_json(json.dumps(plan))
        return
    source = f"mean of the last steps of {like}" if like is not None else "guessed from rollout's limits; see --like"
    console.print(
        Text(
            f"{shape.name}: {shape.parameters / 1e9:.2f}B parameters on {gpus} x {on.name} ({on.source}, "
            f"{on.memory_gib:g} GiB)\n{load.episodes} episodes a step of {load.steps:.1f} model calls, "
            f"{load.response_tokens:.0f} sampled and {load.episode_tokens:.0f} tokens in all ({source})"
        ),
        soft_wrap=True,
    )
    console.print(_table(estimates, load, hours))
    console.print(Text(advice), soft_wrap=True)


def describe_load(config: RunConfig, like: Path | None, tool_seconds: float) -> Load:
    """The work of a step: its sizes from the recipe, the shape of its episodes from a run or from the limits."""
    from agent_r1.learn.algorithms import get_algorithm
    from agent_r1.plan.layouts import Load

    rollout, algorithm = config.rollout, get_algorithm(config.algorithm.name, **config.algorithm.settings)
    own_critic = algorithm.needs_critic and not (config.critic is not None and config.critic.shared)
    has_reference = config.algorithm.kl_coef > 0
    forwards = (algorithm.own_old_logprobs or config.correction is not None) + has_reference + algorithm.needs_critic
    episode = _limits(config) if like is None else _played(like)
    return Load(
        episodes=rollout.rows_per_step * (rollout.group_size + algorithm.needs_greedy),
        group_size=rollout.group_size,
        longest=rollout.max_context_tokens,
        at_once=rollout.max_concurrent,
        tool_seconds=tool_seconds,
        epochs=config.learner.num_epochs,
        forwards=forwards,
        critics=int(own_critic),
        references=int(has_reference),
        **episode,
    )


def advise(estimates: list[Estimate], *, gpus: int) -> str:
    """One sentence: the fastest way that fits and trains what the recipe asks for."""
    fitting = [each for each in estimates if each.fits]
    asked = [each for each in fitting if each.method.adapter_rank == estimates[0].method.adapter_rank]
    if not fitting:
        return (
            "advice: nothing here fits. Lower rollout.max_context_tokens, take more GPUs, or train with tensor "
            "and pipeline parallelism: backend=verl verl.strategy=megatron (docs/verl.md)"
        )
    own = [each for each in asked or fitting if each.method.split == 1]
    best = min(own or asked or fitting, key=lambda each: each.step)
    command = f"{_start(gpus)} {best.method.settings}".rstrip()
    if best.method.split > 1:
        command += " engine.python=... engine.gpus=... (docs/scaling.md): only engines on several GPUs each fit"
    if not asked:
        command += " (training all weights does not fit; for that, backend=verl)"
    if best.step > OVERLAP_PAYS * best.overlapped:
        command += f" trainer.mode=async, {best.overlapped:.1f} instead of {best.step:.1f} s a step"
    elif best.network_bound:
        command += "; the network limits the update: larger batches, lora or fewer nodes use the GPUs better"
    return f"advice: {command}"


def _start(gpus: int) -> str:
    """The command that starts one rank for each GPU."""
    from agent_r1.plan.layouts import NODE

    if gpus <= NODE:
        return f"agent-r1 train RECIPE{f' --gpus {gpus}' if gpus > 1 else ''}"
    return f"srun --ntasks {gpus} --ntasks-per-node {NODE} --gpus-per-node {NODE} agent-r1 train RECIPE"


def _shape(config: RunConfig, model: str | None) -> Shape:
    from agent_r1.build.models.source import as_directory, find_model
    from agent_r1.plan.shapes import find_shape

    if model is not None:
        return find_shape(model)
    if config.model.path is None:
        raise ConfigError(f"{config.recipe} creates its model: name one with --model, for example --model 1.5b")
    return find_shape(as_directory(find_model(config.model.path)))


def _limits(config: RunConfig) -> dict[str, float]:
    """Assume that episodes take all their steps and that half of their tokens are sampled."""
    rollout = config.rollout
    steps = rollout.max_steps
    sampled = min(steps * rollout.max_response_tokens, rollout.max_context_tokens / 2)
    tokens = min(2 * sampled, float(rollout.max_context_tokens))
    prompt = (tokens - sampled) / steps  # the first prompt is as long as each observation
    return {"steps": steps, "prompt_tokens": prompt, "response_tokens": sampled, "episode_tokens": tokens}


def _played(like: Path) -> dict[str, float]:
    """Read the episodes of a run. Its first prompt follows from the sum of its prompts, if they grow evenly."""
    from agent_r1.runs.reader import RunReader

    records: list[dict[str, Any]] = RunReader.open(like).read_metrics("train")
    records = [record for record in records if record.get("segments")][-LIKE_STEPS:]
    if not records:
        raise ConfigError(f"--like {like}: the run has no training step to learn from")
    names = ("episode/steps", "episode/response_tokens", "episode/prompt_tokens")
    steps, sampled, prompts = (fmean(record[name] for record in records) for name in names)
    tokens = fmean(record["tokens_flat"] / record["segments"] for record in records)
    tokens = max(tokens, sampled + 1)
    first = (2 * prompts - tokens * (steps - 1)) / (steps + 1)
    prompt = min(max(1.0, first), tokens - sampled)
    return {"steps": steps, "prompt_tokens": prompt, "response_tokens": sampled, "episode_tokens": tokens}


def _table(estimates: list[Estimate], load: Load, hours: float) -> Table:
    from agent_r1.plan.formulas import GIB

    title = "GiB of each GPU, tokens of a pack, sampled tokens per second, seconds of a step"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1), pad_edge=False)
    table.add_column("way", no_wrap=True)
    for name in ("GiB", "fits", "pack", "tokens/s", "play", "update", "step", "async", "GPU h"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in estimates:
        sampled = load.episodes * load.response_tokens / each.step
        pack = f"{each.pack_tokens / 1000:.0f}k" if each.pack_tokens >= 10_000 else str(each.pack_tokens)
        numbers = (f"{each.total_bytes / GIB:.0f}", "yes" if each.fits else "no", pack, f"{sampled:,.0f}")
        seconds = (f"{value:.1f}" for value in (each.collect, each.update, each.step, each.overlapped))
        table.add_row(each.method.name, *numbers, *seconds, f"{hours * each.step:,.1f}")
    return table
