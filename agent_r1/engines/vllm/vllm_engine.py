"""Samples on one or more vLLM servers, which get the learner's weights after each step.

A session stays on its server, where its cache is. A server that fails is restarted, or awaited if somebody else runs
it; its requests are repeated on the others meanwhile. A request is seeded, so that repeating it loses nothing.
`vllm_server.py` speaks to a server, `shared_weights.py` and `gpu_weights.py` send the weights; this module coordinates
them.
"""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import httpx
import numpy as np
import torch
from torch import Tensor

from agent_r1.engines.base import Completion, Prompt, Sampling
from agent_r1.engines.vllm.answers import engine_request_id, read_completion, request_body
from agent_r1.engines.vllm.server_process import NEW
from agent_r1.engines.vllm.shared_weights import SentWeights
from agent_r1.engines.vllm.vllm_server import POLL_SECONDS, Server, ServerDown, Wanted, in_time, new_client
from agent_r1.errors import ConfigError, RolloutError

logger = logging.getLogger(__name__)

Score = Callable[[list[int], list[int]], list[float]]  # (prompt, response) -> the learner's log-probs of the response
MAX_RESTARTS = 2  # of one server within a training step; after that, restarting does not help
MAX_STRIKES = 3  # failed health checks in a row
CHECK_SECONDS = 5.0  # between health checks
PROBE_TOKENS = 16


@dataclass(eq=False)
class Call:
    """A running request."""

    server: Server
    session: str
    task: asyncio.Future[Any]
    aborted: bool = False


class VLLMEngine:
    """servers: running ones, or ones with a process to start.
    score: the learner's log-probs, against which each server is checked at the start.
    tolerance: the largest mean difference from them.
    sleeps: whether `sleep` frees the GPU's memory until the next weights or request.
    """

    def __init__(  # noqa: PLR0913 (the settings of the engine)
        self,
        servers: Sequence[Server],
        *,
        weights: SentWeights,
        wanted: Wanted,
        score: Score,
        tolerance: float,
        seed: int,
        start_seconds: float,
        sleeps: bool = False,
    ) -> None:
        self._servers = list(servers)
        self._weights, self._wanted, self._start_seconds, self._sleeps = weights, wanted, start_seconds, sleeps
        self._seeds = np.random.default_rng(seed)
        self._salt = uuid4().hex  # a server may have caches of an earlier run
        self._version: int | None = 0  # None: `load_weights` has failed, or the servers have dropped their weights
        self._client = new_client()
        self._homes: dict[str, Server] = {}
        self._calls: dict[str, Call] = {}
        self._active = 0  # unanswered requests, also while they move to another server
        self._idle, self._open, self._changed = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._open.set()
        self._order = asyncio.Lock()  # one `load_weights` at a time
        self._files = asyncio.Lock()  # held while the files are written, or a server reads them
        self._tasks: set[asyncio.Task[None]] = set()
        self._monitor: asyncio.Task[None] | None = None
        self._reviving: set[Server] = set()
        self._asleep = self._closed = False
        self._clean = weakref.finalize(self, _clean, self._servers, weights)
        started = time.perf_counter()
        try:
            self._start(score, tolerance)
        except BaseException:
            self._clean()
            raise
        self.startup_seconds = time.perf_counter() - started

    def _start(self, score: Score, tolerance: float) -> None:
        own = [server.process for server in self._servers if server.process is not None]
        for process in own:
            process.start()
        for server in self._servers:
            server.wait_until_ready(self._start_seconds)
        for server in self._servers:
            server.check(self._wanted)
        if any(server.version > NEW for server in self._servers):
            logger.warning("this version of vLLM has not been tested with agent-r1: the newest tested one is 0.32")
        with ThreadPoolExecutor(1) as thread:  # the caller's event loop is running, but not ours to wait on
            thread.submit(asyncio.run, self._probe_all(score, tolerance)).result()

    async def _probe_all(self, score: Score, tolerance: float) -> None:
        async with new_client() as client:
            for server in self._servers:
                try:
                    if server.process is None or not self._weights.are_read_at_start:
                        await in_time(self._weights.send(server, client), self._start_seconds)
                    await self._probe(client, server, score, tolerance)
                except (ServerDown, RolloutError) as error:
                    raise ConfigError(
                        f"{server} cannot run this model: {error}. It must serve the model of model.path, and read "
                        f"engine.weights_dir ({self._weights.path})"
                    ) from error

    async def _probe(self, client: httpx.AsyncClient, server: Server, score: Score, tolerance: float) -> None:
        prompt = [i * 7919 % self._wanted.vocabulary_size for i in range(PROBE_TOKENS)]
        sampling = Sampling(max_tokens=min(PROBE_TOKENS, self._wanted.max_context_tokens - PROBE_TOKENS))
        body = request_body(
            Prompt(prompt), sampling, seed=0, salt=self._salt, request_id=uuid4().hex, adapter=server.adapter
        )
        answer = read_completion(await server.generate(client, body), sampling, version=0, server=str(server))
        expected = score(prompt, answer.token_ids)
        off = float(np.mean(np.abs(np.subtract(expected, answer.logprobs))))
        if not off <= tolerance:
            raise ConfigError(
                f"{server} samples from another distribution than the learner's: log-probs differ by {off:.2g} on "
                f"average, the limit is {tolerance:g}. Check its model and data type, or raise engine.tolerance"
            )

    async def generate(self, prompt: Prompt, sampling: Sampling, *, session: str) -> Completion:
        self._check_open()
        self._wanted.check(prompt, sampling)
        while not self._open.is_set():
            await self._open.wait()
        self._check_open()
        self._active += 1
        self._idle.clear()
        try:
            await self._wake()
            seed = int(self._seeds.integers(2**63)) if sampling.seed is None else sampling.seed % 2**63
            return await self._sample(prompt, sampling, seed, session)
        finally:
            self._active -= 1
            if not self._active:
                self._idle.set()

    async def _sample(self, prompt: Prompt, sampling: Sampling, seed: int, session: str) -> Completion:
        assert self._version is not None  # it does not change while a request runs
        if self._monitor is None:
            self._monitor = self._spawn(self._watch())
        while True:
            server, request_id = await self._server_of(session), uuid4().hex
            salt = f"{self._salt}-{self._version}"
            body = request_body(prompt, sampling, seed=seed, salt=salt, request_id=request_id, adapter=server.adapter)
            call = Call(server, session, asyncio.ensure_future(server.generate(self._client, body)))
            self._calls[request_id] = call
            try:
                await asyncio.wait([call.task])
            finally:
                call.task.cancel()  # vLLM drops a request whose connection closes
                del self._calls[request_id]
            if not call.task.cancelled():
                try:
                    return read_completion(call.task.result(), sampling, version=self._version, server=str(server))
                except ServerDown as error:
                    self._lose(server, str(error))
            self._check_open()
            if call.aborted:
                return Completion(token_ids=[], logprobs=[], stop="abort")

    async def _server_of(self, session: str) -> Server:
        while True:
            home = self._homes.get(session)
            if home is not None and home.alive:
                return home
            self.release(session)
            alive = [server for server in self._servers if server.alive]
            if alive:
                home = self._homes[session] = min(alive, key=lambda server: server.sessions)
                home.sessions += 1
                return home
            self._check_left()
            self._changed.clear()
            await self._changed.wait()
            self._check_open()

    def release(self, session: str) -> None:
        """Forget where a session ran. vLLM evicts its cache when it needs the room."""
        if (home := self._homes.pop(session, None)) is not None:
            home.sessions -= 1

    async def load_weights(self, source: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Wait for running requests, then write the weights and have all servers read them.

        New requests wait until then, so no response mixes weights. To load at once, call `abort` first. A server that
        fails meanwhile reads them when it is back.
        """
        async with self._order:
            self._check_open(weights=False)
            self._open.clear()
            try:
                await self._idle.wait()
                self._version = None
                async with self._files:
                    await self._write(source)
                    await self._wake()
                    await self._on_all(lambda server: self._weights.send(server, self._client))
                    for server in self._servers:
                        server.restarts = 0 if server.alive else server.restarts  # only failures in one step count
                self._check_left()
                self._check_open(weights=False)
                self._version = version
            finally:
                self._open.set()

    async def _write(self, source: Iterable[tuple[str, Tensor]]) -> None:
        """Write the files on another thread, so that tools go on meanwhile."""
        device = torch.cuda.current_device() if torch.cuda.is_available() else None

        def write() -> None:
            if device is not None:
                torch.cuda.set_device(device)  # each thread has its own, and sharded weights are gathered there
            with torch.no_grad():
                self._weights.write(source)

        writing = asyncio.ensure_future(asyncio.to_thread(write))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            await asyncio.wait([writing])  # a thread cannot be cancelled: nobody else may write meanwhile
            raise

    def abort(self, session: str | None = None) -> None:
        for server in self._servers:
            calls = {
                request_id: call
                for request_id, call in self._calls.items()
                if call.server is server and session in (None, call.session) and not call.aborted
            }
            for call in calls.values():
                call.aborted = True
            if calls:
                self._spawn(self._abort(server, calls))

    async def _abort(self, server: Server, calls: dict[str, Call]) -> None:
        """Abort calls, repeatedly until all have ended: a request may still be on its way to the server."""
        while pending := {name: call for name, call in calls.items() if not call.task.done()}:
            try:
                await server.abort(self._client, [engine_request_id(name) for name in pending])
            except ServerDown as error:
                self._lose(server, str(error))
            await asyncio.wait([call.task for call in pending.values()], timeout=0.05)

    async def sleep(self) -> None:
        """Free the servers' GPU memory until the next weights. Does nothing unless the engine sleeps."""
        if self._sleeps and not self._asleep:
            await self._idle.wait()
            self._asleep = True
            if self._weights.are_all:  # the servers need not keep any
                self._version = None
            await self._on_all(self._put_to_sleep)

    async def _put_to_sleep(self, server: Server) -> None:
        await server.sleep(self._client, 2 if self._weights.are_all else 1)

    async def _wake(self) -> None:
        if self._asleep:
            self._asleep = False
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()  # the servers need the memory that the learner has freed
            await self._on_all(lambda server: server.wake(self._client))

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for call in self._calls.values():
            call.task.cancel()
        for task in self._tasks:
            task.cancel()
        self._changed.set()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.aclose()
        await asyncio.to_thread(self._clean)

    async def _on_all(self, action: Callable[[Server], Coroutine[Any, Any, None]]) -> None:
        """Call a function on every server that is alive. One that is down now is lost; other errors are raised."""
        servers = [server for server in self._servers if server.alive]
        work = [in_time(action(server), self._start_seconds) for server in servers]
        results = await asyncio.gather(*work, return_exceptions=True)
        for server, result in zip(servers, results, strict=True):
            if isinstance(result, ServerDown):
                self._lose(server, str(result))
            elif isinstance(result, BaseException):
                raise result

    def _lose(self, server: Server, reason: str) -> None:
        """Take a server out, and try to get it back."""
        if not server.alive or self._closed:
            return
        server.alive = False
        calls = [call for call in self._calls.values() if call.server is server]
        for call in calls:
            call.task.cancel()
        left = sum(other.alive for other in self._servers)
        if server.process is not None and server.process.ended:
            reason = server.process.cause()
        logger.warning(
            "%s failed: %s. Its %d requests are repeated on others; servers left: %d of %d",
            *(server, reason, len(calls), left, len(self._servers)),
        )
        if self._weights.are_kept:
            self._reviving.add(server)
            self._spawn(self._revive(server))

    async def _revive(self, server: Server) -> None:
        """Restart our server, or wait for somebody else's, and give it the current weights."""
        try:
            while not server.alive and server.restarts < MAX_RESTARTS:
                server.restarts += 1
                try:
                    if server.process is None:
                        await self._until_healthy(server)
                    async with self._files:
                        if server.process is not None:  # it reads the files when it starts
                            await asyncio.to_thread(server.process.start)
                            await asyncio.to_thread(server.wait_until_ready, self._start_seconds)
                        server.adapter = None  # it may have been restarted
                        await in_time(self._weights.send(server, self._client), self._start_seconds)
                        if self._asleep:
                            await in_time(self._put_to_sleep(server), self._start_seconds)
                        server.alive = True
                    logger.warning("%s is back", server)
                except (ServerDown, RolloutError, ConfigError) as error:
                    logger.warning("%s did not come back: %s", server, error)
            if not server.alive:
                logger.error("%s is given up after %d attempts", server, server.restarts)
        finally:
            self._reviving.discard(server)
            self._changed.set()

    async def _until_healthy(self, server: Server) -> None:
        end = time.monotonic() + self._start_seconds
        while not await server.is_healthy(self._client):
            if time.monotonic() > end:
                raise ServerDown(f"not healthy for {self._start_seconds:g} s (engine.start_seconds)")
            await asyncio.sleep(POLL_SECONDS)

    async def _watch(self) -> None:
        """Find servers that hang: their connections stay open."""
        strikes = dict.fromkeys(self._servers, 0)
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            for server in {call.server for call in self._calls.values()}:
                healthy = await server.is_healthy(self._client)
                strikes[server] = 0 if healthy or not server.alive else strikes[server] + 1
                if strikes[server] >= MAX_STRIKES:
                    self._lose(server, f"{MAX_STRIKES} health checks in a row failed")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _check_open(self, *, weights: bool = True) -> None:
        if self._closed:
            raise RolloutError("this VLLMEngine has been closed")
        if weights and self._version is None:
            raise RolloutError("this VLLMEngine has incomplete weights: it slept, or load_weights failed. Load them")

    def _check_left(self) -> None:
        if not self._reviving and not any(server.alive for server in self._servers):
            # Without a copy of the weights, a server cannot come back on its own.
            hint = "" if self._weights.are_kept else ". With engine.transfer=file, servers are restarted"
            raise RolloutError(f"no vLLM server is left: see the warnings above and the servers' logs{hint}")


def _clean(servers: Sequence[Server], weights: SentWeights) -> None:
    """Also runs when the interpreter ends without `close`."""
    own = [server.process for server in servers if server.process is not None]
    for process in own:
        process.stop(wait=False)
    for process in own:
        process.stop()
    weights.remove()
