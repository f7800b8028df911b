"""The event loop of a pool: says when a process has spoken, cannot be spoken to any more, or should be looked at.

Nothing of a pool belongs to an event loop but this and the calls under way, so it serves one loop after another.
"""

from __future__ import annotations

import asyncio
import weakref
from typing import Protocol

from agent_r1.envs.processes.hosting import Host


class Watched(Protocol):
    """A pool, as far as it is told."""

    def on_readable(self, host: Host) -> None: ...

    def on_broken(self, host: Host) -> None: ...

    def on_look(self) -> None: ...


class Watch:
    """Does not hold its pool, which ends its processes when nobody does; the loop does, while calls are under way."""

    def __init__(self, pool: Watched, hosts: list[Host], *, seconds: float) -> None:
        self._pool = weakref.ref(pool)
        self._hosts = hosts  # the pool's own list, of which some are attached
        self._seconds = seconds  # between two looks
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None

    def enter(self, loop: asyncio.AbstractEventLoop) -> None:
        """Calls under way move along when another loop takes over: what cancelled episodes asked for goes on."""
        if self._loop is loop:
            return
        if self._loop is not None and self._loop.is_running():
            raise RuntimeError("an EnvPool serves one event loop at a time, and another one is running")
        attached = [host for host in self._hosts if host.is_attached]
        for host in attached:
            self.detach(host)
        self._loop, self._timer = loop, None
        for host in attached:
            self.attach(host)
        self.look_soon()

    def attach(self, host: Host) -> None:
        """Also when more is to be sent to it than went out."""
        pool = self._pool()
        assert self._loop is not None
        assert pool is not None  # it has called
        if not host.is_attached:
            host.is_attached = True
            self._loop.add_reader(host.process.channel, pool.on_readable, host)
            self._loop.add_reader(host.process.output, self._printed, host)
        if host.process.has_more_to_send:
            self._loop.add_writer(host.process.channel, self._writable, pool, host)

    def detach(self, host: Host) -> None:
        if host.is_attached and self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(host.process.channel)
            self._loop.remove_reader(host.process.output)
            self._loop.remove_writer(host.process.channel)
        host.is_attached = False

    def look_soon(self) -> None:
        if self._timer is None:
            assert self._loop is not None
            self._timer = self._loop.call_later(self._seconds, self._look)

    def close(self) -> None:
        for host in self._hosts:
            self.detach(host)
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        self._timer = None
        if (pool := self._pool()) is not None:
            pool.on_look()

    def _writable(self, pool: Watched, host: Host) -> None:
        assert self._loop is not None
        try:
            host.process.flush()
        except OSError:
            pool.on_broken(host)
        else:
            if not host.process.has_more_to_send:
                self._loop.remove_writer(host.process.channel)

    def _printed(self, host: Host) -> None:
        assert self._loop is not None
        if not host.process.listen():
            self._loop.remove_reader(host.process.output)
