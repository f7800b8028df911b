"""Build the learner of a run: algorithm, reward shaping, policy, critic and optimizer settings."""

from __future__ import annotations

from typing import Any

import torch

from agent_r1.build.engine import merges_adapters
from agent_r1.build.models.device import compiles_layers, model_device, model_dtype
from agent_r1.build.models.load import Model
from agent_r1.config import RunConfig
from agent_r1.config.schema import CriticConfig
from agent_r1.errors import ConfigError
from agent_r1.learn.algorithms import Algorithm
from agent_r1.learn.learner import Learner
from agent_r1.learn.losses import Correction, supervised_loss
from agent_r1.learn.memory import estimate
from agent_r1.learn.model.critic import Critic
from agent_r1.learn.model.lora import LoRA
from agent_r1.learn.model.policy import PolicyModel
from agent_r1.learn.optimizer import Decay, Schedule, schedule
from agent_r1.learn.rewards import KLInReward, RewardShaper
from agent_r1.ranks.crew import OneProcess
from agent_r1.types import ByRole

# Default tokens per pack. On a GPU, small packs are launched more slowly than they are computed.
PACK_TOKENS = {"cpu": 8192, "cuda": 131_072}
SFT_MIN_LR_RATIO = 0.1  # share of sft.lr at the last update


def build_shaper(config: RunConfig, algorithm: Algorithm) -> RewardShaper:
    settings = config.algorithm
    penalty = KLInReward(coef=settings.kl_coef, target=settings.kl_target, horizon=settings.kl_horizon)
    return RewardShaper(
        **config.rewards.model_dump(),
        overlong_limit=_by_role(config, "max_response_tokens"),
        overlong_buffer=algorithm.overlong_buffer,
        overlong_penalty=algorithm.overlong_penalty,
        kl=penalty if settings.kl_coef > 0 and settings.kl_in == "reward" else None,
    )


def build_learner(
    config: RunConfig, model: Model, algorithm: Algorithm, reference: Model | None, ranks: OneProcess | None = None
) -> Learner:
    """`reference` is the policy before the first step, for the KL penalty."""
    if config.lora is not None and config.lora.share_base and ranks is not None and ranks.size > 1:
        raise ConfigError("lora.share_base works in one process: with several, the learner's base is sharded")
    policy = _policy(config, model)
    return Learner(
        policy,
        reference=_reference(config, policy, reference),
        critic=Critic(policy=policy, **critic_settings(config)) if algorithm.needs_critic else None,
        ranks=ranks or OneProcess(),
        **_optimizer_settings(config),
        **learner_settings(config, algorithm),
    )


def learner_settings(config: RunConfig, algorithm: Algorithm) -> dict[str, Any]:
    """The settings of a learner, wherever its models are."""
    settings = config.learner
    return {
        "loss": algorithm.loss,
        "lr": settings.lr,
        "schedule": _schedule(config, settings.schedule, settings.warmup_steps),
        "temperature": _by_role(config, "temperature"),
        **settings.model_dump(include={"num_epochs", "num_minibatches", "target_kl"}),
        "seed": config.seed,
        "kl_coef": config.algorithm.kl_coef if config.algorithm.kl_in == "loss" else 0.0,
        **config.algorithm.model_dump(include={"kl_estimator", "entropy_coef"}),
        "own_old_logprobs": algorithm.own_old_logprobs,
        "correction": Correction(**config.correction.model_dump()) if config.correction is not None else None,
        **_shared_settings(config),
    }


def _by_role(config: RunConfig, name: str) -> ByRole:
    usual = getattr(config.rollout, name)
    own = {key: value for key, role in config.rollout.roles.items() if (value := getattr(role, name)) is not None}
    return {"": usual} | own if own else usual


def build_sft_learner(config: RunConfig, model: Model, num_updates: int) -> Learner:
    """Build the learner of a warm start: the supervised loss, with its own learning rate and schedule."""
    settings = config.sft
    return Learner(
        _policy(config, model),
        loss=supervised_loss,
        lr=settings.lr,
        schedule=schedule(
            settings.schedule, warmup_steps=settings.warmup_steps, total=num_updates, floor=SFT_MIN_LR_RATIO
        ),
        temperature=1.0,
        **_optimizer_settings(config),
        **_shared_settings(config),
    )


def rehearse(config: RunConfig, learner: Learner) -> str:
    """Check that a step fits into memory and describe what it takes. Chooses settings that the config leaves open: the
    size of packs and activation checkpointing."""
    settings = config.learner
    longest = config.rollout.max_context_tokens if settings.max_tokens_per_pack is None else None
    return estimate(learner, longest=longest, may_checkpoint=settings.activation_checkpointing == "auto")


def _policy(config: RunConfig, model: Model) -> PolicyModel:
    if config.learner.train_vision and config.lora is not None:
        raise ConfigError("learner.train_vision has no effect with lora, which adapts the decoder only: leave it out")
    return PolicyModel(
        model.network,
        pictures=model.pictures,
        train_vision=config.learner.train_vision,
        lora=lora_settings(config),
        checkpoint_activations=config.learner.activation_checkpointing is True,
        **_computation(config),
    )


def _reference(config: RunConfig, policy: PolicyModel, reference: Model | None) -> PolicyModel | None:
    if config.algorithm.kl_coef == 0:
        return None
    if config.lora is not None:
        return policy.without_adapters()  # the initial policy
    assert reference is not None
    return PolicyModel(
        reference.network.requires_grad_(False),
        pictures=reference.pictures,
        **_computation(config),
    )


def _computation(config: RunConfig) -> dict[str, Any]:
    dtype = model_dtype(config)
    return {
        "autocast_dtype": None if dtype == torch.float32 else dtype,  # None: float32, like the master weights
        "fp32_head": config.model.fp32_head,
        "compiled": compiles_layers(config),
        "mlp_chunk_tokens": config.learner.mlp_chunk_tokens,
    }


def lora_settings(config: RunConfig) -> LoRA | None:
    settings = config.lora
    if settings is None:
        return None
    return LoRA(
        **settings.model_dump(include={"rank", "share_base"}),
        alpha=2.0 * settings.rank if settings.alpha is None else settings.alpha,
        target_modules=None if settings.target_modules == "auto" else tuple(settings.target_modules),
        seed=config.seed,
        merges=merges_adapters(config),
    )


def _schedule(config: RunConfig, decay: Decay, warmup_steps: int) -> Schedule:
    learner = config.learner
    total = config.trainer.steps * learner.num_epochs * learner.num_minibatches
    return schedule(decay, warmup_steps=warmup_steps, total=total, floor=learner.min_lr_ratio)


def critic_settings(config: RunConfig) -> dict[str, Any]:
    """The settings of a critic, wherever its model is."""
    settings, learner = config.critic or CriticConfig(), config.learner
    warmup_steps = learner.warmup_steps if settings.warmup_steps is None else settings.warmup_steps
    names = {"shared", "normalize_returns", "value_clip", "value_coef", "warmup_updates"}
    return settings.model_dump(include=names) | {
        "lr": 10 * learner.lr if settings.lr is None else settings.lr,
        "schedule": _schedule(config, settings.schedule or learner.schedule, warmup_steps),
    }


def _optimizer_settings(config: RunConfig) -> dict[str, Any]:
    """Return where the optimizer keeps its state, and in which format."""
    offloads, is_8bit = config.learner.offload_optimizer, config.learner.optimizer_state == "8bit"
    return {"offload_optimizer": offloads, "eight_bit_optimizer": is_8bit}


def _shared_settings(config: RunConfig) -> dict[str, Any]:
    names = {"betas", "adam_eps", "weight_decay", "max_grad_norm", "max_nonfinite_updates", "prefix_sharing"}
    pack_tokens = config.learner.max_tokens_per_pack or PACK_TOKENS[model_device(config).type]
    return config.learner.model_dump(include=names) | {"max_tokens_per_pack": pack_tokens}
