"""The local engine as a rollout server of verl, so that a recipe runs on Ray where vLLM and SGLang do not.

One server per training process. It hands out tokens; the training process beside it hands over its weights.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import Any

import ray
import torch
from torch import Tensor
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput

from agent_r1.backends.verl.inside.sampler import SESSION
from agent_r1.backends.verl.settings import SETTINGS
from agent_r1.build.engine import build_engine
from agent_r1.build.models.load import load_model
from agent_r1.config import parse_config
from agent_r1.engines.base import Prompt, Sampling
from agent_r1.learn.model.layers import untied_state


def server_name(replica: int) -> str:
    return f"agent_r1_server_{replica}"


@ray.remote
class Server:
    def __init__(self, model: str) -> None:
        torch.set_num_threads(1)
        with open(os.environ[SETTINGS], encoding="utf-8") as file:
            config = parse_config(json.load(file))
        loaded = load_model(config, model)
        self._engine = build_engine(config, loaded)
        # Adapters come alone: their base stays here.
        self._base = dict(untied_state(loaded.network)) if config.lora is not None else {}
        self._version = 0

    async def generate(self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any) -> Any:
        session = sampling_params.get(SESSION, request_id)
        sampling = Sampling(
            max_tokens=sampling_params["max_tokens"],
            temperature=sampling_params["temperature"],
            top_p=sampling_params["top_p"],
            top_k=max(0, sampling_params["top_k"]),
            stop_ids=tuple(sampling_params["stop_token_ids"]),
            seed=sampling_params.get("seed"),
        )
        try:
            done = await self._engine.generate(Prompt(list(prompt_ids)), sampling, session=session)
        finally:
            self._engine.release(session)  # verl never says that a session is over
        reason = "aborted" if done.stop == "abort" else "completed"
        return TokenOutput(
            token_ids=done.token_ids,
            log_probs=done.logprobs,
            stop_reason=reason,
            extra_fields={"global_steps": self._version},
        )

    async def update_weights(
        self, named: list[tuple[str, Any]], version: int | None, adapter: dict[str, Any] | None
    ) -> None:
        """`adapter` has rank and scale if the weights belong to adapters."""
        weights = {name: torch.from_numpy(array) for name, array in named}
        self._version = self._version if version is None else version
        if adapter is not None:
            weights = self._base | merged(self._base, weights, scale=adapter["lora_alpha"] / adapter["r"])
        await self._engine.load_weights(weights.items(), self._version)

    async def set_version(self, version: int) -> None:
        self._version = version

    async def nothing(self, *_: Any, **__: Any) -> None:
        """Do nothing: a CPU hands over no memory, and a synchronous run aborts no request."""

    wake_up = sleep = abort_all_requests = resume_generation = nothing
    clear_kv_cache = release_kv_cache = resume_kv_cache = nothing


def merged(base: dict[str, Tensor], adapters: dict[str, Tensor], *, scale: float) -> dict[str, Tensor]:
    """The weights that adapters change: W + scale * B A."""
    made = {}
    for name, down in adapters.items():
        layer, found, _ = name.partition(".lora_A.")
        if found:
            target = f"{layer.removeprefix('base_model.model.')}.weight"
            up = adapters[name.replace(".lora_A.", ".lora_B.")]
            made[target] = base[target] + scale * (up @ down)
    return made


class Replica(RolloutReplica):  # type: ignore[misc]
    async def launch_servers(self) -> None:
        path = getattr(self.model_config, "local_path", None) or self.model_config.path
        name = server_name(self.replica_rank)
        actor: Any = Server
        server = actor.options(name=name, num_cpus=0, max_concurrency=self.max_concurrency).remote(str(path))
        await server.set_version.remote(0)
        self.servers, self._server_handle, self._server_address = [server], server, name


class Adapter(BaseRollout):  # type: ignore[misc]
    """Runs in every training process and hands its weights to the server beside it."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = int(os.environ["RANK"]) if replica_rank == -1 else replica_rank
        self.is_leader_rank = True

    async def resume(self, tags: list[str]) -> None:
        """Nothing was released."""

    async def release(self) -> None:
        """A CPU has no memory to share out."""

    async def update_weights(
        self,
        weights: Iterable[tuple[str, Tensor]],
        global_steps: int | None = None,
        peft_config: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        named = [(name, whole(tensor).detach().float().cpu().numpy()) for name, tensor in weights]
        server = ray.get_actor(server_name(self.replica_rank))
        await server.update_weights.remote(named, global_steps, peft_config)


def whole(tensor: Tensor) -> Tensor:
    """Return the tensor, gathered if it is sharded."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()
