"""Names in a recipe -> Python objects.

`task.rows` means `rows` in `task.py` beside the recipe's YAML; anything else is an importable dotted path. A recipe
outside the package is a plain folder: its files are imported under a name of their own.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from agent_r1.config import RECIPES, recipe_file
from agent_r1.errors import ConfigError, did_you_mean


def resolve(name: str, *, recipe: str) -> Any:
    """The object called `module.attribute`, looked up in the recipe's folder first."""
    module_name, dot, attribute = name.rpartition(".")
    if not dot:
        raise ConfigError(f"{name!r} is not of the form module.name, for example task.reward")
    module = _recipe_module(module_name, recipe_file(recipe).parent) or _importable(module_name, name)
    if not hasattr(module, attribute):
        public = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        raise ConfigError(f"{name!r}: {module.__name__} has no {attribute!r}.{did_you_mean(attribute, public)}")
    return getattr(module, attribute)


def is_recipe_name(name: str, *, recipe: str) -> bool:
    """Whether `name` points into the recipe's folder or at an importable module, rather than being a plain name."""
    module_name = name.rpartition(".")[0]
    return bool(module_name) and "/" not in name and not name.endswith((".jsonl", ".parquet"))


def recipe_files(recipe: str) -> list[Path]:
    """The files a recipe's behaviour depends on; a cached warm start is stale when one of them changes."""
    folder = recipe_file(recipe).parent
    return sorted([*folder.glob("*.py"), *folder.glob("*.jinja")])


def _recipe_module(module_name: str, folder: Path) -> ModuleType | None:
    path = folder.joinpath(*module_name.split(".")).with_suffix(".py")
    if not path.is_file():
        return None
    if folder.parent == RECIPES:
        return importlib.import_module(f"agent_r1.recipes.{folder.name}.{module_name}")
    return _import_file(path, module_name, folder)


def _import_file(path: Path, module_name: str, folder: Path) -> ModuleType:
    qualified = f"agent_r1_recipe_{abs(hash(folder.resolve()))}_{module_name}"
    if qualified in sys.modules:
        return sys.modules[qualified]
    spec = importlib.util.spec_from_file_location(qualified, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[qualified] = module
    if str(folder) not in sys.path:
        sys.path.append(str(folder))  # so that the recipe's files can import each other
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[qualified]
        raise
    return module


def _importable(module_name: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and not module_name.startswith(error.name):
            raise
        raise ConfigError(
            f"cannot find {name!r}: there is no {module_name.replace('.', '/')}.py beside the recipe and no "
            f"importable module {module_name!r}"
        ) from error
