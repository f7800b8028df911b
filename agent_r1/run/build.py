"""The one reader of the config: a `RunConfig` in, working parts out.

Everything that can be wrong with a description is found here, before the first sample is drawn.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from agent_r1.agent.env import AgentEnv, env_class, make_env, merge_env_kwargs
from agent_r1.agent.flow import AgentEnvLoop, AgentFlowBase, Limits, flow_class
from agent_r1.agent.rendering import Renderer, TemplateReport, verify_template
from agent_r1.agent.sampler import Sampler, Sampling
from agent_r1.agent.tool import BaseTool, get_tool
from agent_r1.config import EvalConfig, LearnerConfig, RolloutConfig, RunConfig, recipe_file
from agent_r1.errors import ConfigError
from agent_r1.learn.algorithms import Algorithm, get_algorithm, supervised_loss
from agent_r1.learn.learner import Learner, cosine, warmup
from agent_r1.learn.policy import PolicyModel
from agent_r1.rollout.collect import Collector
from agent_r1.rollout.engine import Engine
from agent_r1.rollout.engines.local import LocalEngine
from agent_r1.rollout.reward import Scorer, check_reward_signature
from agent_r1.run.checkpoint import latest_checkpoint
from agent_r1.run.resolve import resolve
from agent_r1.tasks.rows import load_rows
from agent_r1.types import TaskRow

transformers_logging.disable_progress_bar()  # it would draw over our own display


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is asked, who plays it, how it is judged: everything of a recipe except the model."""

    train_rows: Callable[[], list[TaskRow]]  # read when needed: evaluation and chat never do
    test_rows: Callable[[], list[TaskRow]]
    make_flow: Callable[[TaskRow], AgentFlowBase]
    scorer: Scorer
    success_reward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Weights and tokenizer of one Hugging Face directory, with the renderer that speaks its template."""

    network: Any  # a transformers causal LM in float32
    tokenizer: Any
    renderer: Renderer
    template: TemplateReport  # what the chat template can do for an agent


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All of a training run that can be built without a model, and so can be found wrong before one is loaded."""

    task: Task
    algorithm: Algorithm
    train_rows: list[TaskRow]
    test_rows: list[TaskRow]


def build_plan(config: RunConfig) -> Plan:
    task, algorithm = build_task(config), build_algorithm(config)
    train_rows, test_rows = task.train_rows(), task.test_rows()
    _check_disjoint(train_rows, test_rows)
    for row in (train_rows[0], test_rows[0]):
        flow = task.make_flow(row)  # an unknown agent_name is an error now, not in the first batch
        if isinstance(flow, AgentEnvLoop):
            flow.make_env(row)  # so are settings that the env or its tools do not take
    return Plan(task=task, algorithm=algorithm, train_rows=train_rows, test_rows=test_rows)


def build_task(config: RunConfig) -> Task:
    task = config.task
    source: Any = task.rows if _is_data_source(task.rows) else resolve(task.rows, recipe=config.recipe)
    reward = resolve(task.reward, recipe=config.recipe)
    check_reward_signature(reward, task.reward)
    return Task(
        train_rows=lambda: load_rows(source, split=task.train_split, count=task.train_count),
        test_rows=lambda: load_rows(source, split=task.test_split, count=config.eval.rows),
        make_flow=_flow_maker(config),
        scorer=Scorer(reward=reward, timeout=task.reward_seconds, max_error_fraction=config.rollout.max_error_fraction),
        success_reward=task.success_reward,
    )


def load_model(config: RunConfig, directory: str | Path) -> Model:
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(directory))
        network = AutoModelForCausalLM.from_pretrained(str(directory), dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot load a causal language model from {directory}: {error}") from error
    _check_context(config, network)
    template = config.model.chat_template
    renderer = Renderer(
        tokenizer,
        chat_template=_recipe_path(config, template).read_text(encoding="utf-8") if template else None,
        template_kwargs=config.model.template_kwargs,
        extra_stop_ids=_generation_stop_ids(network),
    )
    return Model(network=network, tokenizer=tokenizer, renderer=renderer, template=_checked(renderer, directory))


def _check_context(config: RunConfig, network: Any) -> None:
    positions = getattr(network.config, "max_position_embeddings", None)
    if positions is not None and config.rollout.max_context_tokens > positions:
        raise ConfigError(
            f"rollout.max_context_tokens={config.rollout.max_context_tokens} is more than the {positions} positions "
            "the model has; lower it"
        )


def _generation_stop_ids(network: Any) -> list[int]:
    """What the model's authors let it stop on besides the end of a turn (Qwen's <|endoftext|>, Llama's <|eom_id|>)."""
    ids = network.generation_config.eos_token_id if network.generation_config is not None else None
    return [ids] if isinstance(ids, int) else list(ids or [])


def _checked(renderer: Renderer, directory: str | Path) -> TemplateReport:
    report = verify_template(renderer)
    if not (report.stop_tokens and report.renders and report.joins):
        raise ConfigError(
            f"the tokenizer in {directory} cannot hold a conversation: {report.problems[0]}. "
            "Give a chat template with model.chat_template=FILE"
        )
    return report


def save_model(model: Model, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    model.network.save_pretrained(str(directory))
    model.tokenizer.save_pretrained(str(directory))


def find_model(path: str) -> str:
    """A run directory means its newest checkpoint; another directory or a hub id is taken as it is."""
    local = Path(path).expanduser()
    if (local / "checkpoints").is_dir():
        return str(latest_checkpoint(local / "checkpoints")[1])
    looks_local = path.startswith((".", "/", "~")) or path.count("/") != 1
    if not local.exists() and looks_local:
        raise ConfigError(f"model.path={path!r}: there is no such directory, and it is not a hub id (owner/name)")
    return str(local) if local.exists() else path


def build_engine(config: RunConfig, model: Model) -> Engine:
    settings = config.engine
    network = copy.deepcopy(model.network).to(getattr(torch, config.model.dtype))
    network.set_attn_implementation("eager")  # a learner may have set its own on the original
    return LocalEngine(
        network,
        seed=config.seed,
        max_running=settings.max_running,
        max_batch_tokens=settings.max_batch_tokens,
        max_cached_tokens=settings.max_cached_tokens,
        threads=settings.threads,
    )


def build_algorithm(config: RunConfig) -> Algorithm:
    """The configured row of the table; settings it does not have, or cannot use, are refused."""
    algorithm = get_algorithm(config.algorithm.name, **config.algorithm.settings)
    algorithm.require_group_size(config.rollout.group_size)
    return algorithm


def build_learner(config: RunConfig, model: Model, algorithm: Algorithm, reference: Model | None) -> Learner:
    settings = config.learner
    return Learner(
        PolicyModel(model.network),
        loss=algorithm.loss,
        lr=settings.lr,
        schedule=warmup(settings.warmup_steps),
        temperature=config.rollout.temperature,
        num_epochs=settings.num_epochs,
        num_minibatches=settings.num_minibatches,
        kl_coef=config.algorithm.kl_coef,
        kl_estimator=config.algorithm.kl_estimator,
        reference=PolicyModel(reference.network.requires_grad_(False)) if reference is not None else None,
        **_shared_settings(settings),
    )


def build_sft_learner(config: RunConfig, model: Model, num_updates: int) -> Learner:
    """The learner of the warm start: the same machinery with the supervised loss and its own learning rate."""
    schedules = {"constant": warmup(config.sft.warmup_steps), "cosine": cosine(config.sft.warmup_steps, num_updates)}
    return Learner(
        PolicyModel(model.network),
        loss=supervised_loss,
        lr=config.sft.lr,
        schedule=schedules[config.sft.schedule],
        temperature=1.0,
        **_shared_settings(config.learner),
    )


def _shared_settings(settings: LearnerConfig) -> dict[str, Any]:
    return {
        "betas": settings.betas,
        "weight_decay": settings.weight_decay,
        "max_grad_norm": settings.max_grad_norm,
        "max_tokens_per_pack": settings.max_tokens_per_pack,
        "max_nonfinite_updates": settings.max_nonfinite_updates,
    }


def train_collector(config: RunConfig, task: Task, renderer: Renderer, sampler: Sampler) -> Collector:
    rollout = config.rollout
    sampling = Sampling(
        max_tokens=rollout.max_response_tokens, temperature=rollout.temperature, stop_ids=tuple(renderer.stop_ids)
    )
    return _collector(rollout, task, renderer, sampler, sampling, rollout.group_size)


def eval_collector(
    config: RunConfig, task: Task, renderer: Renderer, sampler: Sampler, settings: EvalConfig | None = None
) -> Collector:
    settings = settings or config.eval
    sampling = Sampling(
        max_tokens=config.rollout.max_response_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        stop_ids=tuple(renderer.stop_ids),
    )
    return _collector(config.rollout, task, renderer, sampler, sampling, settings.samples)


def limits(rollout: RolloutConfig) -> Limits:
    return Limits(
        max_steps=rollout.max_steps,
        max_response_tokens=rollout.max_response_tokens,
        max_context_tokens=rollout.max_context_tokens,
        episode_seconds=rollout.episode_seconds,
    )


def _collector(
    rollout: RolloutConfig, task: Task, renderer: Renderer, sampler: Sampler, sampling: Sampling, group_size: int
) -> Collector:
    return Collector(
        make_flow=task.make_flow,
        sampler=sampler,
        renderer=renderer,
        sampling=sampling,
        limits=limits(rollout),
        group_size=group_size,
        max_concurrent=rollout.max_concurrent,
        max_error_fraction=rollout.max_error_fraction,
    )


def _flow_maker(config: RunConfig) -> Callable[[TaskRow], AgentFlowBase]:
    task = config.task
    tools = [_tool(name, config) for name in task.tools]
    default_env = resolve(task.env, recipe=config.recipe) if "." in task.env else env_class(task.env)
    default_flow = resolve(task.flow, recipe=config.recipe) if "." in task.flow else flow_class(task.flow)
    for cls, base, name in ((default_env, AgentEnv, task.env), (default_flow, AgentFlowBase, task.flow)):
        if not (isinstance(cls, type) and issubclass(cls, base)):
            raise ConfigError(f"{name!r} is {cls!r}, not a subclass of {base.__name__}")
    base_kwargs = {**task.env_kwargs, **({"tools": tools} if tools else {})}

    def make_row_env(row: TaskRow) -> AgentEnv:
        kwargs = merge_env_kwargs(base_kwargs, row)
        env_type = kwargs.pop("env_type", None)
        return make_env(env_class(env_type) if env_type else default_env, env_type or task.env, kwargs)

    def make_flow(row: TaskRow) -> AgentFlowBase:
        flow = flow_class(row.agent_name) if row.agent_name else default_flow
        made: AgentFlowBase = flow(make_row_env)
        return made

    return make_flow


def _tool(name: str, config: RunConfig) -> BaseTool:
    found = resolve(name, recipe=config.recipe) if "." in name else get_tool(name)
    if not isinstance(found, BaseTool):
        raise ConfigError(f"task.tools: {name!r} is {found!r}, not a tool; put @tool on the function")
    return found


def _is_data_source(rows: str) -> bool:
    return rows.startswith("hf:") or rows.endswith((".parquet", ".jsonl")) or "/" in rows


def _recipe_path(config: RunConfig, name: str) -> Path:
    """A file named in a recipe: beside its YAML, or anywhere by path."""
    beside = recipe_file(config.recipe).parent / name
    path = beside if beside.is_file() else Path(name).expanduser()
    if not path.is_file():
        raise ConfigError(f"there is no file {name!r}, neither beside the recipe nor at {path}")
    return path


def _check_disjoint(train: Sequence[TaskRow], test: Sequence[TaskRow]) -> None:
    """A test row that is also trained on makes every number a lie."""

    def content(row: TaskRow) -> str:
        place = ("index", "split")  # published rows number themselves here
        return repr((row.prompt, row.env_kwargs, [item for item in row.extra_info.items() if item[0] not in place]))

    seen = {content(row): row.row_id for row in train}
    for row in test:
        if (twin := seen.get(content(row))) is not None:
            raise ConfigError(f"test row {row.row_id!r} is the same task as training row {twin!r}")
