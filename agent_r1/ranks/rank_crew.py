"""One rank of several: the objects that ranks exchange, and the work they do together until all are done or one stops.

Every rank must make the same calls in the same order. Knows nothing about models or episodes.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Coroutine, Mapping
from datetime import timedelta
from itertools import count
from typing import Any, TypeVar

import torch
from torch import distributed

from agent_r1.errors import AgentR1Error, ConfigError, RankError, RolloutError
from agent_r1.ranks.crew import Crew, OneProcess
from agent_r1.ranks.rank_env import RankPlace
from agent_r1.ranks.watch import Watch, open_store, own_keys

T = TypeVar("T")

# Ranks that die or hang are found by their heartbeat; these limits are for collectives that hang by themselves.
COLLECTIVE_TIMEOUT = timedelta(hours=2)
MEETING_TIMEOUT = timedelta(days=7)  # a rank may wait for the warm start or the longest episode of another one


class Ranks(OneProcess):
    """One of the ranks of the default `torch.distributed` process group, which is already initialised.

    Objects travel through a gloo group of their own: tensors may use another backend, and another thread.
    """

    def __init__(self) -> None:
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        self.objects = distributed.new_group(backend="gloo", timeout=MEETING_TIMEOUT)

    def gather(self, value: T) -> list[T]:
        values = [value] * self.size  # placeholders; all are overwritten
        distributed.all_gather_object(values, value, group=self.objects)
        return values

    def broadcast(self, value: T) -> T:
        values = [value]
        distributed.broadcast_object_list(values, src=0, group=self.objects)
        return values[0]


class RankCrew(Crew):
    """One rank of several."""

    def __init__(self, place: RankPlace) -> None:
        super().__init__()
        self.place = place
        self.who = f"rank {place.rank} ({socket.gethostname()}, pid {os.getpid()})"
        self.stop_number = 0  # the signal that asked this run to stop
        self._store = own_keys(open_store(place), place.attempt)
        self._numbers = count()
        self._part: asyncio.Task[Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._common: BaseException | None = None
        self.watch = Watch(place, self.who, self._hear_stop)
        self.watch.start()

    def connect(self, *, on_gpu: bool) -> None:
        """Set up communication between the ranks, and this rank's GPU."""
        device = self._choose_gpu() if on_gpu else None
        distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=own_keys(self._store, "group"),
            rank=self.place.rank,
            world_size=self.place.size,
            timeout=COLLECTIVE_TIMEOUT,
            device_id=device,
        )
        self.ranks = Ranks()

    def _choose_gpu(self) -> torch.device:
        """Choose a GPU by the local rank, unless the scheduler shows each rank only its own."""
        seen, local = torch.cuda.device_count(), self.place.local_rank
        if local >= seen > 1:
            raise ConfigError(
                f"{self.who} is number {local} on its host, which has only {seen} GPUs: start fewer ranks per host"
            )
        device = torch.device("cuda", 0 if seen == 1 else local)
        torch.cuda.set_device(device)
        return device

    def request_stop(self, number: int) -> None:
        """Stop after a signal: end the part of `all` that runs now, or else the next one."""
        if not self.stop_number:
            self.stop_number = self.watch.stop_number = number
            if self._part is not None:
                self._part.cancel()

    def _hear_stop(self, number: int) -> None:
        """Called in the watching thread: another rank received a signal."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.request_stop, number)

    async def all(self, part: Coroutine[Any, Any, T]) -> list[T]:
        self._loop, self._part = asyncio.get_running_loop(), asyncio.create_task(part)
        if self.stop_number:
            self._part.cancel()
        value, failure = None, ""
        error: BaseException | None = None
        try:
            value = await self._part
        except asyncio.CancelledError as stopped:
            error = stopped
        except Exception as raised:  # noqa: BLE001 (raised again below, after the other ranks were told)
            failure, error = f"{self.who} failed: {error_line(raised)}", raised
        finally:
            self._part = None
        stop = self.stop_number if isinstance(error, asyncio.CancelledError) else 0
        outcomes = self.ranks.gather((value, failure, stop))
        if failures := [failure for _, failure, _ in outcomes if failure]:
            self._common = error if failure else RankError(failures[0])
        elif stops := [stop for _, _, stop in outcomes if stop]:
            self.stop_number = stops[0]
            self._common = asyncio.CancelledError()
        elif error is not None:
            raise error  # cancelled for another reason
        if self._common is not None:
            raise self._common
        return [value for value, _, _ in outcomes]  # type: ignore[misc]  # no rank failed, so each has a value

    def counter(self) -> Callable[[int], int]:
        key = f"count/{next(self._numbers)}"
        return lambda amount: self._store.add(key, amount)

    def share(self, rows: int) -> int | None:
        return -(-rows // self.ranks.size)

    def is_common(self, error: BaseException) -> bool:
        # Too many failed episodes are counted over all ranks, so every rank raises the same error.
        return error is self._common or isinstance(error, RolloutError)

    def main_first(self, make: Callable[[], T]) -> T:
        made = [make()] if self.ranks.is_main else []
        self.ranks.gather(None)
        return made[0] if made else make()

    def check_same(self, facts: Mapping[str, Any]) -> None:
        """Raise ConfigError if a rank runs other code or other settings than rank 0."""
        everyone = self.ranks.gather((self.who, dict(facts)))
        expected = everyone[0][1]
        for who, found in everyone[1:]:
            names = [name for name in {**expected, **found} if expected.get(name) != found.get(name)]
            if names:
                listed = "; ".join(f"{name} is {found.get(name)}, not {expected.get(name)}" for name in names[:3])
                raise ConfigError(f"{who} differs from {everyone[0][0]}: {listed}. All ranks must run the same")


def error_line(error: BaseException) -> str:
    text = str(error) if isinstance(error, AgentR1Error) else f"{type(error).__name__}: {error}"
    return text[:2000]


def is_lost_peer(error: BaseException) -> bool:
    """Whether communication failed, which is a consequence of what happened to another rank."""
    if isinstance(error, distributed.DistError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "NCCL", "closed by peer"))
