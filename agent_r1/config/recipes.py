"""Find the YAML file of a recipe by its name, folder or path."""

from __future__ import annotations

import re
from pathlib import Path

from agent_r1.errors import ConfigError, nearest
from agent_r1.places import anchored

RECIPES = Path(__file__).parents[1] / "recipes"
PYTHON = "(python)"  # the empty recipe of runs that were described in Python; no file or folder is called so
_PYTHON_FILE = RECIPES.parent / "api" / "python" / "base.yaml"


def split_presets(recipe: str) -> tuple[str, list[str]]:
    """Split `alfworld/hints+gigpo` into the first preset and the names of those on top of it."""
    folder, slash, name = recipe.rpartition("/")
    first, *others = [name] if anchored(recipe).exists() else name.split("+")  # a file may be called a+b.yaml
    return f"{folder}{slash}{first}", others


def recipe_file(recipe: str) -> Path:
    """Return the YAML file of a recipe; with several presets, the file of the first."""
    if recipe == PYTHON:
        return _PYTHON_FILE
    recipe, _ = split_presets(recipe)
    name, _, preset = recipe.partition("/")
    bundled = RECIPES / name / f"{preset or 'base'}.yaml"
    if re.fullmatch(r"\w+(/\w+)?", recipe) and bundled.is_file():
        return bundled
    path = anchored(recipe)
    file = path / "base.yaml" if path.is_dir() else path
    if file.is_file():
        return file
    what = f"file {file}" if path.is_dir() else f"recipe or file {recipe!r}"
    ours = bundled_recipes()
    near = nearest(recipe, [*ours, *(preset for name in ours for preset in bundled_presets(name))])
    hint = f" Did you mean {near!r}?" if near else ""
    raise ConfigError(
        f"there is no {what}.{hint} Give a YAML file, a folder with base.yaml, or a bundled recipe: {', '.join(ours)}"
    )


def recipe_name(recipe: str) -> str:
    """Return a short name for files: the bundled name, or the folder of the YAML file."""
    return recipe_file(recipe).parent.name


def bundled_recipes() -> list[str]:
    return sorted(path.parent.name for path in RECIPES.glob("*/base.yaml"))


def bundled_presets(recipe: str) -> list[str]:
    """Return all `NAME/PRESET` of the recipe that `recipe` starts with."""
    name = recipe.partition("/")[0]
    found = (RECIPES / name).glob("*.yaml") if name in bundled_recipes() else []
    return sorted(f"{name}/{path.stem}" for path in found if path.stem != "base")
