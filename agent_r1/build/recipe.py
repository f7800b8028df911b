"""The files of a recipe: where they are, which of them its behaviour depends on, and its data."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from agent_r1 import __version__
from agent_r1.build.models.source import cache_root
from agent_r1.build.resolve import import_file, named_module, recipe_folder, resolve
from agent_r1.config import RECIPES, RunConfig, recipe_file
from agent_r1.data.downloads import data_dir
from agent_r1.errors import ConfigError
from agent_r1.guard import is_library
from agent_r1.places import anchored
from agent_r1.runs.reader import is_run

PACKAGE = Path(__file__).resolve().parents[1]
TEMPLATES = PACKAGE / "templates"
TOOLS = PACKAGE / "tools"

READ_WHOLE = 16 * 2**20  # bytes; larger files are identified by size and time
CODE = (".py", ".jinja", ".j2")
# What code reads, as opposed to documentation, logs and pictures.
_READ = (*CODE, ".json", ".jsonl", ".yaml", ".yml", ".toml", ".txt", ".csv", ".tsv", ".parquet", ".gz")


def recipe_path(name: str, *, recipe: str) -> Path:
    """Find a file named in a recipe: beside its YAML, anywhere by path, or a bundled chat template by its bare name."""
    beside, path = recipe_folder(recipe) / name, anchored(name)
    bundled = {template.stem: template for template in TEMPLATES.glob("*.jinja")}
    found = next((place for place in (beside, path, bundled.get(name)) if place is not None and place.is_file()), None)
    if found is None:
        raise ConfigError(
            f"file {name!r} is not in {beside.parent}, nor a bundled template ({', '.join(sorted(bundled))})"
        )
    return found


def data_name(recipe: str) -> str | None:
    """Return the name under which the recipe's data are kept: `FOLDER` in its `data.py`.

    A `data.py` without it is not run: it may be a script of the user.
    """
    file = recipe_folder(recipe) / "data.py"
    if not file.is_file() or b"FOLDER" not in file.read_bytes():
        return None
    name: str | None = getattr(import_file("data", recipe=recipe), "FOLDER", None)
    return name


def prepare_data(
    recipe: str,
    directory: Path | None,
    report: Callable[[str], None],
    source: Path | None = None,
    **of_index: str | None,
) -> Path:
    """Call the recipe's `data.prepare` and return the data directory, by default the one the recipe reads.

    `of_index`: options of the index that a recipe builds; None is not passed on.
    """
    if not (recipe_folder(recipe) / "data.py").is_file():
        raise ConfigError(f"{recipe} has no data to fetch: there is no data.py in {recipe_folder(recipe)}")
    chosen = data_dir(resolve("data.FOLDER", recipe=recipe)) if directory is None else directory
    prepare = resolve("data.prepare", recipe=recipe)
    given = {key: value for key, value in {"source": source, **of_index}.items() if value is not None}
    for key in given:
        if key in inspect.signature(prepare).parameters:
            continue
        if key == "source":
            raise ConfigError(f"--from {source}: {recipe} reads its data unchanged; use data.path={source}")
        raise ConfigError(f"--{key.replace('_', '-')} {given[key]}: {recipe} builds no index. Remove the option")
    prepare(chosen, report, **given)
    return chosen


def code_digest(names: Iterable[str], *, recipe: str, with_data: bool = False) -> str:
    """Hash the code that these names depend on, and with `with_data` the data files beside it."""
    files = [*recipe_files(recipe), *borrowed_files(names, recipe=recipe)]
    return digest(*((path.name, _content(path)) for path in files if with_data or path.suffix in CODE))


def folder_digest(place: Path) -> str:
    """Hash the names, sizes and times of a file or of all files in a folder."""
    files = [place] if place.is_file() else sorted(path for path in place.rglob("*") if path.is_file())
    return digest(str(place.resolve()), [_signature(path) for path in files])


def digest(*parts: object) -> str:
    text = json.dumps([__version__, *parts], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _content(path: Path) -> object:
    """Identify small files by content, so that a copy of a recipe has the same digest."""
    try:
        small = path.stat().st_size <= READ_WHOLE
        return hashlib.sha256(path.read_bytes()).hexdigest() if small else _signature(path)
    except OSError:  # unreadable files cannot matter
        return None


def _signature(path: Path) -> tuple[str, int, int]:
    return path.name, path.stat().st_size, path.stat().st_mtime_ns


def recipe_files(recipe: str) -> list[Path]:
    """List the files that a recipe's behaviour may depend on.

    These are its own files and all bundled recipes and tools, because recipes borrow from each other. YAML files that
    describe runs are left out: their relevant settings are hashed one by one.
    """
    own = recipe_file(recipe).resolve()
    found = [path for folder in (own.parent, RECIPES.resolve(), TOOLS.resolve()) for path in _walk(folder)]
    return [path for path in dict.fromkeys(found) if path != own and not _describes_run(path)]


def borrowed_files(names: Iterable[str], *, recipe: str) -> list[Path]:
    """List the Python files that dotted names lead to outside the recipe, this package and installed libraries.

    For the module of each name and the one that defines the object, these are all files of its top-level package, or of
    its folder if it is in no package. Imports of these files are not followed.
    """
    found: list[Path] = []
    for name in names:
        definer = sys.modules.get(str(getattr(resolve(name, recipe=recipe), "__module__", None)))
        for module in (named_module(name, recipe=recipe), definer):
            file = Path(getattr(module, "__file__", None) or __file__).resolve()
            ours = any(file.is_relative_to(folder) for folder in (PACKAGE, recipe_folder(recipe)))
            if module is None or ours or is_library(file):
                continue
            top = sys.modules.get(module.__name__.partition(".")[0])
            found += [path for folder in getattr(top, "__path__", ()) for path in _walk(Path(folder))]
            if not hasattr(top, "__path__"):
                found += sorted(file.parent.glob("*.py"))
    return [path for path in dict.fromkeys(found) if path.suffix == ".py" and path.is_file()]


def _walk(folder: Path) -> Iterator[Path]:
    """Yield the files that code may read, in a fixed order. Follows links, but not in circles."""
    seen = set()
    for root, folders, files in os.walk(folder, followlinks=True):
        if (place := Path(root).resolve()) in seen:
            folders.clear()
            continue
        seen.add(place)
        folders[:] = sorted(name for name in folders if not _is_output(Path(root, name)))
        for name in sorted(files):
            if name.endswith(_READ) and not name.startswith((".", "README", "LICENSE")) and Path(root, name).is_file():
                yield Path(root, name)  # a plain file: reading a pipe would wait for ever


def _is_output(folder: Path) -> bool:
    """Whether a run, the cache, Python or git left the folder there, or code cannot read it."""
    if folder.name.startswith((".", "__pycache__")) or folder.resolve() == cache_root().resolve():
        return True
    try:
        return (folder / "pyvenv.cfg").is_file() or is_run(folder)
    except OSError:  # a folder that may not be read
        return True


def _describes_run(path: Path) -> bool:
    """Whether it is YAML like `base.yaml` or a preset, and not something that a task reads."""
    if path.suffix not in (".yaml", ".yml"):
        return False
    try:
        sections = set(re.findall(r"^(\w+):", path.read_text(encoding="utf-8"), re.MULTILINE))
    except (OSError, ValueError):
        return False
    return sections <= {"base", *RunConfig.model_fields} and ("base" in sections or {"task", "model"} <= sections)
