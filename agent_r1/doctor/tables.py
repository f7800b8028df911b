"""Print the results of doctor and rescore."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agent_r1.doctor.finding import Finding, Level
from agent_r1.doctor.rescore import Rescored, mean_change

if TYPE_CHECKING:
    from agent_r1.doctor.replay_run import Comparison  # imports torch

STYLES = {Level.GREEN: "green", Level.YELLOW: "yellow", Level.RED: "bold red"}


def show_findings(findings: Sequence[Finding], console: Console) -> None:
    """One line per check; below it what to do, if anything."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for found in findings:
        style = STYLES[found.level]
        text = Text(found.evidence)
        if found.fix:
            text = Text.assemble(found.evidence, ("\n-> ", style), found.fix)
        table.add_row(Text(found.level.value, style=style), Text(found.name), text)
    console.print(table)
    count = Counter(found.level for found in findings)
    console.print(Text(", ".join(f"{count[level]} {level.value}" for level in Level)))


def show_rescored(found: Rescored, console: Console, *, reward: str, largest: int) -> None:
    table = Table(title=f"recorded -> {reward}", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in ("step", "episodes", "reward", "success", "swapped groups"):
        table.add_column(name, justify="right")
    groups = found.groups
    for step, changes in [*found.by_step().items(), ("all", found.changes)]:
        before, after, succeeded, succeeds = mean_change(changes)
        own = [group for group in groups if step in ("all", group.step)]
        swapped = sum(group.swapped > 0 for group in own)
        table.add_row(
            str(step),
            str(len(changes)),
            f"{before:.3f} -> {after:.3f}",
            f"{succeeded:.1%} -> {succeeds:.1%}",
            f"{swapped} of {len(own)}",
        )
    console.print(table)
    for line in _facts(found):
        console.print(Text(line), soft_wrap=True)
    if rows := found.largest(largest):
        console.print(Text("largest changes"))
        for each in rows:
            console.print(
                Text(f"  step {each.step:<5} {each.before:.3g} -> {each.after:.3g}  {each.trajectory_id}"),
                soft_wrap=True,
            )


def show_comparisons(found: Sequence[Comparison], console: Console) -> None:
    for each in found:
        verdict = "equal bit for bit" if each.is_equal else f"differ by up to {each.largest_difference:.3g}"
        console.print(Text(f"weights of step {each.step}: {verdict}"))
    if not found:
        console.print(Text("the run has kept no checkpoint of these steps to compare with", style="yellow"))


def _facts(found: Rescored) -> list[str]:
    groups, correlation = found.groups, found.correlation
    swapped, pairs = sum(group.swapped for group in groups), sum(group.pairs for group in groups)
    appears = sum(group.was_uniform and not group.is_uniform for group in groups)
    vanishes = sum(group.is_uniform and not group.was_uniform for group in groups)
    told = "one of the rewards is constant" if correlation is None else f"{correlation:.3f}"
    lines = [
        f"correlation     {told}",
        f"pairs swapped   {swapped} of {pairs} pairs of attempts at the same row",
        f"signal          {appears} groups gain one, {vanishes} lose it (all attempts earn the same)",
    ]
    if found.failed:
        lines.append(f"could not score {len(found.failed)} episodes, counted as 0: {found.failed[0].failed}")
    if found.unscored:
        lines.append(f"left out        {found.unscored} episodes that failed while they were played")
    return lines
