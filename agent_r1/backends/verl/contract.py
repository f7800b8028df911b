"""Everything of verl, and everything private in Ray, that is used here, with the parameters that it must have.

verl has no stable interface. So an upgrade fails here, in one place and with one message, not in the middle of a run.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from agent_r1.errors import ConfigError

# place -> parameters that are passed by name or position
SIGNATURES: dict[str, tuple[str, ...]] = {
    "verl.single_controller.ray:RayClassWithInitArgs.__init__": ("self", "cls", "args", "kwargs"),
    "verl.single_controller.ray:create_colocated_worker_cls": ("class_dict",),
    "verl.single_controller.ray:RayWorkerGroup.__init__": ("resource_pool", "ray_cls_with_init", "kwargs"),
    "verl.single_controller.ray:RayWorkerGroup.spawn": ("prefix_set",),
    "verl.single_controller.ray:ResourcePoolManager.__init__": ("resource_pool_spec", "mapping"),
    "verl.single_controller.ray:ResourcePoolManager.create_resource_pool": ("self",),
    "verl.workers.engine_workers:ActorRolloutRefWorker.__init__": ("config", "role", "distillation_config"),
    "verl.workers.engine_workers:ActorRolloutRefWorker.init_model": ("self",),
    "verl.workers.engine_workers:ActorRolloutRefWorker.set_loss_fn": ("self", "loss_fn"),
    "verl.workers.engine_workers:ActorRolloutRefWorker.compute_log_prob": ("self", "data"),
    "verl.workers.engine_workers:ActorRolloutRefWorker.compute_ref_log_prob": ("self", "data"),
    "verl.workers.engine_workers:ActorRolloutRefWorker.update_actor": ("self", "data"),
    "verl.workers.engine_workers:ActorRolloutRefWorker.update_weights": ("self", "global_steps", "mode"),
    "verl.workers.engine_workers:ActorRolloutRefWorker.save_checkpoint": ("self", "local_path", "hdfs_path"),
    "verl.workers.engine_workers:ActorRolloutRefWorker.load_checkpoint": ("self", "local_path", "hdfs_path"),
    "verl.workers.engine_workers:TrainingWorker.train_mini_batch": ("self", "data"),
    "verl.workers.engine_workers:TrainingWorker.infer_batch": ("self", "data"),
    "verl.workers.engine_workers:TrainingWorker.set_loss_fn": ("self", "loss_fn"),
    "verl.workers.engine_workers:TrainingWorker.reset": ("self",),
    "verl.workers.engine_workers:TrainingWorkerConfig.__init__": (
        *("model_type", "model_config", "engine_config", "optimizer_config", "checkpoint_config"),
    ),
    "verl.workers.rollout.llm_server:LLMServerManager.create": ("args", "kwargs"),
    "verl.workers.rollout.llm_server:LLMServerManager.__init__": ("config", "worker_group", "rollout_resource_pool"),
    "verl.workers.rollout.llm_server:LLMServerManager.get_client": ("self",),
    "verl.workers.rollout.llm_server:LLMServerManager.get_replicas": ("self",),
    "verl.workers.rollout.llm_server:LLMServerClient.generate": ("request_id", "prompt_ids", "sampling_params"),
    "verl.workers.rollout.replica:RolloutReplica.launch_servers": ("self",),
    "verl.workers.rollout.replica:RolloutReplicaRegistry.register": ("name", "loader"),
    "verl.workers.rollout.base:BaseRollout.__init__": ("config", "model_config", "device_mesh"),
    "verl.workers.rollout.base:BaseRollout.update_weights": ("self", "weights"),
    "verl.checkpoint_engine:CheckpointEngineManager.__init__": ("config", "actor_wg", "replicas"),
    "verl.checkpoint_engine:CheckpointEngineManager.update_weights": ("self", "global_steps"),
    "verl.checkpoint_engine:CheckpointEngineManager.sleep_replicas": ("self",),
    "verl.utils.model:load_valuehead_model": ("local_path", "torch_dtype", "model_config", "trust_remote_code"),
    "verl.utils.tensordict_utils:get_tensordict": ("tensor_dict", "non_tensor_dict"),
    "verl.utils.config:omega_conf_to_dataclass": ("config",),
    "verl.workers.config.optimizer:build_optimizer": ("parameters", "config"),
}
# Private names that are read or replaced, Ray's among them.
NAMES = (
    "ray._private.services:ConsolePopen",
    "verl.workers.rollout.base:_ROLLOUT_REGISTRY",
    "verl.single_controller.ray:RayWorkerGroup.workers",
    "verl.single_controller.base.worker:Worker._query_dispatch_info",
)


def broken_promises() -> list[str]:
    """The differences from the verl that this was written for, one line each."""
    found = []
    for place, wanted in SIGNATURES.items():
        try:
            parameters = inspect.signature(_find(place)).parameters
        except (ImportError, AttributeError) as error:
            found.append(f"{place} is gone ({error})")
            continue
        missing = [name for name in wanted if name not in parameters and name != "self"]
        if missing:
            found.append(f"{place} no longer takes {', '.join(missing)}: it takes {', '.join(parameters)}")
    for place in NAMES:
        try:
            _find(place)
        except (ImportError, AttributeError) as error:
            found.append(f"{place} is gone ({error})")
    return found


def check_contract() -> None:
    if broken := broken_promises():
        lines = "\n".join(f"  {line}" for line in broken)
        raise ConfigError(
            f"this verl differs from the one that backend=verl was made for (0.9.1):\n{lines}\nInstall verl==0.9.1"
        )


def _find(place: str) -> Any:
    module, _, path = place.partition(":")
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    return found
