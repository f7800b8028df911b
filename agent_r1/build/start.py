"""Build the model that a run starts from: an existing one, one that the recipe creates, or a warm start of either.

Created models and warm starts are cached, keyed by everything they depend on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from agent_r1.build.collectors import train_collector
from agent_r1.build.context import message_function
from agent_r1.build.learner import build_sft_learner, rehearse
from agent_r1.build.models.device import model_dtype
from agent_r1.build.models.load import Model, load_model, load_tokenizer, save_model
from agent_r1.build.models.source import as_directory, cache_root, find_model, put
from agent_r1.build.recipe import code_digest, data_name, digest, folder_digest, recipe_path
from agent_r1.build.resolve import one_line_errors, resolve
from agent_r1.build.task import Task, recipe_function, warm_start_code
from agent_r1.config import RunConfig, recipe_name
from agent_r1.config.schema import SummaryContext
from agent_r1.data.downloads import Report, data_dir
from agent_r1.data.rows import Demo
from agent_r1.disk import remove_leftovers
from agent_r1.errors import DataError
from agent_r1.learn.credit import as_demonstrations
from agent_r1.learn.learner import Learner
from agent_r1.places import anchored
from agent_r1.runs.trajectories import TRAINED, read_trajectories, trajectories_of
from agent_r1.tokens.rendering import Renderer
from agent_r1.train.demonstrations import DemoPlayer
from agent_r1.train.sft import OnUpdate, imitate, select, shuffled_batches
from agent_r1.types import TaskRow, Trajectory


def has_warm_start(config: RunConfig) -> bool:
    return config.sft.demos is not None or config.sft.trajectories is not None


async def starting_model(
    config: RunConfig, task: Task, base: str | Path, *, on_update: OnUpdate, report: Report
) -> str | Path:
    """Return the model that RL starts from: `base`, or its warm start."""
    if not has_warm_start(config):
        return base
    cached = cache_root() / f"warm-{recipe_name(config.recipe)}-{warm_start_key(config, base)}"
    if cached.is_dir():
        report(f"warm start: using {cached}")
        return cached
    model = load_model(config, base)
    learner = await warm_start(config, task, model, on_update, report)
    put(cached, lambda folder: save_model(model, folder, learner.policy))
    return cached


def base_model(config: RunConfig) -> str | Path:
    """Return the model before any warm start; create it if the recipe says how and it is not cached."""
    remove_leftovers(cache_root())
    if config.model.path is not None:
        return as_directory(find_model(config.model.path))
    assert config.model.make is not None  # the config checks it
    make = resolve(config.model.make, recipe=config.recipe)
    key = digest(config.model.make, config.seed, _start_digest(config))
    folder = cache_root() / f"base-{recipe_name(config.recipe)}-{key}"
    if not folder.is_dir():
        put(folder, lambda part: make(directory=part, seed=config.seed))
    return folder


def require_base(config: RunConfig) -> None:
    """Raise ConfigError if the model cannot be loaded, before a run directory exists: the hub may be out of reach."""
    if config.model.path is not None:
        load_tokenizer(config, str(base_model(config)))


def needs_reference(config: RunConfig) -> bool:
    """Whether a run keeps its initial policy: for the KL penalty, or because adapters are added to it."""
    return config.algorithm.kl_coef != 0 or config.lora is not None


def reference_model(config: RunConfig, initial: Model, folder: Path) -> Model | None:
    """Keep the initial policy in the run, so that a resumed run uses the same one, and load it for the KL penalty.

    With adapters, the trained model contains it, and no second model is loaded.
    """
    if not needs_reference(config):
        return None
    if not folder.is_dir():
        put(folder, lambda part: save_model(initial, part))
    return load_model(config, folder) if config.lora is None else None


async def warm_start(config: RunConfig, task: Task, model: Model, on_update: OnUpdate, report: Report) -> Learner:
    """Train `model.network` in place on the recipe's demonstrations or on a run's good trajectories."""
    settings = config.sft
    examples = as_demonstrations(await sft_trajectories(config, task, model.renderer, report))
    batches = shuffled_batches(examples, epochs=settings.epochs, batch_size=settings.batch_size, seed=config.seed)
    learner = build_sft_learner(config, model, len(batches))
    rehearse(config, learner)
    await imitate(learner, batches, target_loss=settings.target_loss, on_update=on_update, report=report)
    return learner


async def sft_trajectories(config: RunConfig, task: Task, renderer: Renderer, report: Report) -> list[Trajectory]:
    if config.sft.trajectories is not None:
        return _own_trajectories(config, renderer, report)
    return await play_demos(config, task, renderer, load_demos(config), report)


async def play_demos(
    config: RunConfig, task: Task, renderer: Renderer, demos: Sequence[Demo], report: Report
) -> list[Trajectory]:
    """Return the demonstrations that fit the limits. Raises DataError for one that cannot be played."""
    summary = config.context.demo_summary if isinstance(config.context, SummaryContext) else None
    player = DemoPlayer(
        make_collector=partial(train_collector, config, task, renderer),
        renderer=renderer,
        max_concurrent=config.rollout.max_concurrent,
        write_summary=None if summary is None else message_function(config, "context.demo_summary", summary),
    )
    return await player.play(demos, report)


def load_demos(config: RunConfig) -> list[Demo]:
    name = config.sft.demos
    assert name is not None
    with one_line_errors(f"sft.demos={name!r} raised", DataError):
        made = recipe_function(name, config)(count=config.sft.count, seed=config.seed)
        demos = list(made) if isinstance(made, Iterable) else []
    if not demos:
        raise DataError(f"sft.demos={name!r} returned {made!r:.80}, not demonstrations")
    for index, demo in enumerate(demos):
        match demo:
            case [TaskRow(), [*texts]] if all(isinstance(text, str) for text in texts):
                continue
        raise DataError(
            f"demonstration {index} of sft.demos={name!r} is {demo!r:.200}; expected a pair: a TaskRow and a list of "
            "the expert's texts, one per turn"
        )
    return demos


def _own_trajectories(config: RunConfig, renderer: Renderer, report: Report) -> list[Trajectory]:
    """Read a run's trajectories and keep those that earned enough (rejection sampling)."""
    settings = config.sft
    assert settings.trajectories is not None
    source = trajectories_of(settings.trajectories)
    read = read_trajectories(source, TRAINED)
    chosen = select(read, min_reward=settings.min_reward, max_per_row=settings.max_per_row)
    if not chosen.trajectories:
        raise DataError(f"no trajectory under {source} has a reward of at least sft.min_reward={settings.min_reward:g}")
    kept = f"{chosen.good} earned at least {settings.min_reward:g}, {chosen.distinct} of them distinct"
    report(f"imitating {len(chosen.trajectories)} of {chosen.read} trajectories: {kept}")
    for trajectory in chosen.trajectories:
        for step in trajectory.steps:
            if (text := renderer.decode(step.response_ids)) != step.action_text:
                raise DataError(
                    f"trajectory {trajectory.trajectory_id!r} of {source} was sampled with another tokenizer: its ids "
                    f"decode to {text[:60]!r}, its text is {step.action_text[:60]!r}"
                )
    return chosen.trajectories


def warm_start_key(config: RunConfig, base: str | Path) -> str:
    """Hash everything the warm start depends on: model, template, examples, task, optimizer, seed and code."""
    template, imitated, rollout = config.model.chat_template, config.sft.trajectories, config.rollout
    role_limits = {name: role.max_response_tokens for name, role in rollout.roles.items() if role.max_response_tokens}
    return digest(
        folder_digest(Path(base)) if Path(base).is_dir() else str(base),
        recipe_path(template, recipe=config.recipe).read_text(encoding="utf-8") if template is not None else None,
        config.model.template_kwargs,
        config.sft.model_dump(),
        _data_digest(config),
        config.lora.model_dump() if config.lora is not None else None,
        [str(model_dtype(config)), config.model.fp32_head],
        config.learner.model_dump(include={"betas", "adam_eps", "weight_decay", "max_grad_norm", "optimizer_state"}),
        folder_digest(trajectories_of(imitated)) if imitated is not None else None,
        config.task.model_dump(include={"flow", "env", "env_kwargs", "tools", "tool_kwargs"}),
        config.context.model_dump(exclude_none=True),
        rollout.model_dump(include={"max_steps", "max_response_tokens", "max_context_tokens"}),
        *([role_limits] if role_limits else []),
        config.seed,
        _start_digest(config),
    )


def _start_digest(config: RunConfig) -> str:
    return code_digest(warm_start_code(config), recipe=config.recipe, with_data=True)


def _data_digest(config: RunConfig) -> str | None:
    if config.data.path is not None:
        return folder_digest(anchored(config.data.path))
    name = data_name(config.recipe)
    return None if name is None else folder_digest(data_dir(name))
