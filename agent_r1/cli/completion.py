"""Shell completion of recipes, run directories and settings. Imports no torch: it runs at every press of Tab."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel

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
    return [f"{name}=" for name in _setting_names() if name.startswith(incomplete)]


def _folders(incomplete: str) -> list[Path]:
    typed = Path(incomplete)
    parent, prefix = (typed, "") if incomplete.endswith("/") else (typed.parent, typed.name)
    try:
        found = [path for path in parent.iterdir() if path.is_dir() and path.name.startswith(prefix)]
    except OSError:
        return []
    return sorted(path for path in found if prefix or not path.name.startswith((".", "_")))


def _setting_names() -> list[str]:
    names = []
    for key, field in RunConfig.model_fields.items():
        parts = _models(field.annotation)
        names += [f"{key}.{name}" for part in parts for name in part.model_fields] if parts else [key]
    return list(dict.fromkeys(names))


def _models(annotation: object) -> list[type[BaseModel]]:
    """The sections an annotation names: `Section`, `Section | None`, or a union by kind."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in getattr(annotation, "__args__", ()) for model in _models(part)]
