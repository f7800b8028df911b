"""`agent-r1 bench`: parses arguments. `agent_r1/bench` is imported when a command runs."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from agent_r1.cli.terminal import Terminal


class Kind(StrEnum):
    ENGINE = "engine"
    LEARNER = "learner"
    STEP = "step"


def bench_command(  # noqa: PLR0913 (each is an option)
    kind: Annotated[
        Kind,
        typer.Argument(
            help="engine: sampling (groups decode, prompts, episodes); learner: optimizer steps over packed sequences; "
            "step: one whole GRPO step of multi-step tool use."
        ),
    ],
    model: Annotated[
        str | None, typer.Option(help="Model directory or hub name; only its config.json is read.")
    ] = None,
    shape: Annotated[str | None, typer.Option(help="Sizes of a common model: tiny, 135m, 1.5b, 4b, 8b, 14b.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="Smoke test with small sizes.")] = False,
    repeats: Annotated[int, typer.Option(help="Number of measurements; medians are reported.")] = 3,
    out: Annotated[Path | None, typer.Option(help="Folder for the results; the cache folder by default.")] = None,
    only: Annotated[str | None, typer.Option(help="Groups of rows to measure, separated by commas.")] = None,
) -> None:
    """Measure speed and memory on this machine, and compare with earlier results."""
    from agent_r1.bench.command import Options, bench

    options = Options(model=model, shape=shape, device=device, quick=quick, repeats=repeats, out=out, only=only)
    bench(kind.value, options, Terminal())
