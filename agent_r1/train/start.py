"""Where a run starts from: an existing model, a freshly made one, or one with a supervised warm start.

What a recipe makes (a tiny model, its warm start) is made once and cached, keyed by everything it depends on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from agent_r1 import __version__
from agent_r1.build.cache import cache_root, put
from agent_r1.build.model_source import as_directory
from agent_r1.build.plan import Model, Task, find_model, load_model, model_dtype, save_model
from agent_r1.build.resolve import borrowed_files, data_name, recipe_files, recipe_path, resolve
from agent_r1.build.task import named_code, warm_start_code
from agent_r1.config import RunConfig, recipe_name
from agent_r1.data.downloads import Report, data_dir
from agent_r1.places import anchored
from agent_r1.train.sft import OnUpdate, trajectory_source, warm_start

CODE = (".py", ".jinja", ".j2")
READ_WHOLE = 16 * 2**20  # bytes; of larger files of a recipe, size and time are looked at


async def starting_model(
    config: RunConfig, task: Task, base: str | Path, *, on_update: OnUpdate, report: Report
) -> str | Path:
    """Return the model that RL starts from: `base`, or its warm start, which is made once and cached."""
    if config.sft.demos is None and config.sft.trajectories is None:
        return base
    cached = cache_root() / f"warm-{recipe_name(config.recipe)}-{_warm_start_key(config, base)}"
    if cached.is_dir():
        report(f"warm start: using {cached}")
        return cached
    model = load_model(config, base)
    learner = await warm_start(config, task, model, on_update, report)
    put(cached, lambda folder: save_model(model, folder, learner.policy))
    return cached


def base_model(config: RunConfig) -> str | Path:
    """Return the model before any warm start; a model that the recipe creates is created once and cached."""
    if config.model.path is not None:
        return as_directory(find_model(config.model.path))
    assert config.model.make is not None  # the config checks that one of the two is given
    make = resolve(config.model.make, recipe=config.recipe)
    key = _digest(config.model.make, config.seed, _recipe_digest(config))
    folder = cache_root() / f"base-{recipe_name(config.recipe)}-{key}"
    if not folder.is_dir():
        put(folder, lambda part: make(directory=part, seed=config.seed))
    return folder


def needs_reference(config: RunConfig) -> bool:
    """Whether a run keeps its initial policy: for the KL penalty, or because adapters are added to it."""
    return config.algorithm.kl_coef != 0 or config.lora is not None


def reference_model(config: RunConfig, initial: Model, folder: Path) -> Model | None:
    """The initial policy, for the KL penalty. It is kept in the run, so that a resumed run compares with the same one
    and adapters are added to the same one; with adapters it needs no model of its own."""
    if not needs_reference(config):
        return None
    if not folder.is_dir():
        put(folder, lambda part: save_model(initial, part))
    return load_model(config, folder) if config.lora is None else None


def _warm_start_key(config: RunConfig, base: str | Path) -> str:
    """Everything the warm start depends on: model, template, demonstrations or trajectories, world, optimizer, seed.
    Of code, that of the recipe, of ours that it may borrow, and of the user's modules that the config names."""
    template = config.model.chat_template
    world = config.task.model_dump(include={"flow", "env", "env_kwargs", "tools", "tool_kwargs"})
    return _digest(
        _files_digest(Path(base)) if Path(base).is_dir() else str(base),
        recipe_path(template, recipe=config.recipe).read_text(encoding="utf-8") if template is not None else None,
        config.model.template_kwargs,
        config.sft.model_dump(),
        _data_digest(config),
        config.lora.model_dump() if config.lora is not None else None,
        [str(model_dtype(config)), config.model.fp32_head],
        config.learner.model_dump(include={"betas", "adam_eps", "weight_decay", "max_grad_norm"}),
        _files_digest(trajectory_source(config)) if config.sft.trajectories is not None else None,
        world,
        config.context.model_dump(),
        config.rollout.model_dump(include={"max_steps", "max_response_tokens", "max_context_tokens"}),
        config.seed,
        _recipe_digest(config),
    )


def code_digest(config: RunConfig) -> str:
    """Of the code that decides what a run plays and pays. Data lie in the same folders, and so may logs and results."""
    return _digest_of(path for path in _code_files(config, named_code(config)) if path.suffix in CODE)


def _recipe_digest(config: RunConfig) -> str:
    return _digest_of(_code_files(config, warm_start_code(config)))


def _code_files(config: RunConfig, names: Iterable[str]) -> list[Path]:
    return [*recipe_files(config.recipe), *borrowed_files(names, recipe=config.recipe)]


def _digest_of(files: Iterable[Path]) -> str:
    return _digest(*((path.name, _content(path)) for path in files))


def _content(path: Path) -> object:
    """Where reading it takes no time, what it holds: a copy of a recipe is the same recipe."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest() if path.stat().st_size <= READ_WHOLE else _signature(path)
    except OSError:  # gone again, or nobody's to read: no code can depend on it
        return None


def _data_digest(config: RunConfig) -> str | None:
    """Of the user's copy of the data, or of those that the recipe keeps."""
    if config.data.path is not None:
        return _files_digest(anchored(config.data.path))
    name = data_name(config.recipe)
    return None if name is None else _files_digest(data_dir(name))


def _files_digest(folder: Path) -> str:
    files = [folder] if folder.is_file() else sorted(path for path in folder.rglob("*") if path.is_file())
    return _digest(str(folder.resolve()), [_signature(path) for path in files])


def _signature(path: Path) -> tuple[str, int, int]:
    """Name, size and time: what a file holds cannot change without one of them."""
    return path.name, path.stat().st_size, path.stat().st_mtime_ns


def _digest(*parts: object) -> str:
    text = json.dumps([__version__, *parts], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
