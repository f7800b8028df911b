"""Tool calls are read in the format of the chat template; a contradiction is refused before the run."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from agent_r1.build.collectors import eval_collector
from agent_r1.build.plan import build_plan
from agent_r1.build.resolve import resolve
from agent_r1.build.task import build_task
from agent_r1.config import RunConfig, load_config
from agent_r1.engines.scripted import ScriptedEngine
from agent_r1.errors import ConfigError
from agent_r1.tokens.formats.table import FORMATS, register_format
from agent_r1.types import Trajectory
from tests.chatml import renderer
from tests.conftest import Cli
from tests.tokens.format_templates import FAMILIES, family_renderer

MINI = str(Path(__file__).parents[1] / "mini")
LLAMA_CALL = FORMATS["llama3_json"].write_call("double", {"number": 4})

TASK = '''
from agent_r1 import ToolEnv, tool

@tool
def double(number: int) -> str:
    """Twice a number."""
    return str(2 * number)

class Own(ToolEnv):
    def __init__(self, *, tools):
        super().__init__(tools=tools)

class Passing(ToolEnv):
    def __init__(self, *, extra=1, **kwargs):
        super().__init__(**kwargs)

def rows(split, count=2):
    return [{"prompt": f"{split} {index}"} for index in range(count)]

def mixed(split, count=2):
    return [*rows(split, count), {"prompt": f"{split} other", "env_kwargs": {"tool_format": "qwen3_coder"}}]

def reward(row, trajectory): return 0.0
def make(directory, seed): ...
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose chat template writes calls in the Llama 3 format."""
    made = tmp_path_factory.mktemp("model")
    resolve("task.make_model", recipe=MINI)(directory=made, seed=0)
    tokenizer = AutoTokenizer.from_pretrained(str(made))
    tokenizer.chat_template = FAMILIES["llama3_json"].template
    tokenizer.save_pretrained(str(made))
    return made


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    made = tmp_path / "recipe"
    made.mkdir()
    (made / "base.yaml").write_text(
        "task: {rows: task.rows, reward: task.reward, tools: [task.double]}\nmodel: {make: task.make}\n", "utf-8"
    )
    (made / "task.py").write_text(TASK, "utf-8")
    (made / "llama.jinja").write_text(FAMILIES["llama3_json"].template, "utf-8")
    (made / "plain.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", "utf-8")
    return made


def config(recipe: Path | str, *overrides: str) -> RunConfig:
    return load_config(str(recipe), overrides)


def play(settings: RunConfig, *texts: str) -> Trajectory:
    """Play the first test row with a model whose chat template writes calls in the Llama 3 format."""
    shown = family_renderer("llama3_json")
    task = build_task(settings)
    collect = eval_collector(settings, task, shown, ScriptedEngine([shown.encode_response(text) for text in texts]))
    [group] = asyncio.run(task.run(collect(task.test_rows()[:1], seed=0)))
    [trajectory] = group.trajectories
    return trajectory


@pytest.mark.parametrize("more", [[], ["task.workers.processes=1"], ["task.env=task.Passing"]])
def test_calls_are_read_in_the_format_of_the_chat_template(recipe: Path, more: list[str]) -> None:
    played = play(config(recipe, *more), LLAMA_CALL, "It is 8.")
    assert [call.result for step in played.steps for call in step.calls] == ["8"]
    assert played.final_text == "It is 8."


@pytest.mark.parametrize("path", ["model", "template"])
def test_a_contradiction_is_found_before_the_run(recipe: Path, folder: Path, path: str) -> None:
    told = {"model": ["model.make=null", f"model.path={folder}"], "template": ["model.chat_template=llama.jinja"]}[path]
    assert build_plan(config(recipe, *told)).tool_format == "llama3_json, as in the chat template"
    with pytest.raises(ConfigError, match=r"tool_format='hermes' contradicts the chat template, .* 'llama3_json'"):
        build_plan(config(recipe, *told, "task.env_kwargs.tool_format=hermes"))
    with pytest.raises(ConfigError, match=r"row '.*' cannot be played: tool_format='qwen3_coder' contradicts"):
        build_plan(config(recipe, *told, "task.rows=task.mixed"))
    with pytest.raises(ConfigError, match=r"Own: tool_format='hermes' contradicts .*.* pass tool_format"):
        build_plan(config(recipe, *told, "task.env=task.Own"))


def test_a_model_not_yet_available_is_checked_when_it_is_loaded(recipe: Path) -> None:
    settings = config(recipe, "task.env_kwargs.tool_format=hermes")
    assert build_plan(settings).tool_format == "hermes, as set"
    with pytest.raises(ConfigError, match="contradicts the chat template"):
        play(settings, "It is 8.")


def test_the_dry_run_says_which_format_and_why(cli: Cli, recipe: Path, folder: Path) -> None:
    def plan(*words: str) -> str:
        return cli("train", recipe, "--dry-run", *words).out.rpartition("; tool calls: ")[2].strip()

    assert plan() == "inferred from the chat template when the model is loaded"
    assert plan("model.make=null", f"model.path={folder}") == "llama3_json, as in the chat template"
    assert plan("model.chat_template=plain.jinja") == "hermes, because the chat template does not write calls"
    assert plan("task.env_kwargs.tool_format=glm45") == "glm45, as set"
    assert "tool calls" not in cli("train", recipe, "--dry-run", "task.flow=single_step").out


MINE = """
from agent_r1.tokens.formats.headed import HeadedFormat
from agent_r1.tokens.formats.table import register_format

mine = HeadedFormat(
    form="@do NAME {...} @done", starts="@do", opens="@do", head=r"\\s*(?P<name>\\w+)", tail=" @done"
)
register_format("mine", mine)
"""


def test_a_registered_format_is_inferred_too(recipe: Path) -> None:
    (recipe / "task.py").write_text(TASK + MINE, "utf-8")
    (recipe / "mine.jinja").write_text(
        FAMILIES["hermes"].template.replace(
            "<tool_call>\n{{ c.function | tojson }}\n</tool_call>",
            "@do {{ c.function.name }} {{ c.function.arguments | tojson }} @done",
        ),
        "utf-8",
    )
    try:
        plan = build_plan(config(recipe, "model.chat_template=mine.jinja"))
        assert plan.tool_format == "mine, as in the chat template"
        with pytest.raises(ConfigError, match="'hermes' contradicts the chat template, which writes calls as 'mine'"):
            build_plan(config(recipe, "model.chat_template=mine.jinja", "task.env_kwargs.tool_format=hermes"))
        with pytest.raises(ConfigError, match="'mine' is taken"):
            register_format("mine", FORMATS["hermes"])
        with pytest.raises(ConfigError, match="needs a ToolCallFormat instance, got <class"):
            register_format("other", type(FORMATS["hermes"]))  # type: ignore[arg-type]
    finally:
        del FORMATS["mine"]


def test_a_template_without_calls_contradicts_nothing(recipe: Path) -> None:
    settings = config(recipe, "task.env_kwargs.tool_format=pythonic")
    eval_collector(settings, build_task(settings), renderer(), ScriptedEngine([]))
