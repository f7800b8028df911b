"""Presets: YAML files beside a recipe's own that change a part of it."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from agent_r1.build.models.source import PACKAGES, PYPI
from agent_r1.build.plan import build_plan
from agent_r1.build.recipe import recipe_path
from agent_r1.build.resolve import recipe_folder, resolve
from agent_r1.config import (
    RECIPES,
    bundled_presets,
    bundled_recipes,
    load_config,
    parse_config,
    recipe_file,
    recipe_name,
)
from agent_r1.errors import ConfigError
from agent_r1.runs.run_dir import RunDir

BASE = """
task: {rows: task.rows, reward: task.reward, tools: [task.a, task.b], env_kwargs: {deep: {one: 1, two: 2}}}
model: {path: some/model, chat_template: chatml_tools}
trainer: {steps: 60, eval_every: 20}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "base.yaml").write_text(BASE, encoding="utf-8")
    return tmp_path


def preset(folder: Path, text: str, name: str = "mine.yaml") -> str:
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


def test_a_preset_changes_what_it_names_and_keeps_the_rest(folder: Path) -> None:
    changes = "task: {tools: [task.c], env_kwargs: {deep: {two: 3}}}\nmodel: {chat_template: null}\ntrainer: {steps: 2}"
    made = load_config(preset(folder, f"base: base.yaml\n{changes}"))
    assert (made.trainer.steps, made.trainer.eval_every) == (2, 20)
    assert made.task.tools == ["task.c"]  # lists are replaced
    assert made.task.env_kwargs == {"deep": {"one": 1, "two": 3}}  # mappings are merged, however deep
    assert (made.model.path, made.model.chat_template) == ("some/model", None)  # null takes a setting away
    assert load_config(str(folder)).trainer.steps == 60


def test_a_preset_cannot_be_based_on_another_preset(folder: Path) -> None:
    preset(folder, "base: base.yaml\ntrainer: {steps: 2}")
    with pytest.raises(ConfigError, match=r"its base 'mine\.yaml' is itself a preset.* mine\+smaller"):
        load_config(preset(folder, "base: mine.yaml\nseed: 7", "smaller.yaml"))


def test_presets_are_combined_with_a_plus_and_the_later_one_wins(folder: Path) -> None:
    preset(folder, "base: base.yaml\nseed: 7\ntrainer: {steps: 2}\ntask: {env_kwargs: {deep: {one: 5}}}", "short.yaml")
    preset(
        folder,
        "base: base.yaml\ntrainer: {steps: 3, eval_every: 1}\ntask: {env_kwargs: {deep: {two: 6}}}",
        "often.yaml",
    )
    both = load_config(f"{folder}/short.yaml+often")
    assert (both.seed, both.trainer.steps, both.trainer.eval_every) == (7, 3, 1)
    assert both.task.env_kwargs == {"deep": {"one": 5, "two": 6}}
    assert load_config(f"{folder}/often.yaml+short.yaml").trainer.steps == 2
    assert load_config(f"{folder}/short.yaml+often", ["trainer.steps=9"]).trainer.steps == 9
    assert load_config(f"{folder}+short+often") == both.model_copy(update={"recipe": f"{folder}/base.yaml+short+often"})
    assert both.recipe == f"{folder}/short.yaml+often"
    assert recipe_folder(both.recipe) == folder.resolve()
    assert parse_config(RunDir.create(folder / "run", both).settings) == both


def test_only_presets_of_one_base_combine(folder: Path) -> None:
    first = preset(folder, "base: base.yaml\nseed: 1")
    (folder / "other.yaml").write_text(BASE, encoding="utf-8")
    preset(folder, "base: other.yaml\nseed: 2", "foreign.yaml")
    for name in ("other", "foreign", "base"):
        with pytest.raises(ConfigError, match=rf"mine\.yaml and {name}\.yaml cannot be combined: .* base\.yaml"):
            load_config(f"{first}+{name}")
    with pytest.raises(ConfigError, match=r"there is no preset 'foriegn' beside .*Did you mean 'foreign'\?"):
        load_config(f"{first}+foriegn")
    with pytest.raises(ConfigError, match="'gsm8k_tool/tny'"):
        load_config("gsm8k_tool/tny+oracle")


def test_a_file_or_folder_may_have_a_plus_in_its_name(folder: Path) -> None:
    assert load_config(preset(folder, "base: base.yaml\nseed: 3", "a+b.yaml")).seed == 3
    inner = folder / "c++"
    inner.mkdir()
    (inner / "base.yaml").write_text(BASE, encoding="utf-8")
    first = preset(inner, "base: base.yaml\nseed: 4", "a.yaml")
    preset(inner, "base: base.yaml\ntrainer: {steps: 5}", "b.yaml")
    both = load_config(f"{first}+b")
    assert (both.seed, both.trainer.steps) == (4, 5)
    assert recipe_folder(both.recipe) == inner.resolve()


def test_a_preset_may_turn_off_a_part_that_its_base_configures(folder: Path) -> None:
    with_demos = "sft: {demos: task.demos, count: 3}"
    base = folder / "base.yaml"
    base.write_text(f"{base.read_text(encoding='utf-8')}\n{with_demos}\n", encoding="utf-8")
    assert load_config(preset(folder, "base: base.yaml\nsft: {demos: null}")).sft.demos is None


def test_a_later_way_to_start_replaces_an_earlier_one(folder: Path) -> None:
    made = preset(folder, "base: base.yaml\nmodel: {make: task.make}\nsft: {demos: task.demos, count: 3, lr: 0.1}")
    assert (load_config(made).model.path, load_config(made).model.make) == (None, "task.make")
    loaded = load_config(made, ["model.path=a/b", "sft.trajectories=runs/a"])
    assert (loaded.model.path, loaded.model.make) == ("a/b", None)
    assert (loaded.sft.demos, loaded.sft.trajectories) == (None, "runs/a")
    with pytest.raises(ConfigError, match=r"exactly one of model\.path"):
        load_config(made, ["model.path=a/b", "model.make=task.make"])
    with pytest.raises(ConfigError, match="demos or trajectories, not both"):
        load_config(made, ["sft.demos=task.demos", "sft.trajectories=runs/a"])


def test_overrides_may_turn_off_a_part_that_a_preset_configures(folder: Path) -> None:
    warm = preset(folder, "base: base.yaml\nsft: {demos: task.demos, count: 3}")
    assert load_config(warm, ["sft.demos=null"]).sft.demos is None
    with pytest.raises(ConfigError, match=r"sft\.count does nothing without sft\.demos"):
        load_config(preset(folder, "base: base.yaml\nsft: {count: 3}", "idle.yaml"), ["trainer.steps=2"])
    with pytest.raises(ConfigError, match=r"sft\.count does nothing without sft\.demos"):
        load_config(warm, ["sft.demos=null", "sft.count=4"])


@pytest.mark.parametrize("base", ["mine.yaml", "none.yaml", "../base.yml", "[base.yaml]"])
def test_a_base_must_be_another_existing_file(folder: Path, base: str) -> None:
    with pytest.raises(ConfigError, match="must name another YAML file in the same folder"):
        load_config(preset(folder, f"base: {base}\ntrainer: {{steps: 2}}"))


def test_bundled_presets_go_by_recipe_and_name() -> None:
    assert recipe_file("gsm8k_tool/tiny") == RECIPES / "gsm8k_tool" / "tiny.yaml"
    assert {"gsm8k_tool/oracle", "gsm8k_tool/tiny"} <= set(bundled_presets("gsm8k_tool"))
    assert not any(name.endswith("/base") for name in bundled_presets("gsm8k_tool"))
    assert bundled_presets("quickstart") == ["quickstart/gateway", "quickstart/thinking"]


@pytest.mark.parametrize("name", [name for recipe in bundled_recipes() for name in (recipe, *bundled_presets(recipe))])
def test_every_bundled_preset_loads_and_its_names_resolve(name: str) -> None:
    config = load_config(name)
    assert config.recipe == name
    named = [config.task.reward, config.task.rows, *map(str, config.task.tools), config.sft.demos, config.model.make]
    for dotted in filter(None, named):
        resolve(dotted, recipe=name)


def test_the_page_about_recipes_lists_all_of_them_with_their_presets() -> None:
    lines = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text(encoding="utf-8").splitlines()
    listed = {}
    for line in lines:
        if found := re.match(r"\| \[`(\w+)`\]\(.*\| ([^|]*) \|$", line):
            listed[found[1]] = {f"{found[1]}/{name}" for name in re.findall(r"`(\w+)`", found[2])}
    assert listed == {recipe: set(bundled_presets(recipe)) for recipe in bundled_recipes()}


def test_a_run_of_a_preset_finds_its_recipe_again(tmp_path: Path) -> None:
    config = load_config("gsm8k_tool/tiny")
    run = RunDir.create(tmp_path / "run", config)
    again = parse_config(RunDir.open(run.path).settings)
    assert again == config
    assert again.recipe == "gsm8k_tool/tiny"
    assert recipe_folder(again.recipe) == (RECIPES / "gsm8k_tool").resolve()
    assert recipe_name(again.recipe) == "gsm8k_tool"
    assert len(build_plan(again, resume=True).train_rows) == 16


def test_another_algorithm_does_not_inherit_settings_and_the_same_one_does() -> None:
    own = load_config("gsm8k_tool").algorithm.settings
    assert own
    assert load_config("gsm8k_tool", ["algorithm.name=grpo"]).algorithm.settings == own
    assert load_config("gsm8k_tool", ["algorithm.name=reinforce"]).algorithm.settings == {}
    given = ["algorithm.name=ppo", "algorithm.settings.clip_high=0.3"]
    assert load_config("gsm8k_tool", given).algorithm.settings == {"clip_high": 0.3}


@pytest.mark.parametrize("recipe", [name for name in bundled_recipes() if (RECIPES / name / "data.py").is_file()])
def test_every_recipe_with_data_has_a_folder_and_a_prepare_function(recipe: str) -> None:
    assert resolve("data.FOLDER", recipe=recipe).isidentifier()
    inspect.signature(resolve("data.prepare", recipe=recipe)).bind(Path(), print)


@pytest.mark.parametrize("recipe", ["gsm8k_tool", "alfworld"])
def test_gemma_is_trained_with_its_own_template_and_with_adapters(recipe: str) -> None:
    config = load_config(f"{recipe}/gemma3_270m+lora")
    assert str(config.model.path).removeprefix(PYPI) in PACKAGES
    assert recipe_path(str(config.model.chat_template), recipe=config.recipe).name == "gemma_tools.jinja"
    assert config.lora is not None
    assert config.learner.lr == 10 * load_config(recipe).learner.lr
    assert config.sft.demos == load_config(recipe).sft.demos is not None
