"""One vLLM server seen through HTTP: what it runs, sampling, weight updates, sleep.

Raises `ServerDown` whenever the server itself is at fault, so that the engine can turn to another one.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx

from agent_r1.engines.base import Prompt, Sampling, check_fits
from agent_r1.engines.vllm.answers import GENERATE, TIES
from agent_r1.engines.vllm.server_process import NEW, OLD, ServerProcess, read_version
from agent_r1.errors import ConfigError, DataError, RolloutError

HEALTH_SECONDS = 10.0  # time limit of a health check
UPDATE_SECONDS = 60.0  # time to read weights, sleep or wake; engine.start_seconds if that is longer
POLL_SECONDS = 0.5
LOAD_ADAPTER = "/v1/load_lora_adapter"
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values that --max-lora-rank takes


class ServerDown(Exception):
    """The server cannot be reached or its engine has died; the request itself may be fine."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a server must have been started with."""

    max_context_tokens: int
    top_k: int  # top_k of training, whose kept ids must be returned; 0: none
    tied: bool  # the model's output head is tied, which must be undone on the server
    vocabulary_size: int
    lora_rank: int = 0  # rank of the adapters that are sent; 0: none are sent
    shape: Mapping[str, Any] = field(default_factory=dict)  # sizes of the model, by name as in its config.json

    def arguments(self, version: tuple[int, int]) -> list[str]:
        """Return the arguments of a server of this version, to start one or to tell the user how."""
        untie = ["--hf-overrides", '{"tie_word_embeddings": false}'] if self.tied else []
        top = ["--max-logprobs", str(self.top_k + TIES)] if self.top_k else []
        lora = ["--enable-lora", "--max-lora-rank", str(self._max_rank())] if self.lora_rank else []
        return [
            *(["--enable-scale-out"] if version > OLD else []),  # the endpoint that takes and returns token ids
            *("--max-model-len", str(self.max_context_tokens)),
            *("--logprobs-mode", "processed_logprobs"),
            *top,
            *untie,
            *lora,
        ]

    def check(self, prompt: Prompt, sampling: Sampling) -> None:
        """Refuse a request that no server could answer. An id outside the vocabulary would end vLLM."""
        ids, size = prompt.ids, self.vocabulary_size
        if prompt.media:
            raise DataError(f"the prompt has {len(prompt.media)} images or other media; VLLMEngine takes only text")
        if not ids or set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) >= size:
            bad = next((token for token in ids if type(token) is not int or not 0 <= token < size), None)
            raise DataError(f"the prompt contains {bad!r}; it must be one or more integers from 0 to {size - 1}")
        check_fits(prompt, sampling, {"rollout.max_context_tokens": self.max_context_tokens})
        if sampling.keep_support and sampling.top_k > self.top_k:
            raise DataError(f"keep_support with top_k={sampling.top_k}: the servers return {self.top_k} ids")

    def _max_rank(self) -> int:
        """Return the smallest limit that vLLM takes."""
        for rank in LORA_RANKS:
            if rank >= self.lora_rank:
                return rank
        raise ConfigError(f"lora.rank={self.lora_rank} is more than vLLM takes ({LORA_RANKS[-1]}): lower it")


@dataclass(eq=False, kw_only=True)
class Server:
    """A server, started by us if it has a process."""

    url: str
    headers: dict[str, str] = field(default_factory=dict)
    process: ServerProcess | None = None
    version: tuple[int, int] = NEW  # known after `check`
    alive: bool = True
    adapter: str | None = None  # the adapter that it samples with
    sessions: int = 0  # number of sessions that stay on it, for its cache
    restarts: int = 0

    def __str__(self) -> str:
        return f"the vLLM server {self.url}"

    def wait_until_ready(self, seconds: float) -> None:
        """Wait for a start. Raises ConfigError if the server ends or is not ready in time."""
        end = time.monotonic() + seconds
        while True:
            if self.process is not None and self.process.ended:
                raise ConfigError(f"{self} ended while it started: {self.process.cause()}")
            try:
                if httpx.get(f"{self.url}/health", timeout=HEALTH_SECONDS, trust_env=False).is_success:
                    return
                problem = "it says that it is not healthy"
            except httpx.TransportError as error:
                problem = str(error) or type(error).__name__
            if self.process is None or time.monotonic() > end:
                hint = (
                    "start it first, or correct engine.urls"
                    if self.process is None
                    else f"see {self.process.log}, or raise engine.start_seconds={seconds:g}"
                )
                raise ConfigError(f"{self} cannot be reached ({problem}): {hint}")
            time.sleep(POLL_SECONDS)

    def check(self, wanted: Wanted) -> None:
        """Raise ConfigError if the server cannot serve this run."""
        with httpx.Client(base_url=self.url, headers=self.headers, timeout=120.0, trust_env=False) as client:
            try:
                self.version = read_version(str(client.get("/version").json()["version"]), str(self))
                answer = client.get("/server_info", params={"config_format": "json"})
                if answer.status_code == httpx.codes.NOT_FOUND:
                    raise ConfigError(f"{self} does not take weight updates: set VLLM_SERVER_DEV_MODE=1 to start it")
                served = answer.json()["vllm_config"]
                model = served["model_config"]
            except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"{self} does not answer like vLLM ({error!r}): check engine.urls") from error
        _compare_shapes(str(self), Path(str(model.get("model"))) / "config.json", wanted.shape)
        overrides = model.get("hf_overrides")
        untied = isinstance(overrides, dict) and overrides.get("tie_word_embeddings") is False
        if (
            model.get("max_model_len", 0) < wanted.max_context_tokens
            or model.get("logprobs_mode") != "processed_logprobs"
            or (wanted.top_k and 0 <= model.get("max_logprobs", 0) < wanted.top_k + TIES)
            or (wanted.tied and not untied)
            or (served.get("lora_config") or {"max_lora_rank": 0})["max_lora_rank"] < wanted.lora_rank
        ):
            needed = " ".join(f"'{word}'" if word.startswith("{") else word for word in wanted.arguments(self.version))
            raise ConfigError(f"{self} was started with other settings than this run needs: start it with {needed}")

    async def generate(self, client: httpx.AsyncClient, body: dict[str, Any]) -> Any:
        answer = await self._post(client, GENERATE, json=body)
        try:
            return answer.json()
        except ValueError as error:
            raise RolloutError(f"{self} answered {GENERATE} with {answer.text[:200]!r}, not JSON") from error

    async def update(self, client: httpx.AsyncClient, path: str) -> None:
        """Replace the weights by those in a folder. Nothing may run."""
        await self._post(client, "/pause", params={"mode": "abort"})
        await self._post(client, "/collective_rpc", json={"method": "reload_weights", "kwargs": {"weights_path": path}})
        await self._use_new_weights(client)

    async def receive(self, client: httpx.AsyncClient, buckets: AsyncIterable[dict[str, Any]]) -> None:
        """Replace the weights by those in buckets. The server copies each bucket before the next one is made. Nothing
        may run."""
        await self._post(client, "/pause", params={"mode": "abort"})
        packed = {"packed": True}  # a bucket is one piece of memory; vLLM 0.26 wants to read that with each of them
        start = packed if self.version > OLD else {}
        await self._post(client, "/init_weight_transfer_engine", json={"init_info": start})
        await self._post(client, "/start_weight_update")
        async for bucket in buckets:
            info = bucket if self.version > OLD else bucket | packed
            await self._post(client, "/update_weights", json={"update_info": info})
        await self._post(client, "/finish_weight_update")
        await self._use_new_weights(client)

    async def _use_new_weights(self, client: httpx.AsyncClient) -> None:
        await self._post(client, "/reset_prefix_cache")
        await self._post(client, "/resume")

    async def swap_adapter(self, client: httpx.AsyncClient, path: str) -> None:
        """Sample with the adapter in a folder from now on. Its name is new, so that no cache of another one is used."""
        old, name = self.adapter, f"agent-r1-{uuid4().hex}"
        await self._post(client, LOAD_ADAPTER, json={"lora_name": name, "lora_path": path})
        self.adapter = name
        if old is not None:
            await self._post(client, "/v1/unload_lora_adapter", json={"lora_name": old})

    async def abort(self, client: httpx.AsyncClient, request_ids: list[str]) -> None:
        await self._post(client, "/abort_requests", json={"request_ids": request_ids})

    async def sleep(self, client: httpx.AsyncClient, level: int) -> None:
        """Free the GPU's memory. Level 1 keeps the weights on the host, level 2 drops them."""
        await self._post(client, "/sleep", params={"level": level})

    async def wake(self, client: httpx.AsyncClient) -> None:
        await self._post(client, "/wake_up")

    async def is_healthy(self, client: httpx.AsyncClient) -> bool:
        try:
            return (await client.get(f"{self.url}/health", timeout=HEALTH_SECONDS)).is_success
        except httpx.TransportError:
            return False

    async def _post(self, client: httpx.AsyncClient, path: str, **arguments: Any) -> httpx.Response:
        try:
            answer = await client.post(f"{self.url}{path}", headers=self.headers, **arguments)
        except (httpx.TransportError, httpx.DecodingError) as error:
            raise ServerDown(f"{type(error).__name__} {error}".strip()) from error
        if answer.is_success:
            return answer
        if path == LOAD_ADAPTER and answer.status_code == httpx.codes.NOT_FOUND:
            raise ConfigError(f"{self} does not take adapters: set VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 to start it")
        problem = f"{answer.status_code} {answer.text[:300]}"
        if answer.is_server_error and not await self.is_healthy(client):
            raise ServerDown(problem)
        raise RolloutError(f"{self} refused {path}: {problem}")


def new_client() -> httpx.AsyncClient:
    # No time limit: a long queue is not a fault, and health checks find servers that hang.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(timeout=httpx.Timeout(None, connect=30.0), limits=limits, trust_env=False)


async def in_time(work: Coroutine[Any, Any, None], start_seconds: float) -> None:
    """Await what a server does between requests. Health checks watch only servers that sample, so this has a limit."""
    seconds = max(UPDATE_SECONDS, start_seconds)
    try:
        await asyncio.wait_for(work, seconds)
    except TimeoutError as error:
        raise ServerDown(f"no answer within {seconds:g} s (engine.start_seconds)") from error


def _compare_shapes(server: str, file: Path, shape: Mapping[str, Any]) -> None:
    """Refuse another model, whose weights would end the server. Its directory may be on another machine: then skip."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    for name, value in shape.items():
        if name in found and found[name] != value:
            raise ConfigError(
                f"{server} serves another model ({file.parent}): its {name} is {found[name]!r}, that of model.path is "
                f"{value!r}"
            )
