"""`agent-r1 bench`: parses arguments. `agent_r1/bench` is imported when a command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agent_r1.cli.terminal import Terminal

app = typer.Typer(
    help="Measure speed and memory on this machine, and compare with earlier results.", no_args_is_help=True
)
console = Terminal()

Model = Annotated[str | None, typer.Option(help="Model directory or hub name; only its config.json is read.")]
Shape = Annotated[str | None, typer.Option(help="Sizes of a common model: tiny, 135m, 1.5b, 4b, 8b, 14b.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Quick = Annotated[bool, typer.Option("--quick", help="Smoke test with small sizes.")]
Repeats = Annotated[int, typer.Option(help="Number of measurements; medians are reported.")]
Out = Annotated[Path | None, typer.Option(help="Folder for the results; the cache folder by default.")]
Only = Annotated[str | None, typer.Option(help="Groups of rows to measure, separated by commas.")]


@app.command("engine")
def bench_engine_command(
    model: Model = None,
    shape: Shape = None,
    device: Device = "auto",
    quick: Quick = False,
    repeats: Repeats = 3,
    out: Out = None,
    only: Only = None,
) -> None:
    """Sampling: decoding, prompts plus decoding, and multi-step tool episodes. Groups: decode, prompts, episodes."""
    from agent_r1.bench.command import Options, bench

    sizes = {"model": model, "shape": shape}
    bench("engine", Options(**sizes, device=device, quick=quick, repeats=repeats, out=out, only=only), console)


@app.command("learner")
def bench_learner_command(
    model: Model = None, device: Device = "auto", quick: Quick = False, repeats: Repeats = 3, out: Out = None
) -> None:
    """Optimizer steps over packed sequences."""
    from agent_r1.bench.command import Options, bench

    bench("learner", Options(model=model, device=device, quick=quick, repeats=repeats, out=out), console)


@app.command("step")
def bench_step_command(
    model: Model = None, device: Device = "auto", quick: Quick = False, repeats: Repeats = 3, out: Out = None
) -> None:
    """One whole GRPO step of multi-step tool use."""
    from agent_r1.bench.command import Options, bench

    bench("step", Options(model=model, device=device, quick=quick, repeats=repeats, out=out), console)
