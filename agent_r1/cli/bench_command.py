"""`agent-r1 bench`: parses arguments; `agent_r1/bench` does the work and is imported when a command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agent_r1.cli.terminal import Terminal

app = typer.Typer(
    help="Measure speed and memory on this machine, and compare with stored results.", no_args_is_help=True
)
console = Terminal()

Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Quick = Annotated[bool, typer.Option("--quick", help="A tiny model and small sizes: does it run at all?")]
Repeats = Annotated[int, typer.Option(help="Measurements of each side; medians are reported.")]
Out = Annotated[Path | None, typer.Option(help="Folder of the results; by default the repository's, or the cache's.")]
Only = Annotated[str | None, typer.Option(help="Measure this group of rows alone.")]


@app.command("engine")
def bench_engine_command(
    device: Device = "auto", quick: Quick = False, repeats: Repeats = 3, out: Out = None, only: Only = None
) -> None:
    """Sampling: pure decoding, tool episodes, growing episodes, a soak. Groups: decode, episodes, append, soak."""
    from agent_r1.bench.command import Options, bench_engine

    bench_engine(Options(device=device, quick=quick, repeats=repeats, out=out, only=only), console)


@app.command("learner")
def bench_learner_command(
    device: Device = "auto", quick: Quick = False, repeats: Repeats = 3, out: Out = None, only: Only = None
) -> None:
    """Optimizer steps: packed, merged, as a token tree. Groups: packed, steps, shared, sharing."""
    from agent_r1.bench.command import Options, bench_learner

    bench_learner(Options(device=device, quick=quick, repeats=repeats, out=out, only=only), console)


@app.command("step")
def bench_step_command(
    device: Device = "auto",
    quick: Quick = False,
    repeats: Repeats = 3,
    out: Out = None,
    against: Annotated[str | None, typer.Option(help="Another trainer to take turns with, such as trl.")] = None,
) -> None:
    """One whole GRPO step of multi-step tool use."""
    from agent_r1.bench.command import Options, bench_step

    bench_step(Options(device=device, quick=quick, repeats=repeats, out=out, only=None), console, against=against)


@app.command("show")
def bench_show_command(
    file: Annotated[Path, typer.Argument(help="A results file.")],
    only: Only = None,
) -> None:
    """Print stored results as markdown tables."""
    from agent_r1.bench.command import show

    show(file, only, console)


@app.command("page")
def bench_page_command(
    page: Annotated[Path, typer.Argument(help="A markdown file with lines <!-- FILE GROUP --> and <!-- end -->.")],
    out: Out = None,
) -> None:
    """Write stored results into a page, between its markers."""
    from agent_r1.bench.command import fill_page

    fill_page(page, console, out=out)
