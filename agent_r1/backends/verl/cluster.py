"""Starts a Ray cluster on this machine for one run, or joins the running one that RAY_ADDRESS names.

A cluster of our own ends with the run, whatever happens. A running cluster is left as it was: our actors belong to
this program's job, and Ray ends them with it.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray._private import services

from agent_r1.backends.verl.inside.reaper import MARK, Reaper
from agent_r1.backends.verl.settings import LOGICAL_CPUS, SETTINGS, environment, num_workers, verl_section
from agent_r1.config import RunConfig
from agent_r1.errors import ConfigError

ADDRESS = "RAY_ADDRESS"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def cluster(config: RunConfig, run: Path) -> Iterator[None]:
    """Connect to Ray for the length of a run. Must come before verl is imported: verl reads the environment then."""
    own = environment(config) | {SETTINGS: str(run / "config.json")}
    reaper = None if os.environ.get(ADDRESS) else Reaper()  # only a cluster of our own needs one
    if reaper is not None:
        own[MARK] = reaper.mark
    before = {name: os.environ.get(name) for name in own}
    os.environ |= own
    given = verl_section(config).settings.get("ray_kwargs", {}).get("ray_init", {})
    try:
        _connect(config, own, given)
        yield
    finally:
        ray.shutdown()
        if reaper is not None:
            reaper.release()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _connect(config: RunConfig, own: dict[str, str], given: dict[str, Any]) -> None:
    logging.getLogger("ray").setLevel(logging.ERROR)  # it would warn of the token that we chose
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    settings: dict[str, Any] = {
        "runtime_env": {"env_vars": own},
        "log_to_driver": False,  # the output of workers would run through the display
        "logging_level": logging.ERROR,
        "configure_logging": False,
    } | given
    address = os.environ.get(ADDRESS)
    try:
        if address:
            ray.init(address=address, **settings)
        else:
            _start(config, settings)
    except (ConnectionError, RuntimeError, ValueError) as error:
        where = f"join the Ray cluster at {address} ({ADDRESS})" if address else "start Ray on this machine"
        raise ConfigError(f"cannot {where}: {error}") from error
    for number, handler in handlers.items():  # Ray would end the program at once, without saving
        signal.signal(number, handler)


def _start(config: RunConfig, settings: dict[str, Any]) -> None:
    section = verl_section(config)
    if section.nodes > 1:
        raise ConfigError(
            f"verl.nodes={section.nodes} needs a running Ray cluster: start one (`ray start`), set {ADDRESS} and try "
            "again. docs/verl.md has job files"
        )
    if section.cpu:
        settings = {"num_cpus": LOGICAL_CPUS, "num_gpus": num_workers(config)} | settings  # logical ones
    # A cluster of one run needs a secret of its own; Ray would write one into the home folder.
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    with _in_own_sessions():
        ray.init(address="local", include_dashboard=False, **settings)


@contextmanager
def _in_own_sessions() -> Iterator[None]:
    """Keep Ray's processes out of our process group: a SIGTERM to the group must not end the workers, which are needed
    to save.

    Ray itself shields them from SIGINT only.
    """
    popen = services.ConsolePopen
    services.ConsolePopen = partial(popen, start_new_session=True)
    try:
        yield
    finally:
        services.ConsolePopen = popen
