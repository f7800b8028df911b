"""`agent-r1 init`: write a small task of the user's own, which learns on a CPU as it is and is there to be edited."""

from __future__ import annotations

import shlex
from pathlib import Path

from rich.console import Console
from rich.text import Text

from agent_r1.cli.display import program
from agent_r1.errors import ConfigError

TEMPLATE = Path(__file__).parents[2] / "templates" / "init"
FILES = ("task.py", "base.yaml", "test_task.py", "README.md")


def write_task(directory: Path, console: Console) -> None:
    """Copy the template; {task} in its README and settings becomes the directory as typed in a shell."""
    if directory.is_file():
        raise ConfigError(f"{directory} is a file: name a directory that is new or empty")
    if directory.is_dir() and (present := sorted(path.name for path in directory.iterdir())):
        more = f" and {len(present) - 5} more" if len(present) > 5 else ""
        raise ConfigError(
            f"{directory} is not empty: it holds {', '.join(present[:5])}{more}. Name a directory that is new or empty"
        )
    directory.mkdir(parents=True, exist_ok=True)
    typed = shlex.quote(str(directory))
    for name in FILES:
        text = (TEMPLATE / name).read_text(encoding="utf-8")
        (directory / name).write_text(text.replace("{task}", typed), encoding="utf-8")
    commands = {
        f"check {typed}": "play it without a model: rewards, calls, limits",
        f"train {typed}": "a few minutes on a CPU",
        "chat runs/NAME": "talk to the trained agent",
    }
    width = max(map(len, commands))
    lines = [f"  {program()} {words.ljust(width)}  # {what}" for words, what in commands.items()]
    console.print(Text("\n".join([f"wrote {', '.join(FILES)} to {directory}; next:", *lines])), soft_wrap=True)
