"""Turn the arguments of `agent-r1 serve` into a server: its settings, checkpoint and mode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agent_r1.config import RunConfig, change_config, parse_config
from agent_r1.engines.base import Engine, Sampling
from agent_r1.errors import ConfigError
from agent_r1.places import anchored
from agent_r1.runs.reader import is_run
from agent_r1.runs.run_dir import RunDir
from agent_r1.serve.api.agent_mode import AgentMode
from agent_r1.serve.api.app import Server
from agent_r1.serve.api.bare_mode import BareMode
from agent_r1.serve.api.limits import ServeLimits
from agent_r1.serve.api.served_model import ServedModel
from agent_r1.tokens.formats.infer import requested_format, template_format
from agent_r1.tokens.formats.table import AUTO, get_format
from agent_r1.tokens.rendering import Renderer

# Settings that may be changed for a run; the others belong to the trained model.
SERVE_SETTINGS = ("eval", "rollout", "engine", "task.test_split", "data.path", "model.device", "model.dtype",
                  "model.template_kwargs")  # fmt: skip
MODEL_SETTINGS = (*SERVE_SETTINGS, "model.chat_template", "model.fp32_head", "model.max_pixels", "seed")
NO_RECIPE = "serve"  # the recipe of a model that comes without a run
MAX_DEFAULT_CONTEXT = 32_768  # context of such a model, in tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """What to serve."""

    config: RunConfig
    model: str  # passed to `find_model`
    name: str
    has_recipe: bool
    sets_context: bool  # the context was given, or belongs to the recipe


def choose(place: str, overrides: Sequence[str], *, name: str | None) -> Chosen:
    """Read the settings of a run, of the run that a checkpoint belongs to, or of a model without a run."""
    local = anchored(place)
    folder = next((path for path in (local, local.parent.parent) if is_run(path)), None)
    if folder == local.parent.parent and local.parent.name != "checkpoints":
        folder = None
    if folder is not None:
        config = change_config(parse_config(RunDir.open(folder).settings), overrides, SERVE_SETTINGS)
        shown = local.name if folder == local else f"{folder.name}/{local.name}"
        return Chosen(config=config, model=place, name=name or shown, has_recipe=True, sets_context=True)
    base = parse_config(
        {"recipe": NO_RECIPE, "task": {"rows": "none.rows", "reward": "none.reward"}, "model": {"path": place}}
    )
    config = change_config(base, overrides, MODEL_SETTINGS)
    given = any(word.startswith("rollout.max_context_tokens=") for word in overrides)
    shown = Path(place).name if local.exists() else place
    return Chosen(config=config, model=place, name=name or shown, has_recipe=False, sets_context=given)


def check_agent(chosen: Chosen, *, agent: bool) -> None:
    if agent and not chosen.has_recipe:
        raise ConfigError(
            f"--agent needs a run, whose recipe has the tools; {chosen.model} is a model without one. Leave out "
            "--agent, or name a run directory or RUN/checkpoints/step_N"
        )


def open_server(chosen: Chosen, *, agent: bool, limits: ServeLimits) -> Server:
    """Load the model and build its engine; with `agent`, also the task of its recipe."""
    from agent_r1.build.collectors import eval_collector
    from agent_r1.build.engine import build_engine
    from agent_r1.build.models.load import load_model
    from agent_r1.build.models.source import find_model
    from agent_r1.build.task import build_task

    check_agent(chosen, agent=agent)
    place = find_model(chosen.model)
    config = chosen.config if chosen.sets_context else _with_context_of(chosen.config, place)
    task = build_task(config) if agent else None  # finds mistakes before a model is loaded
    loaded = load_model(config, place)
    engine = build_engine(config, loaded)
    model = served_model(config, engine, loaded.renderer, name=chosen.name, has_recipe=chosen.has_recipe)
    if task is None:
        return Server(BareMode(model, limits), model, limits=limits)
    collector = eval_collector(config, task, loaded.renderer, engine)
    return Server(AgentMode(model, collector, task.test_rows()), model, limits=limits, resources=task.resources)


def served_model(config: RunConfig, engine: Engine, renderer: Renderer, *, name: str, has_recipe: bool) -> ServedModel:
    """Return the model to serve. Options that a request leaves out are those of evaluation."""
    template = template_format(renderer)
    asked = requested_format(config.task.env_kwargs) if has_recipe else AUTO
    try:
        tool_format = template.choose(asked)
    except ConfigError:  # no format reads the calls of this template; without tools, none is needed
        if has_recipe:
            raise
        tool_format = get_format(AUTO).for_prompt(thinks=template.thinks)
    sampling = Sampling(
        max_tokens=config.rollout.max_response_tokens,
        temperature=config.eval.temperature,
        top_p=config.eval.top_p,
        top_k=config.eval.top_k,
        stop_ids=tuple(renderer.stop_ids),
    )
    return ServedModel(
        name=name,
        engine=engine,
        renderer=renderer,
        tool_format=tool_format,
        shows_calls=bool(template.written),
        sampling=sampling,
        max_context_tokens=config.rollout.max_context_tokens,
    )


def _with_context_of(config: RunConfig, place: str) -> RunConfig:
    """Use all of the model's positions, within reason."""
    from transformers import AutoConfig

    from agent_r1.build.models.load import without_hub
    from agent_r1.build.models.source import as_directory
    from agent_r1.compute.attention import position_limit

    directory = as_directory(place)
    try:
        limit = position_limit(AutoConfig.from_pretrained(directory, local_files_only=without_hub(directory)))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the config of {directory}: {error}") from error
    context = min(limit or config.rollout.max_context_tokens, MAX_DEFAULT_CONTEXT)
    response = min(config.rollout.max_response_tokens, context - 1)
    changed = {"max_context_tokens": context, "max_response_tokens": response}
    return config.model_copy(update={"rollout": config.rollout.model_copy(update=changed)})
