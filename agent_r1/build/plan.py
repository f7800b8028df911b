"""A `RunConfig` in, working parts out.

Only `agent_r1.run` and the command line read the config; what they make of it is made here, from plain keyword
arguments. Everything that can be wrong with a description is found by `build_plan`, before a model is loaded and before
the first sample is drawn. Models themselves: `model.py`; the engine: `engine.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

import torch

from agent_r1.build.context import check_room
from agent_r1.build.engine import GPU_ONLY, given_cache
from agent_r1.build.engine import build_engine as build_engine
from agent_r1.build.model import Model as Model
from agent_r1.build.model import find_model as find_model
from agent_r1.build.model import load_model as load_model
from agent_r1.build.model import model_device as model_device
from agent_r1.build.model import model_dtype as model_dtype
from agent_r1.build.model import save_model as save_model
from agent_r1.build.resolve import recipe_path
from agent_r1.build.task import Task as Task
from agent_r1.build.task import build_task as build_task
from agent_r1.build.task import check_call, is_data_source
from agent_r1.build.tool_format import known_template
from agent_r1.config import CriticConfig, EvalConfig, LoRAConfig, RolloutConfig, RunConfig, TaskConfig
from agent_r1.data.rows import FORMATS
from agent_r1.engines.base import Sampler, Sampling
from agent_r1.envs.base import env_class
from agent_r1.errors import AgentR1Error, ConfigError
from agent_r1.flows.episode import Limits
from agent_r1.flows.flow import AgentEnvLoop
from agent_r1.guard import explain
from agent_r1.learn.algorithms import Algorithm, get_algorithm
from agent_r1.learn.learner import Learner
from agent_r1.learn.losses import Correction, supervised_loss
from agent_r1.learn.memory import estimate
from agent_r1.learn.model.critic import Critic, CriticTraining
from agent_r1.learn.model.layers import require_compiler
from agent_r1.learn.model.lora import LoRA, require_peft
from agent_r1.learn.model.policy import PolicyModel
from agent_r1.learn.optimizer import Decay, Schedule, schedule
from agent_r1.learn.rewards import KLInReward, RewardShaper
from agent_r1.places import anchored
from agent_r1.rollout.collect import Collector
from agent_r1.runs.records import EVALUATED, TRAINED, trajectories_of, trajectory_files
from agent_r1.tokens.formats import AUTO
from agent_r1.tokens.formats.infer import TemplateFormat, requested_format, template_format
from agent_r1.tokens.rendering import Renderer
from agent_r1.types import TaskRow

# Tokens of a pack where the config leaves it open. To launch the passes of a pack takes the host as long for a small
# one as for a large one, so on a GPU small packs are launched more slowly than they are computed.
PACK_TOKENS = {"cpu": 8192, "cuda": 131_072}
SFT_MIN_LR_RATIO = 0.1  # of sft.lr, at the last update
# Of weights of size 0.02, whose neighbours in bfloat16 are 1e-4 away, and some ten steps of Adam.
SMALLEST_LORA_LR = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All of a training run that can be built without a model, and so can be found wrong before one is loaded."""

    task: Task
    algorithm: Algorithm
    train_rows: list[TaskRow]
    test_rows: list[TaskRow]
    tool_format: str  # which tool calls are read and why; "" for an env without tools


def build_plan(config: RunConfig, *, resume: bool = False) -> Plan:
    """`resume`: a checkpoint is continued, so what a run begins with is not needed and may be gone."""
    task, algorithm = build_task(config), build_algorithm(config)
    _check_machine(config)
    if not resume:
        _check_for_this_device(config)
    if config.model.chat_template is not None:
        recipe_path(config.model.chat_template, recipe=config.recipe)
    if not resume:
        check_beginning(config)
    train_rows, test_rows = task.train_rows(), task.test_rows()
    _check_disjoint(config, train_rows, test_rows)
    template = None if resume else known_template(config, config.model.path and find_model(config.model.path))
    _check_players(task, template, [*train_rows, *test_rows])
    return Plan(
        task=task,
        algorithm=algorithm,
        train_rows=train_rows,
        test_rows=test_rows,
        tool_format=_tool_format(config, task, template),
    )


def _tool_format(config: RunConfig, task: Task, template: TemplateFormat | None) -> str:
    if not task.calls_tools:
        return ""
    if (given := requested_format(config.task.env_kwargs)) != AUTO:
        return f"{given}, as set"
    return "inferred from the chat template when the model is loaded" if template is None else str(template)


def build_algorithm(config: RunConfig) -> Algorithm:
    """The configured row of the table; settings it does not have, or cannot use, are refused."""
    algorithm = get_algorithm(config.algorithm.name, **config.algorithm.settings)
    algorithm.require_group_size(config.rollout.group_size)
    algorithm.require_updates(num_epochs=config.learner.num_epochs, num_minibatches=config.learner.num_minibatches)
    if config.critic is not None and not algorithm.needs_critic:
        raise ConfigError(f"algorithm {algorithm.name!r} has no critic: leave the section critic out")
    return algorithm


def build_shaper(config: RunConfig, algorithm: Algorithm) -> RewardShaper:
    settings = config.algorithm
    penalty = KLInReward(coef=settings.kl_coef, target=settings.kl_target, horizon=settings.kl_horizon)
    return RewardShaper(
        process=config.rewards.process,
        process_weight=config.rewards.process_weight,
        overlong_limit=config.rollout.max_response_tokens,
        overlong_buffer=algorithm.overlong_buffer,
        overlong_penalty=algorithm.overlong_penalty,
        kl=penalty if settings.kl_coef > 0 and settings.kl_in == "reward" else None,
    )


def build_learner(config: RunConfig, model: Model, algorithm: Algorithm, reference: Model | None) -> Learner:
    settings = config.learner
    policy = _policy(config, model)
    return Learner(
        policy,
        loss=algorithm.loss,
        lr=settings.lr,
        schedule=_schedule(config, settings.schedule, settings.warmup_steps),
        temperature=config.rollout.temperature,
        num_epochs=settings.num_epochs,
        num_minibatches=settings.num_minibatches,
        seed=config.seed,
        target_kl=settings.target_kl,
        kl_coef=config.algorithm.kl_coef if config.algorithm.kl_in == "loss" else 0.0,
        kl_estimator=config.algorithm.kl_estimator,
        reference=_reference(config, policy, reference),
        entropy_coef=config.algorithm.entropy_coef,
        own_old_logprobs=algorithm.own_old_logprobs,
        correction=Correction(**config.correction.model_dump()) if config.correction is not None else None,
        critic=_critic(config, policy) if algorithm.needs_critic else None,
        **_shared_settings(config),
    )


def _policy(config: RunConfig, model: Model) -> PolicyModel:
    return PolicyModel(
        model.network,
        autocast_dtype=_autocast_dtype(config),
        fp32_head=config.model.fp32_head,
        lora=_lora(config.lora, config.seed) if config.lora is not None else None,
        compiled=_compiles(config),
        checkpoint_activations=config.learner.activation_checkpointing,
    )


def _reference(config: RunConfig, policy: PolicyModel, reference: Model | None) -> PolicyModel | None:
    if config.algorithm.kl_coef == 0:
        return None
    if config.lora is not None:
        return policy.without_adapters()  # the initial policy is in there already
    assert reference is not None
    return PolicyModel(
        reference.network.requires_grad_(False),
        autocast_dtype=_autocast_dtype(config),
        fp32_head=config.model.fp32_head,
        compiled=_compiles(config),
    )


def _autocast_dtype(config: RunConfig) -> torch.dtype | None:
    """None: products in float32, like the master weights."""
    dtype = model_dtype(config)
    return None if dtype == torch.float32 else dtype


def _lora(settings: LoRAConfig, seed: int) -> LoRA:
    return LoRA(
        rank=settings.rank,
        alpha=2.0 * settings.rank if settings.alpha is None else settings.alpha,
        target_modules=None if settings.target_modules == "auto" else tuple(settings.target_modules),
        seed=seed,
    )


def _compiles(config: RunConfig) -> bool:
    wanted = config.learner.compile
    return model_device(config).type == "cuda" if wanted is None else wanted


def _schedule(config: RunConfig, decay: Decay, warmup_steps: int) -> Schedule:
    learner = config.learner
    total = config.trainer.steps * learner.num_epochs * learner.num_minibatches
    return schedule(decay, warmup_steps=warmup_steps, total=total, floor=learner.min_lr_ratio)


def _critic(config: RunConfig, policy: PolicyModel) -> CriticTraining:
    settings, learner = config.critic or CriticConfig(), config.learner
    warmup_steps = learner.warmup_steps if settings.warmup_steps is None else settings.warmup_steps
    return CriticTraining(
        critic=Critic(policy, shared=settings.shared, normalize_returns=settings.normalize_returns),
        lr=10 * learner.lr if settings.lr is None else settings.lr,
        schedule=_schedule(config, settings.schedule or learner.schedule, warmup_steps),
        value_clip=settings.value_clip,
        value_coef=settings.value_coef,
        warmup_updates=settings.warmup_updates,
    )


def build_sft_learner(config: RunConfig, model: Model, num_updates: int) -> Learner:
    """The learner of the warm start: the same machinery with the supervised loss and its own learning rate."""
    settings = config.sft
    return Learner(
        _policy(config, model),
        loss=supervised_loss,
        lr=settings.lr,
        schedule=schedule(
            settings.schedule, warmup_steps=settings.warmup_steps, total=num_updates, floor=SFT_MIN_LR_RATIO
        ),
        temperature=1.0,
        **_shared_settings(config),
    )


def rehearse(config: RunConfig, learner: Learner) -> str:
    """Find out before the first step whether it fits, and make packs smaller where the config leaves their size open.
    Returns a line that says what training will take."""
    is_open = config.learner.max_tokens_per_pack is None
    return estimate(learner, longest=config.rollout.max_context_tokens if is_open else None)


def _shared_settings(config: RunConfig) -> dict[str, Any]:
    settings, pack_tokens = config.learner, PACK_TOKENS[model_device(config).type]
    return {
        "betas": settings.betas,
        "adam_eps": settings.adam_eps,
        "weight_decay": settings.weight_decay,
        "max_grad_norm": settings.max_grad_norm,
        "max_tokens_per_pack": settings.max_tokens_per_pack or pack_tokens,
        "max_nonfinite_updates": settings.max_nonfinite_updates,
        "offload_optimizer": settings.offload_optimizer,
        "prefix_sharing": settings.prefix_sharing,
    }


def train_collector(config: RunConfig, task: Task, renderer: Renderer, sampler: Sampler) -> Collector:
    rollout = config.rollout
    sampling = Sampling(
        max_tokens=rollout.max_response_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        keep_support=rollout.top_k > 0,
        stop_ids=tuple(renderer.stop_ids),
    )
    return _collector(config, task, renderer, sampler, sampling, rollout.group_size)


def greedy_collector(config: RunConfig, task: Task, renderer: Renderer, sampler: Sampler) -> Collector:
    """One attempt per row without sampling noise, for algorithms that compare with it."""
    sampling = Sampling(
        max_tokens=config.rollout.max_response_tokens, temperature=0.0, stop_ids=tuple(renderer.stop_ids)
    )
    return _collector(config, task, renderer, sampler, sampling, 1)


def eval_collector(config: RunConfig, task: Task, renderer: Renderer, sampler: Sampler) -> Collector:
    sampling = eval_sampling(config.eval, config.rollout, renderer)
    return _collector(config, task, renderer, sampler, sampling, config.eval.samples)


def eval_sampling(settings: EvalConfig, rollout: RolloutConfig, renderer: Renderer) -> Sampling:
    """How a policy speaks when it is judged or talked to, rather than trained."""
    return Sampling(
        max_tokens=rollout.max_response_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        stop_ids=tuple(renderer.stop_ids),
    )


def limits(rollout: RolloutConfig) -> Limits:
    return Limits(
        max_steps=rollout.max_steps,
        max_response_tokens=rollout.max_response_tokens,
        max_context_tokens=rollout.max_context_tokens,
        episode_seconds=rollout.episode_seconds,
    )


def _collector(
    config: RunConfig, task: Task, renderer: Renderer, sampler: Sampler, sampling: Sampling, group_size: int
) -> Collector:
    check_room(config, renderer)
    rollout = config.rollout
    return Collector(
        make_flow=task.flows_for(template_format(renderer)),
        sampler=sampler,
        renderer=renderer,
        sampling=sampling,
        limits=limits(rollout),
        group_size=group_size,
        max_concurrent=rollout.max_concurrent,
    )


def _check_machine(config: RunConfig) -> None:
    """Whether this machine has what the run is to use."""
    device = model_device(config)
    if _compiles(config):
        require_compiler(device)
    if config.lora is not None:
        require_peft()
    for name, sampling in (("eval", config.eval), ("rollout", config.rollout)):
        filters = sampling.top_p < 1 or sampling.top_k > 0
        if config.trainer.deterministic and device.type == "cuda" and filters:
            raise ConfigError(
                f"{name}.top_p and {name}.top_k need cumulative sums, for which torch has no deterministic kernel on a "
                "GPU: leave them out, or set trainer.deterministic=false"
            )


def _check_for_this_device(config: RunConfig) -> None:
    """Settings that say nothing on the device a run begins on. It may be continued, and evaluated, on another."""
    on_cpu = model_device(config).type == "cpu"
    if config.learner.offload_optimizer and on_cpu:
        raise ConfigError("learner.offload_optimizer does nothing on a CPU: optimizer state is in host memory anyway")
    if config.model.fp32_head and model_dtype(config) == torch.float32:
        raise ConfigError(
            "model.fp32_head does nothing in float32, in which this run computes everything: leave it out, or set "
            "model.dtype=bfloat16"
        )
    given = [name for name in GPU_ONLY if getattr(config.engine, name) is not None]
    if given and on_cpu:
        raise ConfigError(f"engine.{given[0]} is for a GPU, and this run is on the CPU: leave it out")
    if config.lora is not None and model_dtype(config) == torch.bfloat16 and config.learner.lr < SMALLEST_LORA_LR:
        raise ConfigError(
            f"learner.lr={config.learner.lr:g} is too small for lora in bfloat16: what adapters add would be rounded "
            "away where it is merged into the weights that sample. Set learner.lr=1e-4, as is usual for adapters, or "
            "model.dtype=float32"
        )


def check_beginning(config: RunConfig) -> None:
    """Model, engine and warm start, as far as they can be told without loading anything."""
    given_cache(config, model_device(config))  # refuses one that is too small
    if config.model.path is not None:
        find_model(config.model.path)
    if config.model.make is not None:
        check_call(config, "model.make", config.model.make, ["directory", "seed"])
    if config.sft.demos is not None:
        check_call(config, "sft.demos", config.sft.demos, ["count", "seed"])
    if (place := config.sft.trajectories) is not None:
        if not anchored(place).exists():
            raise ConfigError(f"sft.trajectories={place!r}: there is no such run, folder or file")
        if any(fnmatch(file.name, EVALUATED) for file in trajectory_files(trajectories_of(place), TRAINED)):
            raise ConfigError(
                f"sft.trajectories={place!r} holds episodes of an evaluation: whoever imitates them trains on the rows "
                "it is judged on. Name the run, or a file train_*.jsonl of it"
            )


def _check_players(task: Task, template: TemplateFormat | None, rows: Iterable[TaskRow]) -> None:
    """Make, without playing it, one flow and env for each combination of names, settings and tools in the rows."""
    make_flow = task.make_flow if template is None else task.flows_for(template)
    seen = set()
    for row in rows:
        env_type = row.env_kwargs.get("env_type")
        values = row.env_kwargs.get("tools_kwargs")
        given = repr(list(values)) if isinstance(values, Mapping) else ""
        kind = (repr(row.agent_name), repr(env_type), repr(row.env_kwargs.get("tools")), given, *sorted(row.env_kwargs))
        if kind in seen:
            continue
        seen.add(kind)
        try:
            flow = make_flow(row)
            if isinstance(flow, AgentEnvLoop):  # other flows may do without
                flow.make_env(row)
            elif env_type is not None:
                env_class(env_type)
        except AgentR1Error as error:
            raise ConfigError(f"row {row.row_id!r} cannot be played: {error}") from error
        except Exception as error:  # the constructors of flows and envs are other people's code
            raise ConfigError(f"row {row.row_id!r} cannot be played: {explain(error)}") from error


def _check_disjoint(config: RunConfig, train: Sequence[TaskRow], test: Sequence[TaskRow]) -> None:
    """A test row that is also trained on makes every number a lie."""

    def content(row: TaskRow) -> str:
        place = ("index", "split")  # published rows number themselves here
        extra = sorted((key, value) for key, value in row.extra_info.items() if key not in place)
        return repr((row.prompt, row.env_kwargs, extra))

    seen = {content(row): row.row_id for row in train}
    for row in test:
        if (twin := seen.get(content(row))) is not None:
            raise ConfigError(
                f"test row {row.row_id!r} is the same task as training row {twin!r}: same prompt, env_kwargs and "
                f"extra_info. {_how_to_split(config.task)}"
            )


def _how_to_split(task: TaskConfig) -> str:
    if is_data_source(task.rows) and task.rows.endswith(FORMATS) and "{split}" not in task.rows:
        return f"Both splits are read from {task.rows!r}: use {{split}} in task.rows, as in data/{{split}}.jsonl"
    if task.train_split == task.test_split:
        return f"Both splits are {task.test_split!r}: set task.test_split to one that is not trained on"
    return "Take it out of one of the splits"
