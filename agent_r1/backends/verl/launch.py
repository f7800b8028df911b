"""Entry points of the command line for training on verl: checks, the connection to Ray, and the trainer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent_r1.backends.verl.settings import check_settings, verl_tree
from agent_r1.build.plan import Plan
from agent_r1.config import RunConfig
from agent_r1.errors import ConfigError
from agent_r1.runs.run_dir import RunDir
from agent_r1.train.checkpoint import load_state
from agent_r1.train.trainer import Progress

if TYPE_CHECKING:
    from agent_r1.backends.verl.trainer import VerlTrainer
    from agent_r1.backends.verl.watch import Watch

VERSION = "0.9.1"
INSTALL = "install it with pip install 'agent-r1[verl]', ideally in a separate environment (docs/verl.md)"


def check_verl(config: RunConfig, plan: Plan) -> dict[str, Any]:
    """Raise ConfigError for what verl cannot do; return the settings of verl that follow from ours."""
    check_settings(config, plan.algorithm)
    return verl_tree(config, plan.algorithm, model="MODEL")


def require_verl() -> None:
    if find_spec("verl") is None or find_spec("ray") is None:
        raise ConfigError(f"backend=verl needs verl {VERSION}, which is not installed: {INSTALL}")
    try:
        found = version("verl")
    except PackageNotFoundError:
        found = "unknown"
    if found != VERSION:
        raise ConfigError(f"backend=verl needs verl {VERSION}, but {found} is installed: {INSTALL}")


@contextmanager
def session(config: RunConfig, run: RunDir, report: Callable[[str], None]) -> Iterator[Watch]:
    """Connect to Ray for the length of a run."""
    require_verl()
    from agent_r1.backends.verl.cluster import cluster

    with cluster(config, run.path):
        from agent_r1.backends.verl.contract import check_contract
        from agent_r1.backends.verl.watch import Watch

        check_contract()
        yield Watch(report)


async def build_verl_trainer(
    config: RunConfig,
    *,
    run: RunDir,
    plan: Plan,
    weights: str | Path,
    progress: Progress,
    watch: Watch,
    checkpoint: tuple[int, Path] | None,
) -> VerlTrainer:
    """Start all processes of a run, and continue from its checkpoint if there is one."""
    from agent_r1.backends.verl.assemble import make_trainer, start_processes

    began, logs = time.monotonic(), run.path / "logs"
    logs.mkdir(exist_ok=True)
    with (logs / "verl.log").open("a", encoding="utf-8") as log, redirect_stdout(log):  # verl prints what it does
        processes = await start_processes(config, run=run, plan=plan, weights=weights, watch=watch)
        trainer = make_trainer(config, run=run, plan=plan, progress=progress, processes=processes, watch=watch)
        if checkpoint is None:
            await trainer.sync_weights(0)
        else:
            state = load_state(checkpoint[1])
            trainer.load(checkpoint[1], state)
            await trainer.restore(state)
    progress.note(f"verl: {processes}, ready after {time.monotonic() - began:.0f} s")
    for problem in processes.reader.template.problems if config.task.tools else ():
        progress.note(f"warning: chat template: {problem}")
    return trainer
