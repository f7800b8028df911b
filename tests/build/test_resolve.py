"""Names in a recipe: one file is one module, recipes do not mix, and unknown names are clear errors."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from agent_r1.build.recipe import TEMPLATES, borrowed_files, data_name, recipe_files, recipe_path
from agent_r1.build.resolve import import_recipe, resolve
from agent_r1.config import RECIPES
from agent_r1.envs.base import env_class
from agent_r1.errors import ConfigError, DataError

ENV = """
from agent_r1 import AgentEnv

@AgentEnv.register("{name}")
class Guess(AgentEnv):
    async def reset(self, row): ...
    async def step(self, action): ...
"""


def recipe(folder: Path, **files: str) -> str:
    """Write a recipe folder with the given Python files and return its name."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "base.yaml").write_text("task: {}\n", encoding="utf-8")
    for stem, text in files.items():
        (folder / f"{stem}.py").write_text(text, encoding="utf-8")
    return str(folder / "base.yaml")


@pytest.mark.parametrize(
    "reward",
    [
        "from env import Guess",
        "from .env import Guess",
        "import env\nGuess = env.Guess",
        "import env as e\nGuess = e.Guess",
        "from env import *",
    ],
)
@pytest.mark.parametrize("first", ["env", "reward"])
def test_a_file_that_another_imports_is_the_one_that_the_recipe_names(tmp_path: Path, reward: str, first: str) -> None:
    name = recipe(tmp_path / "mine", env=ENV.format(name=f"guess-{tmp_path.name}"), reward=reward)
    resolve(f"{first}.Guess", recipe=name)
    assert resolve("reward.Guess", recipe=name) is resolve("env.Guess", recipe=name)


def test_an_import_inside_a_function_finds_the_neighbour_too(tmp_path: Path) -> None:
    imports = "import words.animals\n    from words import plants"
    name = recipe(tmp_path / "late", task=f"def late():\n    {imports}\n    return words.animals.CAT, plants.OAK")
    recipe(tmp_path / "late" / "words", animals="CAT = 'cat'", plants="OAK = 'oak'")
    assert resolve("task.late", recipe=name)() == ("cat", "oak")
    assert resolve("words.animals.CAT", recipe=name) == "cat"


def test_two_recipes_with_the_same_file_names_keep_apart(tmp_path: Path) -> None:
    unique = f"env_{uuid.uuid4().hex[:8]}"
    task = f"import {unique}\nHIGH = {unique}.HIGH\ndef late():\n    from . import {unique} as e\n    return e.HIGH\n"
    task += f"def ambiguous():\n    import {unique}\n"
    names = [recipe(tmp_path / str(high), **{unique: f"HIGH = {high}", "task": task}) for high in (10, 20)]
    lates = [resolve("task.late", recipe=name) for name in names]
    assert [resolve("task.HIGH", recipe=name) for name in names] == [late() for late in lates] == [10, 20]
    with pytest.raises(ImportError, match=f"from . import {unique}"):
        resolve("task.ambiguous", recipe=names[0])()
    assert unique not in sys.modules


def test_a_recipe_file_hides_no_installed_module(tmp_path: Path) -> None:
    files = {"pydantic": "MINE = True", "task": "import pydantic as installed\nfrom .pydantic import MINE"}
    name = recipe(tmp_path / "hiding", **files)
    assert resolve("task.MINE", recipe=name) is resolve("pydantic.MINE", recipe=name) is True
    import pydantic

    assert resolve("task.installed", recipe=name) is pydantic
    assert not hasattr(pydantic, "MINE")
    assert str(tmp_path / "hiding") not in sys.path


def test_a_folder_of_data_hides_nothing(tmp_path: Path) -> None:
    name = recipe(tmp_path / "with_data", task="import json\nTEXT = json.dumps([])")
    (tmp_path / "with_data" / "json").mkdir()
    assert resolve("task.TEXT", recipe=name) == "[]"


def test_a_file_already_imported_from_somewhere_else_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = recipe(tmp_path / "tested", world_of_a_user=ENV.format(name="guess-of-a-user"))
    monkeypatch.syspath_prepend(str(tmp_path / "tested"))
    import world_of_a_user  # type: ignore[import-not-found]

    assert resolve("world_of_a_user.Guess", recipe=name) is world_of_a_user.Guess


def test_task_py_is_imported_even_if_the_recipe_names_no_file(tmp_path: Path) -> None:
    name = recipe(tmp_path / "a", task="from . import world", world=ENV.format(name="far-away"))
    with pytest.raises(ConfigError, match="unknown env 'far-away'"):
        env_class("far-away")
    import_recipe(name, [])
    assert env_class("far-away") is resolve("world.Guess", recipe=name)
    import_recipe(name, [])  # again: nothing is registered twice


def test_only_files_that_the_recipe_names_are_run(tmp_path: Path) -> None:
    effect = f"open({str(tmp_path / 'ran')!r}, 'a').close()"
    name = recipe(tmp_path / "a", clean_up=effect, broken="def (", task="import helper", helper="x = 1")
    import_recipe(name, ["task.rows", "os.path"])
    assert resolve("task.helper", recipe=name).x == 1
    assert not (tmp_path / "ran").exists()
    import_recipe(name, ["clean_up.x"])
    assert (tmp_path / "ran").exists()


def test_a_bundled_recipe_is_an_ordinary_part_of_the_package() -> None:
    from agent_r1.recipes.quickstart import task

    import_recipe("quickstart", ["task.rows"])
    assert resolve("task.reward", recipe="quickstart") is task.reward


def test_modules_have_the_same_name_in_every_process(tmp_path: Path) -> None:
    name = recipe(tmp_path / "my-recipe", task="class A: ...")
    code = f"from agent_r1.build.resolve import resolve; print(resolve('task.A', recipe={name!r}).__module__)"
    here: str = resolve("task.A", recipe=name).__module__
    assert here.startswith("recipe_my_recipe_")
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == here


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("reward", r"'reward' is not of the form module\.name"),
        ("task.rewrd", r"task has no 'rewrd'\. Did you mean 'reward'\?"),
        ("nowhere.reward", r"no module 'nowhere' beside the recipe"),
        ("os.nowhere.reward", r"no module 'os\.nowhere' beside the recipe"),
    ],
)
def test_unknown_names_are_clear_errors(tmp_path: Path, name: str, message: str) -> None:
    where = recipe(tmp_path / "r", task="def reward(row, trajectory): ...")
    with pytest.raises(ConfigError, match=message):
        resolve(name, recipe=where)


def failure(folder: Path, **files: str) -> str:
    """The error of a recipe whose `task.py` cannot be imported, with R for its folder."""
    with pytest.raises(ConfigError) as raised:
        resolve("task.x", recipe=recipe(folder, **files))
    return str(raised.value).replace(str(folder.resolve()), "R")


def test_a_syntax_error_in_a_recipe_names_its_line(tmp_path: Path) -> None:
    broken = "x = 1\n\ndef reward()\n    return 1\n"
    said = "line 3: expected ':'\n    def reward()"
    assert failure(tmp_path / "own", task=broken) == f"cannot import R/task.py: {said}"
    assert failure(tmp_path / "neighbour", task="import env", env=broken) == f"cannot import R/env.py: {said}"
    evaluated = failure(tmp_path / "evaluated", task="x = eval('1 +')")  # the wrong text is in no file
    assert evaluated == "importing R/task.py failed: SyntaxError: invalid syntax (<string>, line 1) (task.py:1)"


def test_an_exception_during_import_names_its_line(tmp_path: Path) -> None:
    assert failure(tmp_path / "own", task="\nx = y\n") == (
        "importing R/task.py failed: NameError: name 'y' is not defined (task.py:2)"
    )
    assert failure(tmp_path / "neighbour", task="import env", env="x = 1 / 0") == (
        "importing R/task.py failed: ZeroDivisionError: division by zero (env.py:1)"
    )
    elsewhere = failure(tmp_path / "elsewhere", task="import json\nx = json.loads('{')")
    assert elsewhere.startswith("importing R/task.py failed: JSONDecodeError")
    assert elsewhere.endswith(" (task.py:2)")


def test_an_agent_r1_error_raised_by_an_import_is_not_wrapped(tmp_path: Path) -> None:
    ours = "from agent_r1.errors import DataError\nraise DataError('no data')"
    with pytest.raises(DataError, match=r"^no data$"):
        resolve("task.x", recipe=recipe(tmp_path / "r", task=ours))


@pytest.mark.parametrize(
    "imports", ["import a_package_nobody_has", "import importlib\nimportlib.import_module('a_package_nobody_has')"]
)
def test_a_missing_package_is_named_and_can_be_installed_later(tmp_path: Path, imports: str) -> None:
    line = 1 + imports.count("\n")
    for _ in range(2):  # nothing half-made is left behind
        assert failure(tmp_path / "broken", task=imports) == (
            f"importing R/task.py failed: ModuleNotFoundError: No module named 'a_package_nobody_has' (task.py:{line})"
        )
    name = recipe(tmp_path / "broken", task="x = 1  # mended, and of another size for the sake of the bytecode cache")
    assert resolve("task.x", recipe=name) == 1


def test_a_failed_import_outside_the_recipe_is_a_one_line_error_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = recipe(tmp_path / "r", task="")
    (tmp_path / "lib").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    for module, text, message in (
        ("misses", "import a_package_nobody_has", r"misses failed: .*No module named .*misses\.py:1\)"),
        ("raises", "x = y", r"raises failed: NameError.*\(raises\.py:1\)"),
        ("unread", "def (", r"cannot import .*lib/unread\.py: line 1: invalid syntax"),
        ("ends", "raise SystemExit(3)", r"ends failed: SystemExit: 3 \(ends\.py:1\)"),
        ("ours", "from agent_r1.errors import ConfigError; raise ConfigError('as it is')", "^as it is$"),
    ):
        (tmp_path / "lib" / f"{module}.py").write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=message):
            resolve(f"{module}.x", recipe=name)


def test_files_are_looked_up_beside_the_recipe_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = recipe(tmp_path / "mine", task="")
    (tmp_path / "a.jinja").write_text("from here", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert recipe_path("a.jinja", recipe=name).read_text(encoding="utf-8") == "from here"
    (tmp_path / "mine" / "a.jinja").write_text("beside", encoding="utf-8")
    assert recipe_path("a.jinja", recipe=name).read_text(encoding="utf-8") == "beside"
    with pytest.raises(ConfigError, match=r"file 'b\.jinja' is not in .*mine"):
        recipe_path("b.jinja", recipe=name)


def test_a_bare_name_is_a_bundled_chat_template_unless_a_file_has_it(tmp_path: Path) -> None:
    name = recipe(tmp_path / "mine", task="")
    assert recipe_path("chatml_tools", recipe=name) == TEMPLATES / "chatml_tools.jinja"
    (tmp_path / "mine" / "chatml_tools").write_text("mine", encoding="utf-8")
    assert recipe_path("chatml_tools", recipe=name).read_text(encoding="utf-8") == "mine"
    for wrong in ("chatml_tool", "chatml_tools.jinja", "templates/chatml_tools"):
        with pytest.raises(ConfigError, match=r"nor a bundled template \(chatml_tools"):
            recipe_path(wrong, recipe=name)


def test_a_recipe_depends_on_its_own_files_and_on_the_recipes_and_tools_it_may_borrow_from(tmp_path: Path) -> None:
    name = recipe(tmp_path / "mine", task="", b="")
    (tmp_path / "mine" / "a.jinja").write_text("", encoding="utf-8")
    (tmp_path / "mine" / "part").mkdir()
    (tmp_path / "mine" / "part" / "c.py").write_text("", encoding="utf-8")
    copy = shutil.copytree(tmp_path / "mine", tmp_path / "another" / "place")
    for place in (name, str(copy)):  # a copy has the same files in the same order
        own = [path for path in recipe_files(place) if path.is_relative_to(tmp_path)]
        assert [path.name for path in own] == ["a.jinja", "b.py", "task.py", "c.py"]  # and no base.yaml
    package = RECIPES.resolve().parent
    borrowed = {package / "recipes" / "gsm8k" / "task.py", package / "tools" / "calculator.py"}  # by gsm8k_tool
    assert borrowed <= set(recipe_files(name)) & set(recipe_files("gsm8k_tool/tiny"))


def test_borrowed_modules_bring_their_package_or_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unique = f"_{uuid.uuid4().hex[:8]}"
    alone, package = f"alone{unique}", f"package{unique}"
    name = recipe(tmp_path / "mine", task=f"from {package}.deep.world import World\ndef own(): ...")
    recipe(tmp_path / "lib", **{alone: "import json\ndef demos(): ...\nloads = json.loads", "beside": ""})
    recipe(tmp_path / "lib" / "unrelated", far="")
    recipe(tmp_path / "lib" / package, __init__="", other="")
    recipe(tmp_path / "lib" / package / "deep", __init__="", world="class World: ...")
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))

    def files(*names: str) -> list[str]:
        return [str(path.relative_to(tmp_path / "lib")) for path in borrowed_files(names, recipe=name)]

    assert files(f"{alone}.demos") == sorted([f"{alone}.py", "beside.py"])
    inside = ["__init__.py", "other.py", "deep/__init__.py", "deep/world.py"]
    assert files(f"{package}.deep.world.World") == [f"{package}/{path}" for path in inside]
    assert files("task.World") == files(f"{package}.deep.world.World")  # the recipe's own file only imports it
    assert files(f"{alone}.loads", "task.World", f"{alone}.demos") == files(f"{alone}.demos", "task.World")
    # The recipe's own, ours, the standard library's and what is installed
    assert files("task.own", "agent_r1.recipes.gsm8k.task.rows", "json.loads", "yaml.safe_load") == []


def test_readable_files_count_but_not_output_and_notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "mine"
    name = recipe(folder, task="")
    monkeypatch.setenv("AGENT_R1_CACHE", str(folder / "cache"))
    matter = {
        "demos.json": "[]",
        "words.txt": "a",
        "worlds/deep/down/map.csv": "x",
        "worlds/config.json": '{"recipe": "of a cake"}',
        "task.yaml": "task: put the apple into the fridge",
        "broken.yaml": "{",
    }
    beside = {
        "preset.yaml": "base: base.yaml\nsft: {lr: 1.0e-4}",
        "README": "x",
        "notes.md": "x",
        "curve.PNG": "x",
        "train.log": "x",
        "nohup.out": "x",
        ".hidden": "x",
        ".git/config": "x",
        "__pycache__/task.pyc": "x",
        "runs/first/config.json": '{"recipe": "mine", "task": {}, "model": {}}',
        "runs/first/metrics.jsonl": "{}",
        "cache/warm/model.safetensors": "x",
        "env/pyvenv.cfg": "",
        "env/lib/module.py": "",
    }
    for path, text in (matter | beside).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "rows.jsonl").write_text("x", encoding="utf-8")
    (folder / "linked").symlink_to(tmp_path / "shared")
    (folder / "linked" / "back").symlink_to(folder)  # in a circle
    os.mkfifo(folder / "pipe.txt")  # reading it would wait for ever
    own = {str(path.relative_to(folder)) for path in recipe_files(name) if path.is_relative_to(folder)}
    assert own == {"task.py", "linked/rows.jsonl", *matter}


def test_the_name_of_a_recipes_data_is_in_its_data_py(tmp_path: Path) -> None:
    assert data_name(recipe(tmp_path / "without", task="")) is None
    assert data_name(recipe(tmp_path / "script", task="", data="raise SystemExit('run')")) is None
    assert data_name(recipe(tmp_path / "mine", task="", data="FOLDER = 'mine'")) == "mine"
    assert data_name("gsm8k_tool") == data_name("gsm8k") == "gsm8k"  # one borrows it
