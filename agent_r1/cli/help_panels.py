"""The order of the commands in `agent-r1 --help`: by what a user wants to do, in the order in which it is done."""

from __future__ import annotations

import typer

PANELS = {
    "Begin": ("init", "check", "doctor", "plan"),
    "Train": ("train", "sft", "collect"),
    "Look at a run": ("view", "show", "eval", "compare", "chat", "rescore", "replay"),
    "Use a model elsewhere": ("serve", "export", "push"),
    "Speed, data and search": ("bench", "data", "search"),
}


def arrange(app: typer.Typer) -> None:
    """Put every command into its panel. A command without one is an error."""
    panels = {name: panel for panel, names in PANELS.items() for name in names}
    order = list(panels)
    for group in app.registered_groups:
        group.rich_help_panel = panels[str(group.name)]
    for command in app.registered_commands:
        command.rich_help_panel = panels[str(command.name)]
    app.registered_commands.sort(key=lambda command: order.index(str(command.name)))
    app.registered_groups.sort(key=lambda group: order.index(str(group.name)))
