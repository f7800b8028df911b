"""How ranks notice that another one died or hangs, and agree on what to report.

Every rank writes a heartbeat to the store that all share and reads those of the others. The first failure that is
posted is the cause; what other ranks raise later is a consequence. Does not know what the ranks compute.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from agent_r1.errors import RankError
from agent_r1.ranks.rank_env import RankPlace

T = TypeVar("T")

BEAT_SECONDS = 0.5
SILENT_SECONDS = "AGENT_R1_SILENT_SECONDS"  # tests shorten it
JOIN_SECONDS = 300.0
GRACE_SECONDS = 2.0  # time for a rank to raise the error of another one by itself
FAILURE, REPORTED = "failure", "reported"


def open_store(place: RankPlace, *, is_client: bool = False) -> TCPStore:
    """Connect to the store through which the ranks meet; the rank that hosts it creates it, unless `is_client`."""
    try:
        return TCPStore(
            place.address,
            place.port,
            is_master=place.hosts_store and not is_client,
            timeout=timedelta(seconds=JOIN_SECONDS),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise RankError(f"rank {place.rank} cannot reach {place.address}:{place.port}: {reason}") from error


def own_keys(store: Store, attempt: str) -> Store:
    return PrefixStore(f"agent_r1/{attempt}", store)


def post_failure(store: Store, text: str) -> str:
    """Record why the run ends, unless something was recorded before; return the cause."""
    return store.compare_set(FAILURE, "", text).decode() or text


def posted_failure(store: Store) -> str | None:
    return store.get(FAILURE).decode() if store.check([FAILURE]) else None


def claims_report(store: Store) -> bool:
    """Whether the caller is the one to report the failure: the first process that asks."""
    return store.add(REPORTED, 1) == 1


def is_reported(store: Store) -> bool:
    return store.check([REPORTED])


def wait_for(find: Callable[[], T], seconds: float) -> T:
    """Return the first result of `find` that counts as true, or the last one when the time is up."""
    until = time.monotonic() + seconds
    while not (found := find()) and time.monotonic() < until:
        time.sleep(0.05)
    return found


class Watch:
    """The heartbeat of this rank, in a thread. `on_stop` is called with a signal that another rank received."""

    def __init__(self, place: RankPlace, who: str, on_stop: Callable[[int], None]) -> None:
        self._place, self._on_stop = place, on_stop
        # A connection of its own: the main thread may wait for an answer on the other one.
        self.store = own_keys(open_store(place, is_client=True), place.attempt)
        self.report: Callable[[str], None] = lambda text: None  # prints; called in the thread
        self.stop_number = 0  # the signal this rank received, for the others
        self.limit = float(os.environ.get(SILENT_SECONDS, "20"))  # allowed seconds of silence
        self._ended = threading.Event()
        self._answered = time.monotonic()  # when the store last answered
        self._keys = [f"beat/{rank}" for rank in range(place.size)]
        self._who = {place.rank: who}

    def start(self) -> None:
        """Wait until all ranks are there, then watch them."""
        self.store.set(f"who/{self._place.rank}", self._who[self._place.rank])
        self._beat(0)
        for rank, key in enumerate(self._keys):
            try:
                self.store.wait([key], timedelta(seconds=JOIN_SECONDS))
            except RuntimeError:
                raise RankError(
                    f"rank {rank} of {self._place.size} did not start within {JOIN_SECONDS:.0f} s"
                ) from None
            self._who[rank] = self.store.get(f"who/{rank}").decode()
        for work in (self._exchange, self._monitor):
            threading.Thread(target=work, name="watch over ranks", daemon=True).start()

    def stop(self, seconds: float) -> None:
        """Say goodbye. The rank that hosts the store leaves last, or after this time."""
        self._ended.set()
        try:
            self.store.set(self._keys[self._place.rank], json.dumps(["done", 0]))
            if self._place.hosts_store:
                wait_for(self._all_done, seconds)
        except RuntimeError:  # the store is gone, and so is the reason to say goodbye
            return

    def fail(self, reason: str) -> str:
        """End the run on all ranks, because of this one; return the cause, which may be another one."""
        return post_failure(self.store, f"{self._who[self._place.rank]} {reason}")

    def _all_done(self) -> bool:
        return all(json.loads(value)[0] == "done" for value in self.store.multi_get(self._keys))

    def _beat(self, number: int) -> None:
        self.store.set(self._keys[self._place.rank], json.dumps([number, self.stop_number]))

    def _exchange(self) -> None:
        """Write this rank's heartbeat, read the others', and record who fell silent."""
        number, last = 0, time.monotonic()
        seen: dict[int, tuple[object, float]] = {}  # the last heartbeat of each rank, and when it came
        while not self._ended.wait(BEAT_SECONDS):
            now = time.monotonic()
            if now - last > self.limit / 2:  # this process itself was paused: the other ranks are not at fault
                seen.clear()
            number, last = number + 1, now
            try:
                self._beat(number)
                beats = [json.loads(value) for value in self.store.multi_get(self._keys)]
                cause = posted_failure(self.store)
            except RuntimeError:
                self._end(f"{self._host_of_store()} does not answer any more")
                return
            self._answered = now = time.monotonic()
            for rank, (count, stop) in enumerate(beats):
                if seen.get(rank, (None, 0.0))[0] != count:
                    seen[rank] = (count, now)
                if stop and not self.stop_number:
                    self._on_stop(stop)
                if cause is None and count != "done" and now - seen[rank][1] > self.limit:
                    cause = post_failure(self.store, f"{self._who[rank]} has not answered for {self.limit:.0f} s")
            if cause is not None:
                self._end(cause)
                return

    def _monitor(self) -> None:
        """End this rank if the store does not answer at all: the exchange then waits for ever."""
        last = time.monotonic()
        while not self._ended.wait(BEAT_SECONDS):
            now = time.monotonic()
            if now - last > self.limit / 2:
                self._answered = now
            last = now
            if now - self._answered > self.limit + 2 * GRACE_SECONDS:
                self._end(f"{self._host_of_store()} has not answered for {self.limit:.0f} s", heard=False)
                return

    def _host_of_store(self) -> str:
        host = "the launcher" if self._place.is_launched else self._who[0]
        return f"{host}, which hosts the store at {self._place.address}:{self._place.port},"

    def _end(self, cause: str, *, heard: bool = True) -> None:
        """Report the cause and exit, although the main thread may be waiting for ranks that are gone."""
        # Rank 0 reports if it can; others only if it is the one that is gone.
        if self._ended.wait(GRACE_SECONDS if self._place.rank == 0 else 2 * GRACE_SECONDS):
            return  # the main thread has ended by itself
        try:
            chosen = not heard or claims_report(self.store)
        except RuntimeError:
            chosen = True
        if chosen:
            self.report(cause)
        os._exit(1)
