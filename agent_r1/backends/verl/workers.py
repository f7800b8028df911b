"""Starts verl's training workers and rollout servers, and calls them.

Assembled from verl's parts as in its trainer, without those that a recipe does not need: datasets, reward workers,
agent loops, a replay buffer. A batch is handed to the workers directly, so no queue is involved.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
import torch
from omegaconf import DictConfig
from ray.exceptions import GetTimeoutError
from tensordict import TensorDict
from torch import Tensor
from verl.checkpoint_engine import CheckpointEngineManager
from verl.single_controller.ray import (
    RayClassWithInitArgs,
    RayWorkerGroup,
    ResourcePoolManager,
    create_colocated_worker_cls,
)
from verl.utils import tensordict_utils
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker, TrainingWorkerConfig
from verl.workers.rollout.llm_server import LLMServerManager

from agent_r1.backends.verl.inside.losses import PolicyLoss, ValueLoss
from agent_r1.backends.verl.learner import Extras, Found, Rows

POOL, CRITIC = "global_pool", "critic"
ALIVE_SECONDS = 10.0


class VerlWorkers:
    """Policy, reference and critic on verl's workers, and the servers that sample from the policy."""

    def __init__(self, tree: DictConfig, *, has_critic: bool, has_reference: bool) -> None:
        self.tree = tree
        self.adapts = tree.actor_rollout_ref.model.lora_rank > 0  # then the reference is the policy without adapters
        role = "actor_rollout_ref" if has_reference and not self.adapts else "actor_rollout"
        classes = {
            role: RayClassWithInitArgs(
                cls=ray.remote(ActorRolloutRefWorker),
                config=tree.actor_rollout_ref,
                distillation_config=tree.distillation,
                role=role,
            )
        }
        if has_critic:
            classes[CRITIC] = RayClassWithInitArgs(cls=ray.remote(TrainingWorker), config=_critic_config(tree))
        pool = ResourcePoolManager(
            resource_pool_spec={POOL: [tree.trainer.n_gpus_per_node] * tree.trainer.nnodes}, mapping={}
        )
        pool.create_resource_pool()
        group = RayWorkerGroup(
            resource_pool=pool.resource_pool_dict[POOL],
            ray_cls_with_init=create_colocated_worker_cls(class_dict=classes),
            device_name=tree.trainer.device,
        )
        spawned = group.spawn(prefix_set=classes.keys())
        self.policy, self.critic = spawned[role], spawned.get(CRITIC)
        self._pool = pool.resource_pool_dict[POOL]

    def start(self) -> None:
        """Load the models, then start the servers beside them."""
        if self.critic is not None:
            self.critic.reset()
        self.policy.init_model()
        self.size: int = max(self.policy._query_dispatch_info("actor")) + 1  # verl has no public name for it
        self.servers = LLMServerManager.create(
            config=self.tree, worker_group=self.policy, rollout_resource_pool=self._pool
        )
        settings = omega_conf_to_dataclass(self.tree.actor_rollout_ref.rollout.checkpoint_engine)
        settings.backend = "naive"  # the processes that train also hold the servers' ends
        self.weights = CheckpointEngineManager(
            config=settings, actor_wg=self.policy, replicas=self.servers.get_replicas()
        )

    def set_losses(self, policy: PolicyLoss, value: ValueLoss) -> None:
        self.policy.set_loss_fn(policy)
        if self.critic is not None:
            self.critic.set_loss_fn(value)

    def __str__(self) -> str:
        return f"{self.world_size} training workers, {len(self.servers.get_replicas())} engine servers"

    def processes(self) -> dict[str, Any]:
        """The actors that a run cannot do without, by their role."""
        replicas = self.servers.get_replicas()
        servers = [server for replica in replicas for server in replica.servers]
        found = {f"training worker {rank}": worker for rank, worker in enumerate(self.policy.workers)}
        found |= {f"engine server {number}": server for number, server in enumerate(servers)}
        return found | {"load balancer of the engine servers": self.servers.global_load_balancer}

    def require_alive(self) -> None:
        """Raise the error of a training worker that died."""
        questions = [worker.__ray_ready__.remote() for worker in self.policy.workers]
        with suppress(GetTimeoutError):  # busy
            ray.get(questions, timeout=ALIVE_SECONDS)

    @property
    def world_size(self) -> int:
        return int(self.policy.world_size)

    def sync(self, version: int) -> None:
        """Hand the policy's weights to the servers."""
        self.weights.update_weights(version)

    def sleep(self) -> None:
        self.weights.sleep_replicas()

    def save(self, folder: Path) -> None:
        self.policy.save_checkpoint(str(folder / "actor"), None, 0, None)
        if self.critic is not None:
            self.critic.save_checkpoint(str(folder / CRITIC), None, 0, None)

    def load(self, folder: Path) -> None:
        self.policy.load_checkpoint(str(folder / "actor"), None, False)
        if self.critic is not None:
            self.critic.load_checkpoint(str(folder / CRITIC), None, False)

    # Queries: one number per token.

    def logprobs(self, rows: Rows, extras: Extras) -> Tensor:
        return self._ask(self.policy.compute_log_prob, "log_probs", rows, extras)

    def reference_logprobs(self, rows: Rows, extras: Extras) -> Tensor:
        if self.adapts:
            return self._ask(self.policy.compute_log_prob, "log_probs", rows, extras | {"no_lora_adapter": True})
        return self._ask(self.policy.compute_ref_log_prob, "log_probs", rows, extras)

    def values(self, rows: Rows, extras: Extras) -> Tensor:
        assert self.critic is not None
        return self._ask(self.critic.infer_batch, "values", rows, extras)

    def _ask(self, call: Any, name: str, rows: Rows, extras: Extras) -> Tensor:
        batch = as_batch(rows, extras | {"compute_loss": False, "calculate_entropy": False})
        output = call(batch)
        if not isinstance(output, TensorDict):  # a call that does not wait
            output = output.get()
        numbers: Tensor = output[name].values().float()
        return numbers

    # Updates: one optimizer step.

    def update_policy(self, rows: Rows, extras: Extras) -> Found:
        return self._update(self.policy.update_actor, rows, extras | {"calculate_entropy": True})

    def update_critic(self, rows: Rows, extras: Extras) -> Found:
        assert self.critic is not None
        return self._update(self.critic.train_mini_batch, rows, extras)

    def _update(self, call: Any, rows: Rows, extras: Extras) -> Found:
        size = len(rows["input_ids"])
        whole = {"mini_batch_size": size, "global_batch_size": size, "epochs": 1}
        order = {"dataloader_kwargs": {"shuffle": False}, "seed": 0}
        output = call(as_batch(rows, extras | whole | order))
        if not isinstance(output, TensorDict):
            output = output.get()
        found = tensordict_utils.get(output, "metrics")
        return {name: _numbers(value) for name, value in found.items()}


def as_batch(rows: Rows, extras: Extras) -> TensorDict:
    nested = {name: torch.nested.as_nested_tensor(each, layout=torch.jagged) for name, each in rows.items()}
    return tensordict_utils.get_tensordict(nested, non_tensor_dict=extras)


def _numbers(value: Any) -> list[float]:
    """The numbers of a metric: of every micro-batch and worker, or one for all."""
    if isinstance(value, list | tuple):
        return [number for each in value for number in _numbers(each)]
    return [float(value)]


def _critic_config(tree: DictConfig) -> TrainingWorkerConfig:
    settings = omega_conf_to_dataclass(tree.critic)
    settings.engine.infer_max_token_len_per_gpu = settings.forward_max_token_len_per_gpu
    settings.engine.max_token_len_per_gpu = settings.ppo_max_token_len_per_gpu
    settings.engine.use_dynamic_bsz = True
    return TrainingWorkerConfig(
        model_type="value_model",
        model_config=settings.model,
        engine_config=settings.engine,
        optimizer_config=settings.optim,
        checkpoint_config=settings.checkpoint,
    )
