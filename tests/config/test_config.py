"""The config: unknown keys, wrong types and contradictions are errors that say what was meant."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

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
        ("rollout.group_sise=4", "rollout has no field 'group_sise'. Did you mean 'group_size'? Fields: rows_per_step"),
        ("learner.group_size=4", "learner has no field 'group_size'. Did you mean 'rollout.group_size'?"),
        ("trainr.steps=4", "the recipe has no field 'trainr'. Did you mean 'trainer'?"),
        ("lr=1e-4", "the recipe has no field 'lr'. Did you mean 'learner.lr'?"),
        (
            "correction=truncate",
            "correction='truncate': correction is a section. Did you mean correction.kind=truncate?",
        ),
        ("algorithm=gpro", "algorithm='gpro': algorithm is a section. Did you mean algorithm.name=grpo?"),
        ("context=windo", "context='windo': context is a section. Did you mean context.policy=window?"),
        ("trainer=3", "trainer=3: trainer is a section. Fields: mode, "),
        ("trainer.steps", "override 'trainer.steps' is not of the form section.key=value"),
        ("trainer.steps=[1", "override 'trainer.steps=[1' cannot be read"),
        ("recipe=other", "recipe is not a setting"),
        ("model.path=null", "exactly one of model.path and model.make"),
        ("rollout.max_response_tokens=9999", "rollout.max_response_tokens (9999)"),
        ("rollout.roles.judge.max_response_tokens=9999", "rollout.roles.judge.max_response_tokens (9999)"),
        ("learner.num_minibatches=129", "learner.num_minibatches=129 is more than the 128 episodes of a step"),
        ("eval.samples=4", "eval.samples > 1 with eval.temperature=0"),
        ("eval.top_p=0.5", "eval.top_p and eval.top_k do nothing at eval.temperature=0"),
        ("rollout.top_p=0.9", "rollout.top_p=0.9, rollout.top_k=0: training needs a top_k of 2 to 1024"),
        ("rollout.top_k=1025", "rollout.top_k=1025: training needs a top_k of 2 to 1024"),
        ("rollout.top_k=1", "rollout.top_k=1: training needs a top_k of 2 to 1024"),
    ],
)
def test_a_wrong_setting_is_an_error_that_helps(recipe: str, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(recipe, [override])


NOT_AN_INTEGER = "input should be a valid integer"
AS_TEXT = ", not text; write {} without quotes, and a variable as ${{oc.decode:${{oc.env:NAME}}}}"


@pytest.mark.parametrize(
    ("override", "value", "message"),
    [
        ("trainer.steps=many", "'many'", NOT_AN_INTEGER),
        ("rollout.group_size=true", "true", NOT_AN_INTEGER),
        ("rollout.group_size=null", "null", NOT_AN_INTEGER),
        ("eval.rows=off", "false", NOT_AN_INTEGER),
        ("rollout.group_size=2.5", "2.5", NOT_AN_INTEGER),
        ("rollout.group_size=2.0", "2.0", f"{NOT_AN_INTEGER}; write 2"),
        ("algorithm.kl_horizon=1e4", "10000.0", f"{NOT_AN_INTEGER}; write 10000"),
        ("eval.rows=None", "'None'", f"{NOT_AN_INTEGER}; write null"),
        ("rollout.group_size='8'", "'8'", NOT_AN_INTEGER + AS_TEXT.format(8)),
        ("rollout.group_size=08", "'08'", NOT_AN_INTEGER + AS_TEXT.format(8)),
        (f"rollout.group_size={'many' * 100}", f"'{('many' * 50)[:-1]}...", NOT_AN_INTEGER),
        ("learner.lr=true", "true", "input should be a valid number"),
        ("learner.lr='1e-2'", "'1e-2'", "input should be a valid number" + AS_TEXT.format(0.01)),
        ("trainer.deterministic=1", "1", "input should be a valid boolean; write true"),
        ("engine.compile=0", "0", "input should be a valid boolean; write false"),
        ("trainer.deterministic=2", "2", "input should be a valid boolean"),
        ("trainer.deterministic='true'", "'true'", "input should be a valid boolean" + AS_TEXT.format("true")),
        ("track=wandb", "'wandb'", "input should be a valid list; write [wandb]"),
        ("trainer.max_minutes=.inf", "inf", "input should be a finite number"),
        ("task.success_reward=.nan", "nan", "input should be a finite number"),
        ("rollout.temperature=0", "0", "input should be greater than 0"),
        ("rollout.top_p=0", "0", "input should be greater than 0"),
        ("rollout.top_p=1.5", "1.5", "input should be less than or equal to 1"),
        ("rollout.top_k=-1", "-1", "input should be greater than or equal to 0"),
        ("seed=-1", "-1", "input should be greater than or equal to 0"),
        ("seed=4294967296", "4294967296", "input should be less than 4294967296"),
    ],
)
def test_a_value_of_another_type_or_range_is_refused_in_one_line(
    recipe: str, override: str, value: str, message: str
) -> None:
    name = override.partition("=")[0]
    with pytest.raises(ConfigError, match=f"^{re.escape(f'{name}={value}: {message}')}$"):
        load_config(recipe, [override])


@pytest.mark.parametrize(
    ("override", "name"),
    [
        ("learner.betas=[0.9,1.0]", "learner.betas.1=1.0"),
        ("learner.betas=[true,0.9]", "learner.betas.0=true"),
        ("learner.betas=[0.9]", "learner.betas=[0.9]: too few numbers"),
        ("context={policy: window, turns: true}", "context.turns=true"),
        ("lora.target_modules=[]", "lora.target_modules"),
    ],
)
def test_a_wrong_value_inside_a_list_or_a_section_of_several_kinds_is_named(
    recipe: str, override: str, name: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(name)):
        load_config(recipe, [override])


@pytest.mark.parametrize("overrides", [["learner.betas.0=0.8"], ["task=[1]"], ["model=[1]", "model.path=a"]])
def test_a_list_that_meets_a_section_is_told(recipe: str, overrides: list[str]) -> None:
    Path(recipe).write_text(MINIMAL + "learner: {betas: [0.9, 0.95]}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot combine"):
        load_config(recipe, overrides)


def test_a_whole_number_stands_for_any_number_and_a_variable_can_be_read_as_one(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTEMPTS", "6")
    config = load_config(recipe, ["learner.lr=1", "rollout.group_size=${oc.decode:${oc.env:ATTEMPTS}}"])
    assert isinstance(config.learner.lr, float)
    assert config.rollout.group_size == 6
    assert load_config(recipe, ["trainer.deterministic=on"]).trainer.deterministic is True


@pytest.mark.parametrize(
    ("settings", "idle"),
    [
        (["sft.demos=task.demos", "sft.min_reward=0.5"], "sft.min_reward"),
        (["sft.lr=0.1"], "sft.lr"),
        (["task.flow=gateway", "gateway.agent=task.agent", "gateway.stdin=row"], "gateway.stdin"),
        (["task.flow=gateway", "gateway.agent=task.agent", "task.tools=[task.a]"], "task.tools"),
        (["task.flow=gateway", "gateway.agent=task.agent", "task.tools=[]"], None),
        (["verl.workers=2"], "verl"),
        (["model.fp32_head=true", "engine={kind: vllm, python: p}"], "model.fp32_head"),
        (["engine={kind: vllm, urls: ['http://a:1'], gpus: [0]}"], "engine.gpus"),
        (["engine={kind: vllm, urls: ['http://a:1'], args: [--x]}"], "engine.args"),
        (["engine={kind: vllm, python: p, sleep: true}"], "engine.sleep"),
        (["engine={kind: vllm, python: p, sleep: true, gpus: [0]}"], None),
        (["engine={kind: vllm, python: p, send_adapters: true}"], "engine.send_adapters"),
        (["sft.trajectories=runs/a", "sft.count=3"], "sft.count"),
        (["sft.min_reward=0"], "sft.min_reward"),
        (["algorithm.kl_coef=0", "algorithm.kl_in=reward", "algorithm.kl_target=0.1"], "algorithm.kl_(in|target)"),
        (["task.rows='{split}.jsonl'", "task.rows_kwargs={n: 3}"], "task.rows_kwargs"),
        (["algorithm.kl_coef=0", "algorithm.kl_estimator=k3"], "algorithm.kl_estimator"),  # also when it is the default
        (["sft.demos=task.demos", "sft.count=3", "sft.lr=0.1"], None),
        (["sft.trajectories=runs/a", "sft.min_reward=0.5", "sft.epochs=1"], None),
        (["algorithm.kl_coef=0.1", "algorithm.kl_estimator=k2"], None),
        # What is compared with the time before the first update differs from the second one on.
        (["algorithm.name=ppo", "critic.value_clip=0.5"], "critic.value_clip"),
        (["algorithm.name=ppo", "critic.value_clip=0.5", "learner.num_epochs=2"], None),
        (["algorithm.name=ppo", "critic.value_clip=0.5", "learner.num_minibatches=2"], None),
        (["learner.target_kl=0.1"], "learner.target_kl"),
        (["learner.target_kl=0.1", "learner.num_epochs=2"], None),
        (["learner.min_lr_ratio=0.2"], "learner.min_lr_ratio"),
        (["learner.min_lr_ratio=0.2", "learner.schedule=constant"], "learner.min_lr_ratio"),
        (["learner.min_lr_ratio=0.2", "learner.schedule=linear"], None),
        (["algorithm.name=ppo", "learner.min_lr_ratio=0.2", "critic.schedule=cosine"], None),
        # Without the comparison of steps, gigpo is grpo.
        (["algorithm.name=gigpo", "algorithm.settings={step_weight: 0, gamma: 0.9}"], "algorithm.settings.gamma"),
        (["algorithm.name=gigpo", "algorithm.settings={step_weight: 0, anchor: prompt}"], "algorithm.settings.anchor"),
        (["algorithm.name=gigpo", "algorithm.settings={step_weight: 0}"], None),
        (["algorithm.name=gigpo", "algorithm.settings={anchor: observation}"], None),
    ],
)
def test_a_setting_that_does_nothing_is_an_error_in_a_recipe_as_in_an_override(
    recipe: str, settings: list[str], idle: str | None
) -> None:
    written = Path(recipe).with_name("written.yaml")
    tree = OmegaConf.merge(OmegaConf.create(MINIMAL), OmegaConf.from_dotlist(settings))
    written.write_text(OmegaConf.to_yaml(tree), encoding="utf-8")
    for name, overrides in ((recipe, settings), (str(written), [])):
        if idle is None:
            load_config(name, overrides)
        else:
            with pytest.raises(ConfigError, match=f"{idle} does nothing without"):
                load_config(name, overrides)


def test_overrides_may_turn_off_or_on_what_the_recipes_settings_belong_to(recipe: str) -> None:
    warm = MINIMAL + "sft: {demos: task.demos, count: 8, lr: 0.1}\n"
    Path(recipe).write_text(warm, encoding="utf-8")
    load_config(recipe, ["sft.demos=null"])
    load_config(recipe, ["sft.demos=null", "sft.trajectories=runs/a", "sft.min_reward=0.5"])
    with pytest.raises(ConfigError, match=r"sft\.count does nothing"):
        load_config(recipe, ["sft.demos=null", "sft.count=3"])
    Path(recipe).write_text(MINIMAL + "algorithm: {kl_estimator: k2}\n", encoding="utf-8")
    assert load_config(recipe, ["algorithm.kl_coef=0.1"]).algorithm.kl_estimator == "k2"
    with pytest.raises(ConfigError, match=r"algorithm\.kl_estimator does nothing"):
        load_config(recipe)


@pytest.mark.parametrize(
    ("below", "override", "ignored"),
    [
        ("model: {fp32_head: true}", "engine={kind: vllm, python: p}", "model.fp32_head"),
        ("gateway: {agent: task.agent}\ntask: {tools: [task.a]}", "task.flow=gateway", "task.tools"),
        ("gateway: {agent: task.agent}\ntask: {env_kwargs: {a: 1}}", "task.flow=gateway", "task.env_kwargs"),
        ("task: {rows_kwargs: {n: 3}}", "task.rows=rows.jsonl", "task.rows_kwargs"),
        ("task: {rows: rows.jsonl}\ndata: {map: {prompt: q}}", "task.rows=task.rows", "data.map"),
        ("algorithm: {kl_coef: 0.1, kl_in: reward}", ["algorithm.kl_coef=0", "algorithm.kl_target=0.1"], "kl_target"),
    ],
)
def test_an_override_may_not_make_a_recipes_setting_idle_unnoticed(
    recipe: str, below: str, override: str | list[str], ignored: str
) -> None:
    tree = OmegaConf.merge(OmegaConf.create(MINIMAL), OmegaConf.create(below))
    Path(recipe).write_text(OmegaConf.to_yaml(tree), encoding="utf-8")
    with pytest.raises(ConfigError, match=f"{ignored} does nothing without"):
        load_config(recipe, [override] if isinstance(override, str) else override)


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
    with pytest.raises(ConfigError, match=r"no recipe or file 'quickstrt'\. Did you mean 'quickstart'\?"):
        load_config("quickstrt")
    for wrong in (str(tmp_path / "nope.yaml"), "./nope.yml", "nope.yaml", "quickstart/nope.yaml", "no/such/folder"):
        with pytest.raises(ConfigError, match=rf"^there is no recipe or file '{re.escape(wrong)}'"):
            load_config(wrong)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"^there is no file .*/empty/base\.yaml"):
        load_config(str(tmp_path / "empty"))
    for text, message in (("- a\n- b\n", "must hold a mapping of sections"), ("seed: ${nowhere}", "nowhere")):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=message):
            load_config(str(path))


def test_a_config_survives_its_own_json(recipe: str) -> None:
    for settings in (["seed=3"], ["sft.demos=task.demos"], ["sft.trajectories=runs/a", "algorithm.kl_coef=0.1"]):
        config = load_config(recipe, settings)  # every field is in the JSON, also those that do nothing here
        assert parse_config(RunConfig.model_validate_json(config.model_dump_json()).model_dump()) == config
        assert parse_config(json.loads(config.model_dump_json())) == config  # as a run directory is opened


@pytest.mark.parametrize("value", ["[" * 2000 + "]" * 2000, "9" * 6000])
def test_values_that_python_cannot_parse_are_config_errors(tmp_path: Path, value: str) -> None:
    (tmp_path / "base.yaml").write_text(f"task: {{env_kwargs: {{a: {value}}}}}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"base\.yaml"):
        load_config(str(tmp_path))
    with pytest.raises(ConfigError, match=r"overrides|task\.env_kwargs\.a"):
        load_config("quickstart", [f"task.env_kwargs.a={value}"])
