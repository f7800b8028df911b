"""Keywords become settings, objects become names that change with them, and what contradicts itself is refused."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from PIL import Image

import agent_r1 as ar
from agent_r1.api.fingerprint import fingerprint
from agent_r1.api.given import give, importable_name, stem
from agent_r1.api.inputs import tool_names
from agent_r1.api.settings import KEYWORDS, Settings
from agent_r1.build.resolve import resolve
from agent_r1.build.task import build_task
from agent_r1.config import PYTHON
from agent_r1.recipes.quickstart import task as quickstart
from agent_r1.recipes.quickstart.tiny import make_tiny_model
from agent_r1.runs.run_dir import RunDir
from tests.api import coins
from tests.api.coins import ROWS, TASK
from tests.conftest import Cli


def in_a_notebook(source: str) -> dict[str, Any]:
    """Define functions as a notebook does: in a module without a file."""
    module = ModuleType("__main__")
    exec(source, vars(module))
    return vars(module)


def test_every_way_to_give_a_setting_gives_the_same_config() -> None:
    short = ar.Config(**TASK, steps=7, algorithm="rloo", rollout={"group_size": 4})
    long = ar.Config(**TASK, trainer={"steps": 7}, algorithm={"name": "rloo"}, settings={"rollout.group_size": 4})
    assert short.resolved == long.resolved
    assert (short.resolved.trainer.steps, short.resolved.algorithm.name, short.resolved.rollout.group_size) == (
        7,
        "rloo",
        4,
    )
    assert short.with_settings(steps=9).resolved.trainer.steps == 9
    assert "group_size: 4" in str(short)


def test_every_section_and_short_form_is_a_keyword_that_editors_know() -> None:
    assert set(KEYWORDS) <= set(Settings.__annotations__)


def test_a_recipe_can_be_the_start() -> None:
    config = ar.Config("quickstart", steps=3, learner={"lr": 1e-4})
    assert (config.resolved.recipe, config.resolved.trainer.steps, config.resolved.learner.lr) == (
        "quickstart",
        3,
        1e-4,
    )
    assert config.resolved.rollout.max_response_tokens == 24


@pytest.mark.parametrize(
    ("keywords", "named"),
    [
        ({"step": 3}, "Did you mean 'steps'"),
        ({"steps": 3, "trainer": {"steps": 3}}, "trainer.steps"),
        ({"rollout": {"group_sise": 3}}, "group_size"),
        ({"settings": {"rollout.group_sise": 3}}, "group_size"),
        ({"settings": {"seed.x": 3}, "seed": 1}, "seed is not a section"),
        ({"steps": "many"}, "trainer.steps"),
        ({"learner": {"lr": object()}}, "learner.lr"),
        ({"rows": 3}, "rows must be a list"),
        ({"rows": ROWS[:1]}, "at least 2"),
        ({"rows": "data/train.jsonl", "test_rows": ROWS}, "test_rows has no effect"),
        ({"rows": {"train": ROWS}, "test_rows": ROWS}, "test_rows has no effect"),
        ({"tools": coins.lookup}, "tools must be a list"),
        ({"kl": 3}, "unknown keyword"),
        ({"env": "text", "env_kwargs": [1]}, "task.env_kwargs"),
        ({"env": "text", "env_kwargs": {"judge": print}}, "task.env_kwargs.judge"),
        ({"env": "text", "env_kwargs": {"levels": {1: "easy"}}}, "task.env_kwargs.levels"),
    ],
)
def test_what_cannot_be_meant_is_an_error_that_names_it(keywords: dict[str, Any], named: str) -> None:
    with pytest.raises(ar.ConfigError, match=named):
        ar.Config(**{**TASK, **keywords})


def test_rows_are_split_once_and_for_all() -> None:
    task = build_task(ar.Config(**TASK).resolved)
    train, test = task.train_rows(), task.test_rows()
    assert len(train) == 16
    assert len(test) == 4
    assert {row.row_id for row in train} | {row.row_id for row in test} == {row["row_id"] for row in ROWS}
    again = build_task(ar.Config(**{**TASK, "seed": 5}).resolved)
    assert again.test_rows() == test  # the seed of a run does not change what it is measured on


def test_rows_come_from_lists_functions_and_files(tmp_path: Path) -> None:
    for split in ("train", "test"):
        lines = [json.dumps({**row, "row_id": f"{split}-{row['row_id']}"}) for row in ROWS]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines))

    def by_split(split: str, count: int = 3) -> list[dict[str, Any]]:
        return [{**row, "row_id": f"{split}-{row['row_id']}"} for row in ROWS][:count]

    given: list[Any] = [
        tmp_path / "{split}.jsonl",
        by_split,
        {split: by_split(split, 20) for split in ("train", "test")},
        lambda: {"train": by_split("train", 20), "test": by_split("test", 20)},
    ]
    for rows in given:
        task = build_task(ar.Config(**{**TASK, "rows": rows, "eval": {"rows": 2}}).resolved)
        assert [row.row_id for row in task.test_rows()] == ["test-Ada", "test-Ben"]
    kept = build_task(ar.Config(**{**TASK, "rows": ROWS[:10], "test_rows": ROWS[10:]}).resolved)
    assert [row.row_id for row in kept.test_rows()] == [row["row_id"] for row in ROWS[10:]]


def test_what_others_can_import_has_its_own_name() -> None:
    assert importable_name(coins.reward) == "tests.api.coins.reward"
    assert importable_name(coins.lookup) == "tests.api.coins.lookup"
    config = ar.Config(**TASK).resolved
    assert (config.task.reward, config.task.tools) == ("tests.api.coins.reward", ["tests.api.coins.lookup"])


def test_the_command_line_continues_a_run_whose_objects_it_can_import(tmp_path: Path, cli: Cli) -> None:
    config = ar.Config(
        rows=quickstart.rows, tools=[quickstart.lookup, quickstart.calculate], reward=quickstart.reward,
        demos=quickstart.demos, model=make_tiny_model, steps=3,
    )  # fmt: skip
    run = RunDir.create(tmp_path / "run", config.resolved)
    ended = cli("train", "--resume", run.path, "trainer.steps=4", "--dry-run")
    assert ended.code == 0, ended.err
    assert "rows: agent_r1.recipes.quickstart.task.rows" in ended.out


def test_what_a_notebook_defines_is_found_under_a_name_that_changes_with_it() -> None:
    cells = [
        "K = 1\ndef helper(x):\n    return x + K\ndef reward(row, trajectory):\n    return helper(0)",
        "K = 2\ndef helper(x):\n    return x + K\ndef reward(row, trajectory):\n    return helper(0)",
        "K = 1\ndef helper(x):\n    return x - K\ndef reward(row, trajectory):\n    return helper(0)",
        "K = 1\ndef helper(x):\n    return x + K\ndef reward(row, trajectory):\n    return 2 * helper(0)",
    ]
    functions = [in_a_notebook(cell)["reward"] for cell in cells]
    names = [give(function) for function in functions]
    assert len(set(names)) == len(names)
    assert {stem(name) for name in names} == {"reward"}
    assert [resolve(name, recipe=PYTHON) for name in names] == functions
    again = give(in_a_notebook(cells[0])["reward"])
    assert again == names[0]
    assert resolve(again, recipe=PYTHON) is not functions[0]  # the one given last


def test_fingerprints_tell_classes_closures_and_tools_apart() -> None:
    def make(n: int) -> Any:
        return lambda: n

    source = "import agent_r1 as ar\n@ar.tool\ndef f(x: int) -> str:\n    'Say it.'\n    return str(x{})"
    tools = [in_a_notebook(source.format(change))["f"] for change in ("", " + 1")]
    classes = [in_a_notebook(f"class A:\n    n = {n}\n    def f(self): return self.n")["A"] for n in (1, 2)]
    for one, other in [(make(1), make(2)), tuple(tools), tuple(classes), ([1, [2]], [1, 2])]:
        assert fingerprint(one) != fingerprint(other)
    assert fingerprint(make(1)) == fingerprint(make(1))
    many = list(range(50_000))
    assert fingerprint(many) != fingerprint([*many, 1])
    recursive: list[Any] = []
    recursive.append(recursive)
    assert fingerprint(recursive)


class Judge:
    """Defined in a module, as a user's judge is."""

    def __init__(self, words: list[str]) -> None:
        self.words = words

    def score(self, row: ar.TaskRow, trajectory: ar.Trajectory) -> float:
        return float(trajectory.final_text in self.words)

    __call__ = score


def score_with(judge: Any) -> Any:
    return lambda row, trajectory: judge.score(row, trajectory)


def score_with_words(row: ar.TaskRow, trajectory: ar.Trajectory, words: list[str]) -> float:
    return float(trajectory.final_text in words)


@pytest.mark.parametrize(
    "make",
    [
        Judge,
        lambda words: Judge(words).score,
        lambda words: score_with(Judge(words)),
        lambda words: score_with(np.array([len(word) for word in words])),
        lambda words: score_with(Path(words[0])),
        lambda words: partial(score_with_words, words=words),
    ],
    ids=["object", "method", "closure over an object", "over an array", "over a path", "partial"],
)
def test_objects_that_differ_in_what_they_hold_do_not_share_a_name(make: Any) -> None:
    rest: dict[str, Any] = {"rows": ROWS, "model": "some/model"}
    one, other, again = (ar.Config(**rest, reward=make(words)).resolved.task.reward for words in (["a"], ["bc"], ["a"]))
    assert one != other
    assert one == again


def test_rows_are_told_apart_by_the_content_of_pictures_and_arrays() -> None:
    def name(colour: str, number: int) -> str:
        vector = np.arange(5000)
        vector[2500] = number  # in the part that a repr leaves out
        row = {"prompt": "look", "images": [Image.new("RGB", (4, 4), colour)], "vector": vector}
        return ar.Config(rows=[row, row], reward=coins.reward, model="some/model").resolved.task.rows

    assert name("red", 1) == name("red", 1)
    assert len({name("red", 1), name("blue", 1), name("red", 2)}) == 3


def test_sets_of_tools_from_different_servers_have_different_names_that_do_not_change() -> None:
    sets = [ar.MCPTools(command="one"), ar.MCPTools(command="two"), ar.MCPTools(url="http://localhost:1/mcp")]
    names = tool_names(sets)
    assert len(set(names)) == 3
    assert [resolve(name, recipe=PYTHON) for name in names] == sets
    sets[0]._tools = []  # as after the server was asked
    assert tool_names(sets) == names
    assert tool_names([ar.MCPTools(command="one")]) == names[:1]


def test_a_list_among_tools_is_refused() -> None:
    with pytest.raises(ar.ConfigError, match="tools="):
        tool_names([coins.lookup, [coins.lookup]])


def test_iterators_and_nested_sections_can_be_read_more_than_once() -> None:
    given = {"path": "some/model", "template_kwargs": {"thinks": True}}
    task: dict[str, Any] = {**TASK, "rows": iter(ROWS), "model": given, "demos": None}
    config = ar.Config(**task, settings={"model.template_kwargs.brief": True})
    assert given == {"path": "some/model", "template_kwargs": {"thinks": True}}
    longer = config.with_settings(steps=9)
    assert longer.resolved.task.rows == config.resolved.task.rows
    assert longer.resolved.model == config.resolved.model


def test_environments_and_flows_are_given_as_classes() -> None:
    class Guess(ar.TextEnv):
        def begin(self, row: ar.TaskRow) -> str:
            return "guess"

        def reply(self, said: str) -> ar.Reply:
            return ar.Reply(text="no", done=True)

    class Twice(ar.AgentEnvLoop):
        pass

    rest: dict[str, Any] = {"rows": ROWS, "reward": coins.reward, "model": "some/model"}
    task = build_task(ar.Config(**rest, env=Guess, flow=Twice).resolved)
    flow = task.make_flow(task.test_rows()[0])
    assert isinstance(flow, Twice)
    assert isinstance(flow.make_env(task.test_rows()[0]), Guess)


def test_a_typed_function_is_a_tool_without_a_decorator() -> None:
    def shout(text: str) -> str:
        """Say it loudly."""
        return text.upper()

    config = ar.Config(**{**TASK, "tools": [shout, "tests.api.coins.lookup"]}).resolved
    names = [str(name) for name in config.task.tools]
    assert [stem(name) or name for name in names] == ["shout", "tests.api.coins.lookup"]
    assert resolve(names[0], recipe=PYTHON).schema["function"]["name"] == "shout"


def test_servers_of_tools_start_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    server, url = {"mcp": {"command": ["server"], "cwd": "tools"}}, {"mcp": {"url": "http://127.0.0.1:1"}}
    assert tool_names([server, url]) == [{"mcp": {"command": ["server"], "cwd": str(tmp_path / "tools")}}, url]


def test_the_tiny_model_needs_demonstrations() -> None:
    with pytest.raises(ar.ConfigError, match="demos"):
        ar.Config(**{**TASK, "demos": None})
