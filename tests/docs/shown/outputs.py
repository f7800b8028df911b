"""Blocks of text on pages: which are compared with what a command prints, and what the others are."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatch

from tests.docs.shown.blocks import Block, in_language, name

NUMBER = re.compile(r"\b[0-9a-f]{12}\b|[+-]?(?<![^\W_])\d+(?:\.\d+)?")


@dataclass(frozen=True)
class Output:
    """A block that shows lines of what a command prints. `numbers`: whether also its numbers are the same each time."""

    command: str
    numbers: bool = True
    depends: str = "$"  # a pattern of lines that depend on what was learned


CHECK = "agent-r1 check shop"
OUTPUTS = {  # page and the first words of the block -> the command
    ("docs/first-task.md", "demonstrations "): Output(CHECK),
    ("docs/doctor.md", "yellow "): Output(
        "agent-r1 doctor quickstart task.success_reward=2 rollout.temperature=0.2 --rows 8"
    ),
    ("docs/configuration.md", "error: rollout has"): Output("agent-r1 train quickstart rollout.group_sise=4"),
    ("docs/configuration.md", "error: rollout.group"): Output("agent-r1 train quickstart rollout.group_size=true"),
    ("docs/evaluation.md", "$ agent-r1 eval"): Output(
        "agent-r1 eval runs/rl eval.rows=2 eval.samples=4 eval.temperature=1.0", numbers=False
    ),
    ("docs/evaluation.md", "$ agent-r1 compare"): Output(
        "agent-r1 compare runs/rl runs/rl runs/rft --step first,last,last", numbers=False, depends=r"\w is better than"
    ),
}
EPISODE = "an episode, shortened"
NOT_PRINTED = {  # page and the first words of the block -> what it is; paths exist
    ("docs/errors.md", "$ agent-r1 "): "compared by tests/docs/test_errors_page.py",
    ("docs/algorithms/*.md", ""): "formulas; tests/docs/test_algorithm_pages.py checks the functions that compute them",
    ("docs/credit.md", "kl_coef"): "a formula",
    ("README.md", "TaskRow"): "a diagram",
    ("docs/concepts.md", ""): "diagrams",
    ("docs/credit.md", "Group"): "a diagram",
    ("docs/one-gpu.md", ""): "diagrams",
    ("docs/verl.md", "agent-r1 train (driver)"): "a diagram",
    ("README.md", "user"): EPISODE,
    ("agent_r1/recipes/*/README.md", "user"): EPISODE,
    ("agent_r1/recipes/*/README.md", "system"): EPISODE,
    ("agent_r1/recipes/paper_search/README.md", "### Question"): EPISODE,
    ("CONTRIBUTING.md", "agent_r1/"): "the tree, compared with the folders by tests/docs/shown/test_shown_outputs.py",
    ("docs/evaluation.md", "imitating"): "tests/cli/test_collect_command.py checks this line",
    ("docs/scaling.md", "error: rank 1"): "tests/cli/test_ranks.py checks this message",
    ("docs/tool-formats.md", "plan:"): "tests/build/test_tool_format.py checks this line",
}
TEXTS = in_language("text")


def matches(block: Block, key: tuple[str, str]) -> bool:
    return fnmatch(name(block.page), key[0]) and block.first_line.startswith(key[1])


def output_of(block: Block) -> Output | None:
    return next((output for key, output in OUTPUTS.items() if matches(block, key)), None)


def differing(shown: str, printed: str, output: Output) -> list[str]:
    """The lines of a block that the command does not print, in their order. `...` stands for anything."""
    rest = [normal(line, output) for line in printed.splitlines()]
    missing = []
    for line in shown.splitlines():
        wanted = normal(line, output)
        if not wanted or wanted.startswith("$ ") or wanted == "..." or re.match(output.depends, wanted):
            continue
        pattern = ".*".join(re.escape(part) for part in wanted.split("..."))
        found = next((index for index, each in enumerate(rest) if re.fullmatch(pattern, each)), None)
        if found is None:
            missing.append(wanted)
        else:
            del rest[: found + 1]
    return missing


def normal(line: str, output: Output) -> str:
    line = " ".join(line.split())
    return line if output.numbers else NUMBER.sub("#", line)
