"""Names in a recipe -> Python objects and files.

`task.rows` means `rows` in `task.py` beside the recipe's YAML; anything else is an importable dotted path. A recipe
outside the package is a plain folder. It is imported as a package of its own, in which `import env` means the `env.py`
beside the file that says so. Hence each file is one module however it is reached, two recipes can both have a
`task.py`, and a recipe's file never hides an installed module from anything outside the recipe.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import importlib
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from agent_r1.build.cache import cache_root
from agent_r1.config import RECIPES, RunConfig, recipe_file
from agent_r1.errors import AgentR1Error, ConfigError, did_you_mean
from agent_r1.guard import describe
from agent_r1.places import anchored
from agent_r1.runs.reader import is_run
from agent_r1.text import sanitize

PACKAGE = Path(__file__).resolve().parents[1]
TEMPLATES = PACKAGE / "templates"
TOOLS = PACKAGE / "tools"

_NO_PART = re.compile(r"test_|__|(conftest|setup)$")  # Python files in a recipe's folder that are not part of it
_STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib")).resolve()
_FOLDERS: dict[str, Path] = {}  # package of a recipe outside of agent_r1 -> its folder
# What code reads. Not what people read, nor what a program left beside it (nohup.out, logs, pictures).
_READ = (".py", ".jinja", ".j2", ".json", ".jsonl", ".yaml", ".yml", ".toml", ".txt", ".csv", ".tsv", ".parquet", ".gz")
_KEEPS_DATA = re.compile(r"^(FOLDER\b.*=|from .* import .*\bFOLDER\b)", re.MULTILINE)


def resolve(name: str, *, recipe: str) -> Any:
    """The object called `module.attribute`, looked up in the recipe's folder first."""
    module, attribute = _named_module(name, recipe), name.rpartition(".")[2]
    if not hasattr(module, attribute):
        public = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        raise ConfigError(f"{name!r}: {name.rpartition('.')[0]} has no {attribute!r}.{did_you_mean(attribute, public)}")
    return getattr(module, attribute)


def import_recipe(recipe: str, names: Iterable[str]) -> None:
    """Import the recipe's files that these names refer to, and those that register something by name. No other file is
    run, because users keep scripts next to their recipes."""
    folder = recipe_folder(recipe)
    named = [name.rpartition(".")[0] for name in names]
    for module in dict.fromkeys([*named, *(path.stem for path in sorted(folder.glob("*.py")) if _registers(path))]):
        _recipe_module(module, folder)


def make_importable(recipe: str) -> None:
    """Let another process import the recipe's modules by the same names. Imports none of them itself."""
    _package(recipe_folder(recipe))


def recipe_path(name: str, *, recipe: str) -> Path:
    """A file named in a recipe: beside its YAML, anywhere by path, or a chat template of ours by its bare name."""
    beside, path = recipe_folder(recipe) / name, anchored(name)
    bundled = {template.stem: template for template in TEMPLATES.glob("*.jinja")}
    found = next((place for place in (beside, path, bundled.get(name)) if place is not None and place.is_file()), None)
    if found is None:
        raise ConfigError(
            f"file {name!r} not found in {beside.parent} or at {path}, and it is not a bundled chat template "
            f"({', '.join(sorted(bundled))})"
        )
    return found


def recipe_files(recipe: str) -> list[Path]:
    """The files a recipe's behaviour may depend on; a cached warm start is stale when one of them changes. Its own,
    and all of our recipes and tools, because recipes borrow from each other. Without the descriptions of runs: of
    their settings, those that matter are known one by one."""
    own = recipe_file(recipe).resolve()
    # Each folder by itself, so that the order does not depend on where the recipe lies.
    found = [path for folder in (own.parent, RECIPES.resolve(), TOOLS.resolve()) for path in sorted(_files_in(folder))]
    return [path for path in dict.fromkeys(found) if path != own and not _is_description(path)]


def borrowed_files(names: Iterable[str], *, recipe: str) -> list[Path]:
    """The Python files that dotted names of a config lead to outside the recipe, the package and what is installed.

    Of the module that a name means and of the one that defines the object: all of its top-level package, or, where it
    is in none, all that lie beside it. Not what these import from further away, nor data that they read."""
    found: list[Path] = []
    for name in names:
        definer = getattr(resolve(name, recipe=recipe), "__module__", None)
        for module in (_named_module(name, recipe), sys.modules.get(str(definer))):
            file = Path(getattr(module, "__file__", None) or __file__).resolve()  # one without a file is no user's
            if module is None or _is_installed(file) or file.is_relative_to(recipe_folder(recipe)):
                continue
            folders = getattr(sys.modules.get(module.__name__.partition(".")[0]), "__path__", None)
            if folders is None:
                found += sorted(path for path in file.parent.glob("*.py") if path.is_file())
            for folder in folders or ():
                found += sorted(path for path in _files_in(Path(folder)) if path.suffix == ".py")
    return list(dict.fromkeys(found))


def data_name(recipe: str) -> str | None:
    """Under which the recipe's data are kept, if it has any: the `FOLDER` of its `data.py`. Another file of that name
    is not imported."""
    file = recipe_folder(recipe) / "data.py"
    if not file.is_file() or not _KEEPS_DATA.search(file.read_text(encoding="utf-8")):
        return None
    name: str | None = getattr(_recipe_module("data", file.parent), "FOLDER", None)
    return name


def recipe_folder(recipe: str) -> Path:
    return recipe_file(recipe).resolve().parent


def _files_in(folder: Path, above: frozenset[Path] = frozenset()) -> Iterator[Path]:
    """What code may read in it, however deep, but nothing hidden and nothing that was left there. Links are followed,
    though not in circles; what may not be looked into has no part in the recipe."""
    above |= {folder.resolve()}
    try:
        inside = list(folder.iterdir())
    except OSError:
        return
    for path in inside:
        if path.suffix in _READ and path.is_file() and not path.name.startswith((".", "README", "LICENSE")):
            yield path
        elif path.is_dir() and path.resolve() not in above and not _is_left(path):
            yield from _files_in(path, above)


def _is_left(folder: Path) -> bool:
    """By a run, by our cache, or by Python."""
    if folder.name.startswith((".", "__pycache__")) or folder.resolve() == cache_root().resolve():
        return True
    try:
        return (folder / "pyvenv.cfg").is_file() or is_run(folder)
    except OSError:
        return True


def _is_description(path: Path) -> bool:
    """Whether it is YAML that describes a run, as `base.yaml` and presets do, and not something that a task reads."""
    if path.suffix not in (".yaml", ".yml"):
        return False
    try:
        described = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return False
    if not isinstance(described, dict) or not described.keys() <= {"base", *RunConfig.model_fields}:
        return False
    return "base" in described or {"task", "model"} <= described.keys()


def _is_installed(file: Path) -> bool:
    """By pip or with Python, or this package: nothing that a user edits between two runs."""
    if file.is_relative_to(PACKAGE) or file.is_relative_to(_STANDARD_LIBRARY):
        return True
    return not {"site-packages", "dist-packages"}.isdisjoint(file.parts)


def _registers(path: Path) -> bool:
    """Whether a file registers an env, flow, tool, algorithm or call format. The file is read, not run."""
    if not path.stem.isidentifier() or _NO_PART.match(path.stem):
        return False
    try:
        source = path.read_bytes()
        nodes = list(ast.walk(ast.parse(source))) if b"agent_r1" in source else []
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):  # the last two: nested too deeply
        return False
    return any(map(_is_registration, nodes))


def _is_registration(node: ast.AST) -> bool:
    match node:
        case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
            decorators = [item.func if isinstance(item, ast.Call) else item for item in node.decorator_list]
            return any(isinstance(item, ast.Attribute) and item.attr == "register" for item in decorators)
        case ast.Subscript(value=ast.Name(id=name) | ast.Attribute(attr=name), ctx=ast.Store()):
            return name == "ALGORITHMS"
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            return name == "register_format"
    return False


def _named_module(name: str, recipe: str) -> ModuleType:
    module_name, dot, _ = name.rpartition(".")
    if not dot:
        raise ConfigError(f"{name!r} is not of the form module.name, for example task.reward")
    return _recipe_module(module_name, recipe_folder(recipe)) or _importable(module_name, name)


def _recipe_module(module_name: str, folder: Path) -> ModuleType | None:
    file = folder.joinpath(*module_name.split(".")).with_suffix(".py")
    if not file.is_file():
        return None
    try:
        return importlib.import_module(f"{_package(folder)}.{module_name}")
    except AgentR1Error:
        raise
    except (Exception, SystemExit) as error:  # a recipe is other people's code: it may raise anything
        raise _import_failed(str(file), error, folder) from error


def _package(folder: Path) -> str:
    if folder.parent == RECIPES.resolve():
        return f"agent_r1.recipes.{folder.name}"
    digest = hashlib.sha256(str(folder).encode()).hexdigest()[:8]  # unlike hash(), the same in every process
    package = f"recipe_{re.sub('[^0-9a-zA-Z]', '_', folder.name)}_{digest}"
    _FOLDERS[package] = folder
    importlib.invalidate_caches()  # the folder may be younger than what the import system remembers of it
    return package


def _importable(module_name: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):  # the module is there, but not what it imports
            raise _import_failed(module_name, error) from error
        raise ConfigError(
            f"cannot find {name!r}: there is no {module_name.replace('.', '/')}.py beside the recipe and no "
            f"importable module {module_name!r}"
        ) from error
    except AgentR1Error:
        raise
    except (Exception, SystemExit) as error:
        raise _import_failed(module_name, error) from error


def _import_failed(what: str, error: BaseException, folder: Path | None = None) -> ConfigError:
    """In place of a traceback, most of which would be ours and the import system's."""
    if isinstance(error, SyntaxError) and isinstance(error.filename, str) and Path(error.filename).is_file():
        line = "" if not error.lineno else f"line {error.lineno}: "
        source = "" if not error.text else f"\n    {error.text.strip()}"
        return ConfigError(f"cannot import {error.filename}: {line}{error.msg}{source}")
    place = _raised_at(error, folder)
    if isinstance(error, ModuleNotFoundError):
        return ConfigError(f"importing {what} failed: {sanitize(error.msg)} (imported in {place})")
    return ConfigError(f"importing {what} failed: {describe(error)} ({place})")


def _raised_at(error: BaseException, folder: Path | None) -> str:
    """`file:line`; where that is not in the recipe, also the line of the recipe that led there."""
    machinery = (__file__, importlib.__file__)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename not in machinery]
    places = [(Path(frame.filename), frame.lineno) for frame in frames if not frame.filename.startswith("<frozen ")]
    if not places:
        return "before its first line"
    own = [(file, line) for file, line in places if folder is not None and file.is_relative_to(folder)]
    led = f"{own[-1][0].relative_to(folder)}:{own[-1][1]}" if folder is not None and own else ""
    if led and own[-1] == places[-1]:
        return led
    return f"{places[-1][0]}:{places[-1][1]}" + (led and f", from {led}")


class _RecipeFinder(MetaPathFinder):
    """Finds the packages made of recipe folders, and their files."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package = fullname.partition(".")[0]
        if package not in _FOLDERS:
            return None
        if fullname == package:
            spec = ModuleSpec(package, loader=None, is_package=True)
            spec.submodule_search_locations = [str(_FOLDERS[package])]
            return spec
        found = PathFinder.find_spec(fullname, path)
        if found is not None and isinstance(found.loader, SourceFileLoader):
            found.loader = _RecipeLoader(fullname, found.loader.path)
        return found


class _RecipeLoader(SourceFileLoader):
    """Runs a recipe's file with an `import` that looks in the recipe first; or not at all, when it has already run."""

    def exec_module(self, module: ModuleType) -> None:
        known = _module_of(Path(self.path), besides=module)
        if known is not None:
            sys.modules[module.__name__] = known  # the import system hands out what stands here
            return
        package = module.__name__.partition(".")[0]
        vars(module)["__builtins__"] = {**vars(builtins), "__import__": partial(_import_inside, package)}
        super().exec_module(module)


def _module_of(path: Path, *, besides: ModuleType) -> ModuleType | None:
    """The module that this file already is: somebody may have imported it from their own path, as tests do."""
    for module in list(sys.modules.values()):
        file = vars(module).get("__file__") if isinstance(module, ModuleType) and module is not besides else None
        if isinstance(file, str) and Path(file).name == path.name and Path(file).resolve() == path:
            return module
    return None


def _import_inside(
    package: str,
    name: str,
    globals: Mapping[str, object] | None = None,
    locals: Mapping[str, object] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> Any:
    """`__import__` as the files of a recipe see it: a plain name that is a file of the recipe means that file."""
    top = name.partition(".")[0]
    if level > 0 or not _holds(_FOLDERS[package], top):
        return builtins.__import__(name, globals, locals, fromlist, level)
    found = builtins.__import__(f"{package}.{name}", globals, locals, fromlist)
    return found if fromlist else getattr(found, top)  # `import a.b` binds a


def _holds(folder: Path, name: str) -> bool:
    return (folder / f"{name}.py").is_file() or any((folder / name).glob("*.py"))


sys.meta_path.insert(0, _RecipeFinder())  # before the finder of plain paths, which would find the same files
