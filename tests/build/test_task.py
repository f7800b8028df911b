"""Tools, envs, rows and data of a recipe, built from its settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agent_r1.build.plan import build_plan
from agent_r1.build.recipe import prepare_data
from agent_r1.build.task import build_task, recipe_function
from agent_r1.config import RunConfig, load_config
from agent_r1.config.checks import is_data_source
from agent_r1.errors import ConfigError
from agent_r1.flows.flow import AgentEnvLoop
from tests.conftest import Cli

TASK = '''
from agent_r1 import BaseTool, tool

class Scale(BaseTool):
    """Multiplies."""
    name = "scale"
    description = "Multiply a number."
    parameters = {"type": "object", "properties": {"number": {"type": "number"}}, "required": ["number"]}

    def __init__(self, *, factor, offset=0):
        if factor == 0:
            raise ValueError("factor must not be 0")
        self.factor, self.offset = factor, offset

    async def execute(self, args, **context):
        return str(args["number"] * self.factor + self.offset)

@tool
def shout(text: str) -> str:
    """Say it loudly."""
    return text.upper()

class NoTool:
    pass

def rows(split, count=3):
    return [{"prompt": f"{split} {index}"} for index in range(count)]

def kept_rows(split, count=3, path=None):
    return [{"prompt": f"{split} {index} of {path}"} for index in range(count)]

def demos(count, seed): ...

def kept_demos(count, seed, path=None):
    return (count, seed, path)

def reward(row, trajectory): return 0.0
'''
DATA = """
FOLDER = "mine"

def prepare(directory, report):
    directory.mkdir(parents=True)
    (directory / "rows.txt").write_text("all of them")
    report("one file written")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "recipe"
    made.mkdir()
    (made / "base.yaml").write_text(
        "task: {rows: task.rows, reward: task.reward, tools: [task.shout]}\nmodel: {path: a/b}\n", encoding="utf-8"
    )
    (made / "task.py").write_text(TASK, encoding="utf-8")
    return made


def config(folder: Path, *overrides: str) -> RunConfig:
    return load_config(str(folder), overrides)


def tools(settings: RunConfig) -> dict[str, Any]:
    """The tools that a row is played with, by name."""
    task = build_task(settings)
    [row] = task.test_rows()[:1]
    flow = task.make_flow(row)
    assert isinstance(flow, AgentEnvLoop)
    found: dict[str, Any] = flow.make_env(row)._tools  # type: ignore[attr-defined]
    return found


# Tools


def test_all_episodes_share_a_tool_that_was_created_with_its_settings(folder: Path) -> None:
    given = config(folder, "task.tools=[task.shout,task.Scale]", "task.tool_kwargs={scale: {factor: 3, offset: 1}}")
    made, again = tools(given), tools(given)
    assert list(made) == list(again) == ["shout", "scale"]
    assert (made["scale"].factor, made["scale"].offset) == (again["scale"].factor, again["scale"].offset) == (3, 1)
    task = build_task(given)
    envs = [flow.make_env(row) for row in task.test_rows() if isinstance(flow := task.make_flow(row), AgentEnvLoop)]
    assert len({id(env._tools["scale"]) for env in envs}) == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["task.tools=[task.Scale]", "task.tool_kwargs={scal: {factor: 3}, scale: {factor: 3}}"],
            r"task\.tool_kwargs .*'scal'.* Did you mean 'scale'",
        ),
        (["task.tool_kwargs={shout: {loud: true}}"], r"task\.tool_kwargs .*'shout', which takes none"),
        (
            ["task.tools=[task.Scale]", "task.tool_kwargs={scale: {factor: 3, factr: 4}}"],
            r"task\.tool_kwargs: Scale.*unexpected keyword argument 'factr'",
        ),
        (["task.tools=[task.Scale]"], r"task\.tool_kwargs: .*missing .*required .*argument: 'factor'"),
        (["task.tools=[task.NoTool]"], r"task\.tools: 'task\.NoTool' is <class .*>, not a tool"),
        (["task.tools=[task.reward]"], r"task\.tools: 'task\.reward' is <function .*>, not a tool; put @tool on"),
        (["task.tools=[task.Scal]"], r"task has no 'Scal'\. Did you mean 'Scale'"),
        (["task.tools=[nobody]"], "unknown tool 'nobody'"),
    ],
)
def test_settings_that_no_tool_takes_are_errors(folder: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_plan(config(folder, *overrides))


def test_an_error_raised_by_a_tool_class_is_passed_on(folder: Path) -> None:
    with pytest.raises(ValueError, match="factor must not be 0"):
        build_plan(config(folder, "task.tools=[task.Scale]", "task.tool_kwargs={scale: {factor: 0}}"))


WORLD = """
from agent_r1 import AgentEnv, Reply, TextEnv


@AgentEnv.register("world_{unique}")
class World(TextEnv):
    def begin(self, row):
        return "?"

    def reply(self, said):
        return Reply(text="!", done=True)


def rows(split, count=None):
    return [
        {{"prompt": split, "env_kwargs": {{"env_type": "world_{unique}"}}}},
        {{"prompt": split + "!", "env_kwargs": {{"env_type": "tool"}}}},
    ]
"""


def test_tools_for_an_env_that_takes_none_are_refused_with_both_settings_named(folder: Path) -> None:
    (folder / "world.py").write_text(WORLD.format(unique=folder.parent.name), encoding="utf-8")
    message = r"task\.tools=\['task\.shout'\]: the env 'world\.World' \(World\)"
    with pytest.raises(ConfigError, match=message):
        build_plan(config(folder, "task.env=world.World"))
    build_plan(config(folder, "task.env=world.World", "task.tools=[]"))


def test_rows_may_choose_envs_with_and_without_tools(folder: Path) -> None:
    (folder / "world.py").write_text(WORLD.format(unique=folder.parent.name), encoding="utf-8")
    plan = build_plan(config(folder, "task.rows=world.rows"))
    world, tool_env = (plan.task.make_flow(row).make_env(row) for row in plan.train_rows)
    assert type(world).__name__ == "World"
    assert [schema["function"]["name"] for schema in tool_env.tool_schemas] == ["shout"]


def test_missing_tools_are_an_error_unless_rows_bring_them(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"task\.tools is empty"):
        build_plan(config(folder, "task.tools=[]"))
    bringing = "return [{'prompt': split, 'env_kwargs': {'tools': [shout]}}]"
    code = f"from task import shout\ndef rows(split, count=3):\n    {bringing}\n"
    (folder / "bringing.py").write_text(code, encoding="utf-8")
    assert list(tools(config(folder, "task.tools=[]", "task.rows=bringing.rows"))) == ["shout"]


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        ({"tools": ["shout"]}, {"tools": ["shuot"]}, "row 'train-1' cannot be played: unknown tool 'shuot'"),
        ({"tools_kwargs": {"shout": {}}}, {"tools_kwargs": {"shuot": {}}}, "row 'train-1' .* tools_kwargs has 'shuot'"),
    ],
)
def test_tools_and_values_of_every_row_are_checked_before_the_run(
    folder: Path, first: dict[str, Any], second: dict[str, Any], told: str
) -> None:
    listed = f"[{{'prompt': f'{{split}}{{i}}', 'env_kwargs': each}} for i, each in enumerate([{first}, {second}])]"
    (folder / "several.py").write_text(f"def rows(split, count=2):\n    return {listed}", encoding="utf-8")
    with pytest.raises(ConfigError, match=told):
        build_plan(config(folder, "task.rows=several.rows"))


def test_a_row_may_choose_some_of_the_tools_by_name(folder: Path) -> None:
    rows = "def rows(split, count=1):\n    return [{'prompt': split, 'env_kwargs': {'tools': ['scale']}}]"
    (folder / "choosing.py").write_text(rows, encoding="utf-8")
    both = ["task.tools=[task.shout,task.Scale]", "task.tool_kwargs={scale: {factor: 3}}"]
    chosen = tools(config(folder, *both, "task.rows=choosing.rows"))
    assert {name: tool.factor for name, tool in chosen.items()} == {"scale": 3}  # made with the recipe's settings
    assert list(tools(config(folder, *both))) == ["shout", "scale"]
    with pytest.raises(ConfigError, match="unknown tool 'scale'"):
        tools(config(folder, "task.rows=choosing.rows"))


# Data


OPENING = """
import uuid
from agent_r1 import BaseTool

@BaseTool.register
class Session(BaseTool):
    name = f"session_{uuid.uuid4().hex}"
    description = "Ask a service."
    parameters = {"type": "object", "properties": {}}

    async def open(self): ...
    async def execute(self, args, **context): ...

def rows(split, count=1):
    return [{"prompt": split, "env_kwargs": {"tools": [Session.name]}}]
"""


def test_a_row_may_not_choose_a_tool_that_nobody_opens(folder: Path) -> None:
    (folder / "opening.py").write_text(OPENING, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"'session_\w+' must be opened before a run: add it to task\.tools"):
        tools(config(folder, "task.rows=opening.rows"))
    assert len(tools(config(folder, "task.rows=opening.rows", "task.tools=[opening.Session]"))) == 1


@pytest.mark.parametrize("how", ["return [{'prompt': KEPT[i]} for i in range(3)]", "yield {'prompt': KEPT['a']}"])
def test_an_error_in_the_rows_function_is_one_line(folder: Path, cli: Cli, how: str) -> None:
    broken = f"KEPT = {{}}\ndef broken(split, count=3):\n    {how}\n"
    (folder / "task.py").write_text(TASK + broken, encoding="utf-8")
    ended = cli("train", folder, "task.rows=task.broken", "--dry-run")
    key = "0" if "return" in how else "'a'"
    line = len((TASK + broken).splitlines())
    assert ended.err == f"error: task.rows='task.broken' for split 'train' raised KeyError: {key} (task.py:{line})\n"


def test_functions_with_a_parameter_path_get_data_path(folder: Path) -> None:
    given = config(folder, "task.rows=task.kept_rows", "sft.demos=task.kept_demos", "data.path=/my/data", "eval.rows=1")
    [row] = build_task(given).test_rows()
    assert row.prompt[0]["content"] == "test 0 of /my/data"
    assert recipe_function("task.kept_demos", given)(count=2, seed=0) == (2, 0, "/my/data")
    for one in ("task.rows=task.kept_rows", "sft.demos=task.kept_demos"):  # one that takes it is enough
        build_task(config(folder, one, "data.path=/my/data"))
    without = config(folder, "task.rows=task.kept_rows", "eval.rows=1")
    assert build_task(without).test_rows()[0].prompt[0]["content"] == "test 0 of None"


@pytest.mark.parametrize("overrides", [[], ["sft.demos=task.demos"], ["task.rows='{split}.jsonl'"]])
def test_an_unused_data_path_is_an_error(folder: Path, overrides: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"data\.path='/my/data'"):
        build_task(config(folder, *overrides, "data.path=/my/data"))


def test_data_are_prepared_where_the_recipe_reads_them(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENT_R1_DATA", str(tmp_path / "data"))
    (folder / "data.py").write_text(DATA, encoding="utf-8")
    said: list[str] = []
    assert prepare_data(str(folder), None, said.append) == tmp_path / "data" / "mine"
    assert (tmp_path / "data" / "mine" / "rows.txt").read_text() == "all of them"
    assert said == ["one file written"]


def test_the_command_writes_data_to_a_folder_from_a_copy_and_says_how_to_use_them(
    folder: Path, tmp_path: Path, cli: Cli
) -> None:
    copied = DATA.replace("report):", "report, source=None):").replace('"all of them"', "str(source)")
    (folder / "data.py").write_text(copied, encoding="utf-8")
    ended = cli("data", "recipe", folder, "--from", tmp_path / "copy", "--to", tmp_path / "here")
    assert ended.code == 0
    assert (tmp_path / "here" / "rows.txt").read_text() == str(tmp_path / "copy")
    assert "one file written" in ended.out
    assert f"train {folder} data.path={tmp_path / 'here'}" in ended.out


@pytest.mark.parametrize("bundled", [False, True])
def test_a_copy_is_refused_if_the_recipe_reads_data_unchanged(
    folder: Path, tmp_path: Path, cli: Cli, *, bundled: bool
) -> None:
    (folder / "data.py").write_text(DATA, encoding="utf-8")
    recipe = "gsm8k" if bundled else folder
    ended = cli("data", "recipe", recipe, "--from", "my/copy", "--to", tmp_path / "here")
    assert ended.code == 2
    assert "data.path=my/copy" in ended.err
    assert not (tmp_path / "here").exists()


def test_a_recipe_without_data_says_so(folder: Path, cli: Cli) -> None:
    ended = cli("data", "recipe", folder)
    assert ended.code != 0
    assert f"{folder} has no data to fetch: there is no data.py in" in ended.err
    with pytest.raises(ConfigError, match="quickstart has no data to fetch"):
        prepare_data("quickstart", None, print)


def test_rows_are_a_file_or_a_function_by_their_name() -> None:
    assert all(map(is_data_source, ["train.parquet", "{split}.jsonl", "{split}.jsonl.gz", "data/", "hf:gsm8k"]))
    assert not is_data_source("task.rows")
