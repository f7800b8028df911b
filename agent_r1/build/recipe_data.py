"""The data of a recipe: its `data.py` has a function `prepare(directory, report)` that fetches and builds them.

One with a parameter `source` can make them of a folder that the user has, instead of fetching.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

from agent_r1.build.resolve import recipe_folder, resolve
from agent_r1.data.downloads import data_dir
from agent_r1.errors import ConfigError


def prepare_data(
    recipe: str, directory: Path | None, report: Callable[[str], None], source: Path | None = None
) -> Path:
    """Where they are then. Without a directory, where the recipe looks for them by itself."""
    if not (recipe_folder(recipe) / "data.py").is_file():
        raise ConfigError(f"{recipe} has no data to fetch: there is no data.py in {recipe_folder(recipe)}")
    chosen = data_dir(resolve("data.FOLDER", recipe=recipe)) if directory is None else directory
    prepare = resolve("data.prepare", recipe=recipe)
    if source is None:
        prepare(chosen, report)
    elif "source" in inspect.signature(prepare).parameters:
        prepare(chosen, report, source=source)
    else:
        raise ConfigError(f"--from {source}: the data of {recipe} are read as they are, with data.path={source}")
    return chosen
