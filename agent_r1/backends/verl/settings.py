"""Translate our settings into verl's, and refuse those that verl cannot honour. A setting that verl cannot honour is an
error, not a difference in the results. Imports no verl, so a dry run needs none.

`verl.settings` passes everything else through, in verl's own names. Settings that are mapped here cannot be set there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from agent_r1.build.learner import PACK_TOKENS
from agent_r1.config import RunConfig
from agent_r1.config.schema import CriticConfig, VerlConfig
from agent_r1.errors import ConfigError
from agent_r1.learn.algorithms import Algorithm

SETTINGS = "AGENT_R1_SETTINGS"  # environment variable of verl's processes: the path of the run's config.json
CPU_ENGINE = "agent_r1"  # verl's name for our engine
# verl has FSDP engines for cuda and npu only; they run on a CPU all the same.
CPU_ENVIRONMENT = {"VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda", "RAY_DISABLE_METRICS_COLLECTION": "1"}
GPU_PACK_TOKENS = 32_768  # verl computes logits of all tokens at once, so packs are smaller than ours
LOGICAL_CPUS = 16  # CPUs that Ray may hand out on a laptop: its processes mostly wait for each other


def verl_section(config: RunConfig) -> VerlConfig:
    return config.verl or VerlConfig()


def num_workers(config: RunConfig) -> int:
    """Training processes per node."""
    section = verl_section(config)
    return section.workers or (2 if section.cpu else 8)


def num_agent_loops(config: RunConfig) -> int:
    section = verl_section(config)
    return section.agent_loops or (1 if section.cpu else 8 * section.nodes)


def rollout_engine(config: RunConfig) -> str:
    section = verl_section(config)
    return CPU_ENGINE if section.cpu else section.rollout or "vllm"


def check_settings(config: RunConfig, algorithm: Algorithm) -> None:
    """Raise ConfigError for the first setting that has no counterpart in verl."""
    section, critic = verl_section(config), config.critic or CriticConfig()
    learner = config.learner
    refused = {
        "trainer.mode=async": (config.trainer.mode == "async", "train synchronously, or with backend=local"),
        "trainer.deterministic": (config.trainer.deterministic, "verl has no such guarantee over workers"),
        "rollout.top_p and rollout.top_k": (
            config.rollout.top_p < 1 or config.rollout.top_k > 0,
            "verl's workers compute log-probs over the whole vocabulary, not over the kept ids",
        ),
        "rollout.roles with a temperature": (
            any(role.temperature is not None for role in config.rollout.roles.values()),
            "verl's workers compute log-probs at one temperature",
        ),
        "critic.shared": (critic.shared, "verl's critic is a model of its own"),
        "critic.normalize_returns": (critic.normalize_returns, "the head of verl's critic cannot be rescaled"),
        "model.fp32_head": (config.model.fp32_head, "verl computes logits in the format of the model"),
        "model.device": (
            config.model.device == ("cuda" if section.cpu else "cpu"),
            "verl.cpu decides where verl computes",
        ),
        "learner.compile": (learner.compile is not None, "verl has its own settings for this: see verl.settings"),
        "learner.prefix_sharing=on": (learner.prefix_sharing == "on", "verl computes every row in full"),
        "learner.offload_optimizer": (
            learner.offload_optimizer,
            "set verl.settings.actor_rollout_ref.actor.fsdp_config.optimizer_offload=true",
        ),
        "learner.optimizer_state=8bit": (learner.optimizer_state == "8bit", "verl's workers keep float32 moments"),
        "learner.mlp_chunk_tokens": (learner.mlp_chunk_tokens is not None, "verl computes MLPs of all tokens at once"),
        "lora.share_base": (config.lora is not None and config.lora.share_base, "it shares memory inside one process"),
        f"engine.kind={config.engine.kind}": (config.engine.kind != "local", "verl.rollout chooses what samples"),
        "verl.rollout": (section.cpu and section.rollout is not None, "with verl.cpu=true the local engine samples"),
        "verl.strategy=megatron": (section.cpu and section.strategy == "megatron", "Megatron needs GPUs"),
        "verl.nodes": (section.cpu and section.nodes > 1, "verl.cpu=true runs on one machine"),
    }
    if section.strategy == "megatron":
        # Megatron has an optimizer, a schedule and adapters of its own; ours are made for FSDP.
        refused |= {
            "learner.warmup_steps": (learner.warmup_steps > 0, "only a constant rate with Megatron"),
            "learner.schedule": (learner.schedule != "constant", "only a constant rate with Megatron"),
            "lora": (config.lora is not None, "adapters are trained with verl.strategy=fsdp2"),
            f"algorithm {algorithm.name!r}": (algorithm.needs_critic, "critics are trained with verl.strategy=fsdp2"),
        }
    for name, (is_set, reason) in refused.items():
        if is_set:
            raise ConfigError(f"{name} is not possible with backend=verl: {reason}. Leave it out, or use backend=local")


def verl_tree(config: RunConfig, algorithm: Algorithm, *, model: str) -> dict[str, Any]:
    """Return the settings of verl that follow from ours, as a tree; `verl.settings` come on top."""
    tree: dict[str, Any] = {}
    for name, value in _mapped(config, algorithm, model).items():
        _put(tree, name, value)
    ours = dict(_leaves(tree))
    for name, value in _leaves(verl_section(config).settings):
        taken = [each for each in ours if each == name or each.startswith(f"{name}.") or name.startswith(f"{each}.")]
        if taken and not isinstance(ours[taken[0]], dict):
            raise ConfigError(
                f"verl.settings.{name} is decided by agent-r1's own settings ({taken[0]}={ours[taken[0]]}): change "
                "those instead. docs/verl.md lists which"
            )
        _put(tree, name, value)
    if not verl_section(config).cpu:
        servers = tree["actor_rollout_ref"]["rollout"]
        servers.setdefault("tensor_model_parallel_size", 1)  # verl's default is 2, which one GPU cannot do
    return tree


def dtype_name(config: RunConfig) -> str:
    """The number format of sampling and matrix products, in verl's words."""
    if config.model.dtype == "auto":
        return "fp32" if verl_section(config).cpu else "bf16"
    return {"float32": "fp32", "bfloat16": "bf16"}[config.model.dtype]


def pack_tokens(config: RunConfig) -> int:
    return config.learner.max_tokens_per_pack or (PACK_TOKENS["cpu"] if verl_section(config).cpu else GPU_PACK_TOKENS)


def _mapped(config: RunConfig, algorithm: Algorithm, model: str) -> dict[str, Any]:
    section, tokens = verl_section(config), pack_tokens(config)
    root = "actor_rollout_ref"
    mapped: dict[str, Any] = {
        "trainer.nnodes": section.nodes,
        "trainer.n_gpus_per_node": num_workers(config),
        f"{root}.model.path": model,
        f"{root}.model.use_remove_padding": not section.cpu,  # needs FlashAttention
        f"{root}.model.enable_gradient_checkpointing": config.learner.activation_checkpointing is True,
        # Every step is one call, with the rows and the learning rate that the driver decides.
        f"{root}.actor.use_dynamic_bsz": True,
        f"{root}.actor.ppo_max_token_len_per_gpu": tokens,
        f"{root}.actor.use_kl_loss": config.algorithm.kl_coef > 0,  # has verl build the reference; the loss is ours
        **_rollout(config),
        **_optimizer(f"{root}.actor", "policy", config, config.learner.lr),
        **_precision(f"{root}.actor.fsdp_config", config),
        **_precision(f"{root}.ref.fsdp_config", config),
        f"{root}.actor.checkpoint.save_contents": ["model", "optimizer", "extra", "hf_model"],
        "critic.enable": algorithm.needs_critic,
    }
    if algorithm.needs_critic:
        mapped |= _critic(config, model, tokens)
    if config.lora is not None:
        lora, names = config.lora, config.lora.target_modules
        mapped |= {
            f"{root}.model.lora_rank": lora.rank,
            f"{root}.model.lora_alpha": 2.0 * lora.rank if lora.alpha is None else lora.alpha,
            f"{root}.model.target_modules": "all-linear" if names == "auto" else list(names),
            f"{root}.actor.checkpoint.save_contents": ["model", "optimizer", "extra"],  # merged by us
        }
    if section.cpu:
        mapped |= {
            "trainer.device": "cpu",
            f"{root}.model.override_config.attn_implementation": "sdpa",
            f"{root}.actor.use_torch_compile": False,
            "critic.model.override_config.attn_implementation": "sdpa",
        }
    return mapped


def _rollout(config: RunConfig) -> dict[str, Any]:
    server, section = "actor_rollout_ref.rollout", verl_section(config)
    mapped = {
        f"{server}.name": rollout_engine(config),
        f"{server}.dtype": {"fp32": "float32", "bf16": "bfloat16"}[dtype_name(config)],
        f"{server}.max_model_len": config.rollout.max_context_tokens,
        f"{server}.prompt_length": config.rollout.max_context_tokens,
        f"{server}.response_length": config.rollout.max_context_tokens,
        f"{server}.temperature": config.rollout.temperature,
        f"{server}.calculate_log_probs": True,
        f"{server}.log_prob_use_dynamic_bsz": True,
        f"{server}.log_prob_max_token_len_per_gpu": pack_tokens(config),
    }
    if section.cpu:
        mapped |= {
            f"{server}.tensor_model_parallel_size": 1,
            f"{server}.free_cache_engine": False,
            f"{server}.load_format": "auto",
        }
    return mapped


def _optimizer(place: str, role: str, config: RunConfig, rate: float) -> dict[str, Any]:
    learner = config.learner
    mapped = {
        f"{place}.optim.lr": rate,
        f"{place}.optim.weight_decay": learner.weight_decay,
        f"{place}.optim.clip_grad": learner.max_grad_norm,
        f"{place}.optim.betas": list(learner.betas),
        f"{place}.optim.lr_warmup_steps": 0,
        f"{place}.optim.total_training_steps": max(1, config.trainer.steps),
    }
    if verl_section(config).strategy == "megatron":
        return {f"{place}.strategy": "megatron"} | mapped
    return mapped | {
        f"{place}.strategy": "fsdp2",
        f"{place}.optim.optimizer_impl": "agent_r1.backends.verl.inside.schedule",
        f"{place}.optim.optimizer": "AdamW",
        f"{place}.optim.override_optimizer_config": {"role": role, "eps": learner.adam_eps},
    }


def _precision(place: str, config: RunConfig) -> dict[str, Any]:
    """Master weights in float32, matrix products in the format of the run; verl's default is bfloat16."""
    if verl_section(config).strategy == "megatron":
        return {}
    mapped: dict[str, Any] = {
        f"{place}.model_dtype": "fp32",
        f"{place}.mixed_precision": {"param_dtype": dtype_name(config), "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
    }
    if verl_section(config).cpu:
        mapped[f"{place}.use_torch_compile"] = False
    elif place.endswith("actor.fsdp_config"):
        mapped[f"{place}.entropy_from_logits_with_chunking"] = True  # otherwise verl makes a second copy of all logits
    return mapped


def _critic(config: RunConfig, model: str, tokens: int) -> dict[str, Any]:
    settings = config.critic or CriticConfig()
    return {
        "critic.model.path": model,
        "critic.model.use_remove_padding": not verl_section(config).cpu,
        "critic.model.enable_gradient_checkpointing": config.learner.activation_checkpointing is True,
        "critic.use_dynamic_bsz": True,
        "critic.ppo_max_token_len_per_gpu": tokens,
        "critic.forward_max_token_len_per_gpu": tokens,
        **_optimizer("critic", "critic", config, settings.lr or 10 * config.learner.lr),
        **_precision("critic.fsdp", config),
    }


def _put(tree: dict[str, Any], name: str, value: Any) -> None:
    *path, last = name.split(".")
    for key in path:
        tree = tree.setdefault(key, {})
    tree[last] = value


def _leaves(tree: dict[str, Any], name: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting of a tree with its dotted name."""
    for key, value in tree.items():
        full = f"{name}{name and '.'}{key}"
        if isinstance(value, dict) and value:
            yield from _leaves(value, full)
        else:
            yield full, value


def environment(config: RunConfig) -> dict[str, str]:
    """Environment variables of every process of a run."""
    made = {
        "VERL_USE_EXTERNAL_MODULES": "agent_r1.backends.verl.inside.plugin",  # errors of entry points are not reported
        "TOKENIZERS_PARALLELISM": "false",
        "RAY_USAGE_STATS_ENABLED": "0",
        "VERL_LOGGING_LEVEL": "WARN",
    }
    if config.trainer.threads is not None:
        made["OMP_NUM_THREADS"] = str(config.trainer.threads)
    return made | (CPU_ENVIRONMENT if verl_section(config).cpu else {})
