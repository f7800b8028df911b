"""Find the Python objects that a recipe names.

`task.rows` means `rows` in `task.py` beside the recipe's YAML; any other dotted name is imported as usual. A recipe
outside this package is a folder of files, imported as a package with a unique name: two recipes may both have a
`task.py`, and worker processes find pickled classes by the same name.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from agent_r1.config import RECIPES, recipe_file
from agent_r1.errors import AgentR1Error, ConfigError, did_you_mean
from agent_r1.guard import explain

_FOLDERS: dict[str, Path] = {}  # package name -> folder of a recipe outside this package


def resolve(name: str, *, recipe: str) -> Any:
    """Return the object called `module.attribute`, looked up in the recipe's folder first."""
    module, attribute = named_module(name, recipe=recipe), name.rpartition(".")[2]
    if not hasattr(module, attribute):
        public = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        raise ConfigError(f"{name!r}: {name.rpartition('.')[0]} has no {attribute!r}.{did_you_mean(attribute, public)}")
    return getattr(module, attribute)


def check_callable(setting: str, name: str, function: Any, *args: object, **kwargs: object) -> None:
    """Raise ConfigError if the object that a setting names cannot be called with these arguments."""
    try:
        if not callable(function):
            raise TypeError(f"it is {function!r:.80}, not a function")
        inspect.signature(function).bind(*args, **kwargs)
    except (TypeError, ValueError) as error:
        arguments = ", ".join([*("..." for _ in args), *(f"{key}=..." for key in kwargs)])
        call = f"{name.rpartition('.')[2]}({arguments})"
        raise ConfigError(f"{setting}={name!r} cannot be called as {call}: {error}") from error


def named_module(name: str, *, recipe: str) -> ModuleType:
    """Import the module of `module.attribute`."""
    module_name, dot, _ = name.rpartition(".")
    if not dot:
        raise ConfigError(f"{name!r} is not of the form module.name, for example task.reward")
    if (found := import_file(module_name, recipe=recipe)) is not None:
        return found
    with one_line_errors(f"importing {module_name} failed:"):
        try:
            return importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if not f"{module_name}.".startswith(f"{error.name}."):  # the module exists, but not what it imports
                raise
            raise ConfigError(
                f"cannot find {name!r}: no module {module_name!r} beside the recipe or elsewhere"
            ) from error


def import_recipe(recipe: str, names: Iterable[str]) -> None:
    """Import `task.py` and the recipe's files that these names refer to. No other file is run."""
    for module in dict.fromkeys(["task", *(name.rpartition(".")[0] for name in names)]):
        import_file(module, recipe=recipe)


def import_file(module_name: str, *, recipe: str) -> ModuleType | None:
    """Import a Python file of the recipe; None if it has no such file."""
    folder = recipe_folder(recipe)
    file = folder.joinpath(*module_name.split(".")).with_suffix(".py")
    if not file.is_file():
        return None
    package = make_importable(recipe)
    name, known = f"{package}.{module_name}", sys.modules.get(module_name)
    if known is not None and getattr(known, "__file__", None) == str(file):
        sys.modules.setdefault(name, known)  # a test has imported the file by its plain name
    with one_line_errors(f"importing {file} failed:"), _neighbours.importing(package):
        return importlib.import_module(name)


def make_importable(recipe: str) -> str:
    """Let this process import the recipe's modules, for example to unpickle its classes; return their package."""
    folder = recipe_folder(recipe)
    if folder.parent == RECIPES.resolve():
        return f"agent_r1.recipes.{folder.name}"
    digest = hashlib.sha256(str(folder).encode()).hexdigest()[:8]
    package = f"recipe_{re.sub('[^0-9a-zA-Z]', '_', folder.name)}_{digest}"
    if package not in sys.modules:
        spec = ModuleSpec(package, loader=None, is_package=True)
        spec.submodule_search_locations = [str(folder)]
        sys.modules[package] = module_from_spec(spec)
        _FOLDERS[package] = folder
    importlib.invalidate_caches()  # files may be younger than the import system's listing of the folder
    return package


def recipe_folder(recipe: str) -> Path:
    return recipe_file(recipe).resolve().parent


@contextmanager
def one_line_errors(what: str, kind: type[AgentR1Error] = ConfigError) -> Iterator[None]:
    """Turn what the recipe's code raises into one line that names the place."""
    try:
        yield
    except AgentR1Error:
        raise
    except (Exception, SystemExit) as error:  # recipes are user code
        if isinstance(error, SyntaxError) and error.filename and Path(error.filename).is_file():
            place, source = f"{error.filename}: line {error.lineno}", (error.text or "").strip()
            raise ConfigError(f"cannot import {place}: {error.msg}\n    {source}") from error
        raise kind(f"{what} {explain(error)}") from error


class _Neighbours(MetaPathFinder):
    """Lets `import helper` in a recipe find the `helper.py` beside it, as it would in a script.

    The hook is needed because a recipe is a package, in which Python itself offers only `from . import helper`. A plain
    name is an alias for the package's module, so a file is one module however it is imported.
    """

    def __init__(self) -> None:
        self._importing: str | None = None  # the package whose file is being imported
        self._aliases: set[str] = set()

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        top = fullname.partition(".")[0]
        packages = [package for package, folder in _FOLDERS.items() if _holds(folder, top)]
        if self._importing in packages:
            packages = [self._importing]
        if not packages:
            return None
        if len(packages) > 1:
            raise ImportError(f"{len(packages)} recipes in this process have {top!r}: write `from . import {top}`")
        self._aliases.add(fullname)
        return ModuleSpec(fullname, _Alias(f"{packages[0]}.{fullname}"))

    @contextmanager
    def importing(self, package: str) -> Iterator[None]:
        """Prefer this recipe's files. Plain names are forgotten afterwards, so that recipes do not mix."""
        before, self._importing = self._importing, package
        self._forget()
        try:
            yield
        finally:
            self._importing = before
            self._forget()

    def _forget(self) -> None:
        for alias in self._aliases:
            sys.modules.pop(alias, None)
        self._aliases.clear()


class _Alias(Loader):
    def __init__(self, name: str) -> None:
        self._name = name

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # importlib has just replaced it with the alias's


def _holds(folder: Path, name: str) -> bool:
    """Whether a plain name means a module in the folder; a name that also means another module keeps that meaning."""
    if not (folder / f"{name}.py").is_file() and not any((folder / name).glob("*.py")):
        return False
    found = PathFinder.find_spec(name)
    places = [] if found is None else [found.origin] if found.origin else found.submodule_search_locations or []
    is_inside = all(Path(str(place)).resolve().is_relative_to(folder) for place in places)
    return is_inside and name not in sys.stdlib_module_names


_neighbours = _Neighbours()
sys.meta_path.insert(0, _neighbours)
