"""Arguments and options that several commands share, and their shell completion.

Imports no torch: completion runs at every press of Tab.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel
from typer import Argument, Option

from agent_r1.config import RunConfig, bundled_presets, bundled_recipes


def complete_recipe(incomplete: str) -> list[str]:
    """Bundled recipes and presets, and folders on the way to a base.yaml."""
    names = [name for recipe in bundled_recipes() for name in (recipe, *bundled_presets(recipe))]
    folders = [str(path) if (path / "base.yaml").is_file() else f"{path}/" for path in _folders(incomplete)]
    return [name for name in names if name.startswith(incomplete)] + folders


def complete_run(incomplete: str) -> list[str]:
    """Run directories, newest first; those under runs/ also without that prefix typed."""
    found = _folders(incomplete) + ([] if incomplete else _folders("runs/"))
    runs = [path for path in found if (path / "metrics.jsonl").is_file()]
    runs.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    return [str(path) for path in runs] + [f"{path}/" for path in found if path not in runs]


def complete_setting(incomplete: str) -> list[str]:
    """`section.key=` for every setting with a section, `key=` for the others."""
    names = []
    for key, field in RunConfig.model_fields.items():
        parts = _models(field.annotation)
        names += [f"{key}.{name}" for part in parts for name in part.model_fields] if parts else [key]
    return [f"{name}=" for name in dict.fromkeys(names) if name.startswith(incomplete)]


def _folders(incomplete: str) -> list[Path]:
    typed = Path(incomplete)
    parent, prefix = (typed, "") if incomplete.endswith("/") else (typed.parent, typed.name)
    try:
        found = [path for path in parent.iterdir() if path.is_dir() and path.name.startswith(prefix)]
    except OSError:
        return []
    return sorted(path for path in found if prefix or not path.name.startswith((".", "_")))


def _models(annotation: object) -> list[type[BaseModel]]:
    """The sections an annotation names: `Section`, `Section | None`, or a union by kind."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in getattr(annotation, "__args__", ()) for model in _models(part)]


RECIPE_HELP = f"A bundled recipe ({', '.join(bundled_recipes())}), a YAML file, or a folder with base.yaml."
RecipeArg = Annotated[str, Argument(help=RECIPE_HELP, autocompletion=complete_recipe)]
OVERRIDES_HELP = "Settings to change, as section.key=value."
Overrides = Annotated[list[str] | None, Argument(help=OVERRIDES_HELP, autocompletion=complete_setting)]
RunArg = Annotated[Path, Argument(help="A run directory.", autocompletion=complete_run)]
NewRun = Annotated[Path | None, Option("--run", help="Run directory; by default a new one under runs/.")]
DryRun = Annotated[bool, Option("--dry-run", help="Print the resolved settings and the plan, then stop.")]
NewDirectory = Annotated[Path, Argument(help="The directory to write; it must be new or empty.")]
Port = Annotated[int, Option(min=0, max=65535, help="Port to listen on; 0 for a free one.")]
AsJSON = Annotated[bool, Option("--json", help="Print JSON.")]
KEY_HELP = "The key that clients send; required to listen beyond localhost."
ApiKey = Annotated[str | None, Option("--api-key", envvar="AGENT_R1_API_KEY", help=KEY_HELP, show_envvar=True)]
