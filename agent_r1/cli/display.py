"""Show the progress of a run: a live display in a terminal, one line per step elsewhere, a picture at the end."""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from agent_r1.config.schema import EvalConfig
from agent_r1.places import anchored, shown
from agent_r1.runs.metrics import Metrics, failed_share
from agent_r1.runs.trajectories import transcript
from agent_r1.text import visible
from agent_r1.types import Group as EpisodeGroup
from agent_r1.types import Trajectory
from agent_r1.vision.contents import text_of

BARS = "▁▂▃▄▅▆▇█"
SILENT_SECONDS = 20.0  # without a terminal, steps longer than this print their progress


class _Live(Progress):
    """A progress bar with lines below it, redrawn four times a second."""

    below: Callable[[], Sequence[Text]] = tuple

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        yield from self.below()


class Display:
    """Progress of one stage (warm start, training, evaluation). Use as a context manager.

    A terminal gets a live display; elsewhere one line is printed per step, and one now and then within long steps.
    """

    def __init__(self, console: Console, title: str, *, total: int, done: int = 0) -> None:
        self._console = console
        self._title = title
        self._total, self._first, self._done = total, done, done
        self._began = self._phase_began = self._printed = time.monotonic()
        self._line = Text("loading and building ...", style="dim")
        self._history: list[float] = []
        self._episodes = Text("")
        self._live = _Live(
            TextColumn(f"[bold]{title}"),
            BarColumn(bar_width=24),  # all columns together fit into 80 characters
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
            refresh_per_second=4,
            transient=True,
            disable=not console.is_terminal,
        )
        self._live.below = lambda: (self._line, Text(sparkline(self._history[-60:]), style="green"), self._episodes)
        self._task = self._live.add_task(title, total=total, completed=done, left="")

    def __enter__(self) -> Display:
        self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.stop()

    def total(self, total: int) -> None:
        """Set the length of a stage that is known only after it began."""
        self._total = total
        self._live.update(self._task, total=total)

    def episodes(self, finished: int, total: int) -> None:
        """Report progress within a training step."""
        self._within(f"episodes {finished}/{total}", finished, total)

    def evaluating(self, finished: int, total: int, success: float) -> None:
        """Report progress within an evaluation."""
        self._within(f"evaluated {finished}/{total}  success so far {success:.1%}", finished, total)

    def advance(self, done: int, *_: object) -> None:
        """Move the bar of a stage whose steps print no lines."""
        self._done = done
        self._live.update(self._task, completed=done)

    def step(self, step: int, metrics: Metrics) -> None:
        """Report a finished training step."""
        self.update(step, step_summary(metrics), value=metrics["success"])

    def evaluation(self, step: int, metrics: Metrics) -> None:
        self._episodes = Text("")
        self.note(f"step {step:4d}  held-out success {eval_summary(metrics)}")

    def update(self, done: int, summary: str, *, value: float, may_end_early: bool = False) -> None:
        """Move the bar and print one line; `value` extends the small curve."""
        self._history.append(value)
        self._line, self._episodes = Text(summary), Text("")
        self.advance(done)
        seconds = _seconds_left(self._began, self._done - self._first, self._total - self._first)
        left = f"{'at most ' if may_end_early else ''}{clock(seconds)} left"
        self._live.update(self._task, left=left)
        if not self._console.is_terminal:
            self.note(f"{self._title} {done}/{self._total}  {summary}  {left}")

    def note(self, text: str) -> None:
        """Print a line that stays on screen above the live part."""
        self._printed = time.monotonic()
        self._console.print(Text(visible(text)), soft_wrap=True)  # Text: paths and messages must not be read as markup

    def _within(self, text: str, finished: int, total: int) -> None:
        now = time.monotonic()
        if finished <= 1:
            self._phase_began = now
        else:
            text = f"{text}  {clock(_seconds_left(self._phase_began, finished - 1, total - 1))} left"
        self._episodes = Text(text, style="dim")
        if not self._console.is_terminal and now - self._printed > SILENT_SECONDS:
            self.note(text)


def _seconds_left(began: float, done: int, total: int) -> float:
    return (time.monotonic() - began) / done * (total - done) if done else 0.0


def warm_start_progress(display: Display, *, may_end_early: bool) -> Callable[[int, int, Metrics], None]:
    """Return a callback for updates of a warm start. If a target loss may end it early, the time left is a bound."""

    def show(update: int, total: int, metrics: Metrics) -> None:
        display.total(total)
        if update % 10 == 0 or update == total:
            early, loss = may_end_early and update < total, metrics["loss"]
            display.update(update, f"loss {loss:.3f}", value=loss, may_end_early=early)

    return show


def step_summary(metrics: Metrics) -> str:
    refused = metrics.get("skipped_updates", 0.0)
    problems = errors_summary(metrics) + (f"  updates refused {refused:.0f}" if refused else "")
    return (
        f"reward {metrics['reward/mean']:.2f}  success {metrics['success']:4.0%}{problems}  "
        f"steps/episode {metrics['episode/steps']:.1f}  tool calls {metrics['episode/tool_calls']:.1f}  "
        f"{metrics['tokens_per_second'] / 1000:.1f}k tok/s"
    )


def eval_summary(metrics: Metrics) -> str:
    """`62.5 % +- 3.4 % of 200 rows`."""
    text = f"{metrics['success']:.1%} +- {metrics['success_stderr']:.1%} of {metrics['rows']:.0f} rows"
    passes = [f"  {name} {value:.1%}" for name, value in metrics.items() if name.startswith("pass@")]
    return text + "".join(passes) + errors_summary(metrics)


def describe_sampling(settings: EvalConfig) -> str:
    if settings.temperature == 0:
        return "greedy"
    return f"{settings.samples} sample(s) per row at temperature {settings.temperature:g}"


def errors_summary(metrics: Metrics) -> str:
    """`  errors 50%`, or nothing when no episode failed."""
    share = failed_share(metrics)
    return f"  errors {100 * share:.3g}%" if share > 0 else ""


def sparkline(values: Sequence[float]) -> str:
    """Draw one bar per value, from 0 to 1 or to the highest, and a gap for values that are not finite."""
    scale = (len(BARS) - 1) / max([1.0, *filter(math.isfinite, values)])
    return "".join(BARS[max(0, round(value * scale))] if math.isfinite(value) else " " for value in values)


def program() -> str:
    """Return `agent-r1` if the shell finds this program under that name, else the path it was called by."""
    called, found = anchored(sys.argv[0]), shutil.which("agent-r1")
    if called.name != "agent-r1" or (found is not None and Path(found).resolve() == called.resolve()):
        return "agent-r1"
    return shown(called)


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"


def transcript_panel(group: EpisodeGroup, trajectory: Trajectory) -> Panel:
    """Show one episode as a conversation with its reward; long texts are cut."""
    table = Table.grid(padding=(0, 1))
    for message in trajectory.opening or group.row.prompt:
        if message["role"] == "user":
            table.add_row(Text("user", style="bold blue"), Text(visible(shorten(text_of(message["content"])))))
    for speaker, text in transcript(trajectory):
        style = "bold yellow" if speaker in ("tool", "env") else "bold green"
        table.add_row(Text(speaker, style=style), Text(visible(shorten(text))))
    actions = sum(not step.is_summary for step in trajectory.steps)
    verdict = f"reward {trajectory.total_reward:g}, {trajectory.stop.value}, {actions} step{'s' * (actions != 1)}"
    return Panel(table, title=Text(visible(f"episode {trajectory.row_id}")), subtitle=verdict, title_align="left")


def shorten(text: str, limit: int = 800) -> str:
    """Drop blank lines and keep at most 20 lines and `limit` characters; say so if something was cut."""
    lines = [line for line in text.strip().splitlines() if line.strip()]
    short = "\n".join(lines[:20])[:limit]
    return short if short == "\n".join(lines) else f"{short} ... ({len(text)} characters)"
