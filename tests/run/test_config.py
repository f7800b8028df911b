"""The config: unknown keys, wrong types and contradictions are errors that say what was meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_r1.config import RunConfig, load_config, parse_config
from agent_r1.errors import ConfigError

MINIMAL = """
task: {rows: task.rows, reward: task.reward}
model: {path: some/model}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "mine" / "base.yaml"
    path.parent.mkdir()
    path.write_text(MINIMAL, encoding="utf-8")
    return str(path)


def test_a_folder_and_its_yaml_are_the_same_recipe(recipe: str) -> None:
    assert load_config(str(Path(recipe).parent)) == load_config(recipe)


def test_overrides_win_and_keep_their_types(recipe: str) -> None:
    config = load_config(recipe, ["trainer.steps=7", "learner.lr=3e-4", "task.tools=[task.a,task.b]", "eval.rows=null"])
    assert (config.trainer.steps, config.learner.lr) == (7, 3e-4)
    assert config.task.tools == ["task.a", "task.b"]
    assert config.eval.rows is None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "rollout.group_sise=4",
            r"rollout has no field 'group_sise'\. Did you mean 'group_size'\? Fields: rows_per_step",
        ),
        ("learner.group_size=4", r"learner has no field 'group_size'\. Did you mean 'rollout.group_size'\?"),
        ("trainr.steps=4", r"the recipe has no field 'trainr'\. Did you mean 'trainer'\?"),
        ("trainer.steps=many", r"trainer.steps='many': input should be a valid integer"),
        ("rollout.temperature=0", r"rollout.temperature=0: input should be greater than 0"),
        ("trainer.steps", "not of the form section.key=value"),
        ("engine.name=vlm", r"engine.name='vlm'"),
        ("model.make=task.make", "exactly one of model.path"),
        ("rollout.max_response_tokens=9999", "the prompt needs room too"),
        ("engine.max_cached_tokens=300", "cannot hold one context"),
        ("eval.samples=4", "repeats one greedy attempt"),
        ("eval.top_p=0.5", "do nothing at eval.temperature = 0"),
    ],
)
def test_a_wrong_setting_is_an_error_that_helps(recipe: str, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(recipe, [override])


def test_a_missing_required_field_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("task: {rows: task.rows}\nmodel: {path: a/b}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"task\.reward is missing"):
        load_config(str(path))


def test_broken_yaml_and_unknown_recipes_are_clear(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("task: [unclosed", encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(str(path))
    with pytest.raises(ConfigError, match=r"unknown recipe 'quickstrt'\. Did you mean 'quickstart'\?"):
        load_config("quickstrt")


def test_a_config_survives_its_own_json(recipe: str) -> None:
    config = load_config(recipe, ["seed=3"])
    assert parse_config(RunConfig.model_validate_json(config.model_dump_json()).model_dump()) == config
