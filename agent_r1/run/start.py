"""Where a run starts from: an existing model, a freshly made one, or one with a supervised warm start.

What a recipe makes (a tiny model, its warm start) is made once and cached, keyed by everything it depends on.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from agent_r1 import __version__
from agent_r1.config import RunConfig, recipe_name
from agent_r1.run.build import Model, find_model, load_model, save_model
from agent_r1.run.metrics import Metrics
from agent_r1.run.resolve import recipe_files, resolve
from agent_r1.run.sft import warm_start
from agent_r1.run.track import Display


async def starting_model(config: RunConfig, console: Console) -> str | Path:
    """Where RL begins: the model as it is, or warm-started; a warm start is made once and cached."""
    if config.sft.demos is None and config.sft.trajectories is None:
        return base_model(config)
    cached = _cache_folder(config)
    if cached.is_dir():
        console.print(f"warm start: using {cached}", highlight=False, soft_wrap=True)
        return cached
    part = cached.with_name(f".{cached.name}.{os.getpid()}.part")
    try:
        model = load_model(config, base_model(config))
        with Display(console, "warm start", total=1) as display:
            await warm_start(config, model, sft_progress(display))
        save_model(model, part)
        part.replace(cached)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return cached


def base_model(config: RunConfig) -> str | Path:
    if config.model.path is not None:
        return find_model(config.model.path)
    assert config.model.make is not None  # the config checks that one of the two is given
    key = _digest(config.model.make, config.seed, _recipe_digest(config))
    folder = cache_root() / f"base-{recipe_name(config.recipe)}-{key}"
    if not folder.is_dir():
        part = folder.with_name(f".{folder.name}.{os.getpid()}.part")
        part.mkdir(parents=True)
        try:
            resolve(config.model.make, recipe=config.recipe)(directory=part, seed=config.seed)
            part.replace(folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return folder


def _cache_folder(config: RunConfig) -> Path:
    """Keyed by everything the warm start depends on, the recipe's own source files included."""
    key = _digest(
        config.model.model_dump(),
        config.sft.model_dump(),
        config.task.model_dump(),
        config.seed,
        _recipe_digest(config),
    )
    return cache_root() / f"warm-{recipe_name(config.recipe)}-{key}"


def _recipe_digest(config: RunConfig) -> str:
    return _digest(*(path.read_text(encoding="utf-8") for path in recipe_files(config.recipe)))


def reference_model(config: RunConfig, initial: Model, folder: Path) -> Model | None:
    """The initial policy for the KL penalty, kept in the run so that a resumed run compares with the same one."""
    if config.algorithm.kl_coef == 0:
        return None
    if not folder.is_dir():
        part = folder.with_name(f".{folder.name}.part")
        save_model(initial, part)
        part.replace(folder)
    return load_model(config, folder)


def cache_root() -> Path:
    root = os.environ.get("AGENT_R1_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "agent-r1"
    return Path(root).expanduser()


def _digest(*parts: object) -> str:
    text = json.dumps([__version__, *parts], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def sft_progress(display: Display) -> Callable[[int, int, Metrics], None]:
    def show(update: int, total: int, metrics: Metrics) -> None:
        display.total(total)
        if update % 10 == 0 or update == total:
            display.step(update, f"loss {metrics['loss']:.3f}", value=metrics["loss"])

    return show
