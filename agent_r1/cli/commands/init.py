"""`agent-r1 init`: write a small task of the user's own, which learns on a CPU as it is and is there to be edited."""

from __future__ import annotations

import shlex
from pathlib import Path

from rich.console import Console
from rich.text import Text

from agent_r1.cli.display import program
from agent_r1.errors import ConfigError
from agent_r1.text import first_names

TEMPLATE = Path(__file__).parents[2] / "templates" / "init"
FILES = ("task.py", "base.yaml", "test_task.py", "README.md")


def write_task(directory: Path, console: Console) -> None:
    """Copy the template; {task} in its README and settings becomes the directory as typed in a shell."""
    present = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []
    if present or directory.is_file():
        what = f"holds {first_names(present)}" if present else "is a file"
        raise ConfigError(f"{directory} {what}: name a directory that is new or empty")
    directory.mkdir(parents=True, exist_ok=True)
    typed = shlex.quote(str(directory))
    for name in FILES:
        text = (TEMPLATE / name).read_text(encoding="utf-8")
        (directory / name).write_text(text.replace("{task}", typed), encoding="utf-8")
    lines = [
        f"wrote {', '.join(FILES)} to {directory}; next:",
        f"  {program()} check {typed}  # play it without a model: rewards, calls, limits",
        f"  {program()} train {typed}  # a few minutes on a CPU",
        f"  {program()} chat runs/NAME  # talk to the trained agent",
    ]
    console.print(Text("\n".join(lines)), soft_wrap=True)
