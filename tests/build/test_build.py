"""Plans find mistakes before anything starts; models are found, loaded and saved."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from agent_r1.build.collectors import eval_collector, greedy_collector, train_collector
from agent_r1.build.engine import build_engine, max_cached_tokens, max_episodes
from agent_r1.build.models.load import load_model, save_model
from agent_r1.build.models.source import find_model
from agent_r1.build.plan import build_plan
from agent_r1.build.resolve import resolve
from agent_r1.build.task import build_task
from agent_r1.config import RunConfig, load_config
from agent_r1.engines.base import Sampling
from agent_r1.engines.scripted import ScriptedEngine
from agent_r1.errors import AgentR1Error, ConfigError, DataError
from agent_r1.runs.run_dir import RunDir
from tests.chatml import TEMPLATE, renderer, tokenizer

MINI = str(Path(__file__).parents[1] / "mini")

TASK = """
from agent_r1 import AgentEnv

def rows(split, count=20):
    return [{"prompt": f"{split} {i}"} for i in range(count)]

def reward(row, trajectory):
    return 0.0

def make(directory, seed): ...
def demos(count, seed): ...

def no_count(split): return rows(split)
def no_default(split, count): return rows(split, count)
def other_names(n, s): ...
def needs_more(directory, seed, size): ...
def nothing(split, count=1): ...

class Torn(AgentEnv):
    def __init__(self): self.map = {}["map"]
    async def reset(self, row): ...
    async def step(self, action): ...
three = 3
"""
ENV = """
from agent_r1 import AgentEnv, AgentEnvLoop, AgentFlowBase
from agent_r1.types import Observation, StopReason

@AgentEnv.register("guess-{unique}")
class Guess(AgentEnv):
    def __init__(self, high=100):
        if high < 1:
            raise ValueError(f"high must be positive, got {{high}}")
        self.high = high
    async def reset(self, row): return Observation(messages=row.prompt)
    async def step(self, action): ...

@AgentFlowBase.register("loop-{unique}")
class Loop(AgentEnvLoop): ...

@AgentFlowBase.register("alone-{unique}")
class Alone(AgentFlowBase):
    async def run(self, row, episode): return StopReason.ANSWERED
"""
TOOL = '''
from agent_r1 import BaseTool, tool

@BaseTool.register
@tool(name="echo-{unique}")
def echo(text: str) -> str:
    """Say it again."""
    return text
'''


class Recipe:
    """A recipe folder with unique registered names."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.unique = folder, uuid.uuid4().hex[:8]
        folder.mkdir()
        self.write("base.yaml", "task: {rows: task.rows, reward: task.reward, env: env.Guess}\nmodel: {path: a/b}\n")
        self.write("task.py", TASK + "\nfrom . import env\n")
        self.write("env.py", ENV.format(unique=self.unique))

    def write(self, name: str, text: str) -> None:
        (self.folder / name).parent.mkdir(exist_ok=True)
        (self.folder / name).write_text(text, encoding="utf-8")

    def rows(self, name: str, *records: dict[str, Any]) -> None:
        self.write(name, "".join(json.dumps(record) + "\n" for record in records))

    def config(self, *overrides: str) -> RunConfig:
        return load_config(str(self.folder), overrides)


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return Recipe(tmp_path / "recipe")


def test_a_sound_recipe_becomes_a_plan(recipe: Recipe) -> None:
    plan = build_plan(recipe.config("task.train_count=7", "eval.rows=3", "task.env_kwargs={high: 9}"))
    assert [row.prompt[0]["content"] for row in plan.test_rows] == ["test 0", "test 1", "test 2"]
    assert len(plan.train_rows) == 7


def test_a_plan_for_a_model_that_the_recipe_creates_does_not_import_transformers() -> None:
    code = (
        "import sys; from agent_r1.config import load_config; from agent_r1.build.plan import build_plan; "
        "build_plan(load_config('quickstart')); print('transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_an_env_used_by_another_file_can_still_be_named(recipe: Recipe) -> None:
    recipe.write("reward.py", "from env import Guess\ndef reward(row, trajectory): return float(Guess().high)")
    build_plan(recipe.config("task.reward=reward.reward"))
    build_plan(recipe.config("task.reward=reward.reward", f"task.env=guess-{recipe.unique}"))


def test_names_that_task_py_or_its_imports_register_are_known(recipe: Recipe) -> None:
    recipe.write("task.py", TASK + "\nfrom . import env, tools\n")
    recipe.write("tools.py", TOOL.format(unique=recipe.unique))
    names = (f"task.env=guess-{recipe.unique}", f"task.flow=loop-{recipe.unique}")
    build_plan(recipe.config(*names))
    build_plan(recipe.config("task.env=tool", f"task.tools=[echo-{recipe.unique}]"))
    # tools that only rows name, as published rows do
    recipe.rows("train.jsonl", {"prompt": "a", "env_kwargs": {"env_type": "tool", "tools": [f"echo-{recipe.unique}"]}})
    recipe.rows("test.jsonl", {"prompt": "b"})
    build_plan(recipe.config("task.rows='{split}.jsonl'"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["task.rows=task.no_count"], r"task\.rows='task\.no_count' .* no_count\(split=\.\.\., count="),
        (["task.rows=task.no_default"], r"called as no_default\(split=\.\.\.\): missing a required argument: 'count'"),
        (["task.rows=task.three"], r"task\.rows='task\.three' .* it is 3, not a function"),
        (["task.rows=task.nothing"], r"nothing returned NoneType for split 'train'"),
        (["task.reward=task.no_count"], r"reward 'task\.no_count' must accept \(row, trajectory\)"),
        (["model.path=null", "model.make=task.other_names"], r"model\.make=.* as other_names\(directory=\.\.\., seed="),
        (["model.path=null", "model.make=task.needs_more"], "missing a required argument: 'size'"),
        (["model.path=null", "model.make=task.mak"], "task has no 'mak'. Did you mean 'make'"),
        (["sft.demos=task.other_names"], r"sft\.demos=.* other_names\(count=\.\.\., seed=\.\.\.\)"),
        (["sft.demos=task.demoes"], "task has no 'demoes'. Did you mean 'demos'"),
        (["sft.trajectories=runs/none"], r"sft\.trajectories='runs/none'"),
        (["model.path=./none"], r"'\./none'"),
        (["model.chat_template=none.jinja"], r"file 'none\.jinja' is not in .*recipe"),
        (["task.env_kwargs={hi: 3}"], r"row 'train-0' cannot be played: env 'env.Guess' does not accept .*'hi'"),
        (
            ["task.env_kwargs={high: 0}"],
            r"row 'train-0' cannot be played: ValueError: high must be positive, got 0 \(env\.py:\d+\)$",
        ),
        (["task.env=task.Torn"], r"row 'train-0' cannot be played: KeyError: 'map' \(task\.py:\d+\)$"),
        (["task.env=tool"], r"row 'train-0' cannot be played: task\.tools is empty: name .*task\.flow=single_step$"),
        (["task.env=gues"], "unknown env 'gues'"),
        (["task.flow=env.Guess"], r"'env\.Guess' is .*, not a subclass of AgentFlowBase"),
        (["algorithm.name=grop"], "Did you mean 'grpo'"),
    ],
)
def test_mistakes_are_found_before_anything_starts(
    recipe: Recipe, overrides: list[str], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AgentR1Error, match=message):
        build_plan(recipe.config(*overrides))


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"agent_name": "nobody"}, "row 'test-2' cannot be played: unknown flow 'nobody'"),
        ({"env_kwargs": {"env_type": ["x"]}}, "row 'test-2' cannot be played: TypeError: unhashable"),
        ({"env_kwargs": {"env_type": "nowhere"}}, "row 'test-2' cannot be played: unknown env 'nowhere'"),
        ({"env_kwargs": {"hi": 1}}, "row 'test-2' cannot be played: env 'env.Guess' does not accept these env_kwargs"),
        (
            {"agent_name": "single_step", "env_kwargs": {"env_type": "nowhere"}},
            "row 'test-2' cannot be played: unknown env 'nowhere'",
        ),
    ],
)
def test_every_kind_of_row_is_checked(recipe: Recipe, record: dict[str, Any], message: str) -> None:
    recipe.rows("data/train.jsonl", {"prompt": "a"}, {"prompt": "b"})
    recipe.rows("data/test.jsonl", {"prompt": "c"}, {"prompt": "d"}, {"prompt": "e"} | record)
    config = recipe.config("task.rows='data/{split}.jsonl'")
    with pytest.raises(ConfigError, match=message):
        build_plan(config)


def test_flows_without_an_env_need_none(recipe: Recipe) -> None:
    for flow in ("single_step", f"alone-{recipe.unique}"):
        build_plan(recipe.config(f"task.flow={flow}", "task.env=tool"))  # a ToolEnv could not be made without tools


def test_the_start_of_a_run_may_be_gone_when_it_is_resumed(recipe: Recipe) -> None:
    config = recipe.config("model.path=./gone", "sft.trajectories=./gone", "sft.epochs=1")
    with pytest.raises(ConfigError, match="there is no such directory"):
        build_plan(config)
    build_plan(config, resume=True)


def test_data_files_are_looked_up_beside_the_recipe_first(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for split in ("train", "test"):
        (tmp_path / "data" / f"{split}.jsonl").write_text(json.dumps({"prompt": f"here {split}"}), encoding="utf-8")
    config = recipe.config("task.rows='data/{split}.jsonl'")
    assert build_task(config).test_rows()[0].prompt[0]["content"] == "here test"
    recipe.rows("data/train.jsonl", {"prompt": "beside train"})
    recipe.rows("data/test.jsonl", {"prompt": "beside test"})
    for rows in ("data/{split}.jsonl", "data/"):
        task = build_task(recipe.config(f"task.rows='{rows}'"))
        assert task.test_rows()[0].prompt[0]["content"] == "beside test"


def test_counts_are_upper_bounds(recipe: Recipe) -> None:
    recipe.rows("data/train.jsonl", *({"prompt": f"a{i}"} for i in range(5)))
    recipe.rows("data/test.jsonl", *({"prompt": f"b{i}"} for i in range(30)))
    plan = build_plan(recipe.config("task.rows='data/{split}.jsonl'", "task.train_count=6"))
    assert (len(plan.train_rows), len(plan.test_rows)) == (5, 30)  # eval.rows is 200
    recipe.write("few.py", "def rows(split, count):\n    for i in range(3):\n        yield {'prompt': f'{split} {i}'}")
    plan = build_plan(recipe.config("task.rows=few.rows", "task.train_count=2"))
    assert (len(plan.train_rows), len(plan.test_rows)) == (2, 3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["task.rows=all.jsonl"], r"Both splits are read from 'all\.jsonl': use \{split\} in task\.rows"),
        (["task.rows='{split}.jsonl'", "task.test_split=train"], r"Both splits are 'train': set task\.test_split"),
        (["task.rows='{split}.jsonl'", "task.test_split=copy"], "one of the splits"),
    ],
)
def test_a_test_row_that_is_also_a_training_row_is_refused(recipe: Recipe, settings: list[str], message: str) -> None:
    def published(index: int, split: str) -> dict[str, Any]:
        return {"prompt": "1 + 1?", "extra_info": {"index": index, "split": split}, "ability": "math"}

    recipe.rows("all.jsonl", published(0, "train"))
    recipe.rows("train.jsonl", published(0, "train"))
    recipe.rows("copy.jsonl", published(7, "copy"))  # how a row numbers itself does not make it another task
    with pytest.raises(ConfigError, match=f"is the same task as training row 'train-0'.*{message}"):
        build_plan(recipe.config(*settings))


def test_rows_that_differ_in_anything_the_policy_may_meet_are_different_tasks(recipe: Recipe) -> None:
    train, test = {"prompt": "guess", "level": 1}, {"prompt": "guess", "level": 2}  # columns are kept as extra_info
    recipe.rows("train.jsonl", train)
    recipe.rows("test.jsonl", test, {"prompt": "guess", "env_kwargs": {"high": 3}})
    assert len(build_plan(recipe.config("task.rows='{split}.jsonl'")).test_rows) == 2


def test_an_unknown_placeholder_is_a_clear_error(recipe: Recipe) -> None:
    with pytest.raises(DataError, match=r"data/\{name\}\.jsonl"):
        build_plan(recipe.config("task.rows='data/{name}.jsonl'"))


def test_evaluation_uses_its_sampling_settings(recipe: Recipe) -> None:
    config = recipe.config("eval.temperature=0.5", "eval.top_p=0.9", "eval.top_k=5", "rollout.max_response_tokens=9")
    expected = Sampling(max_tokens=9, temperature=0.5, top_p=0.9, top_k=5, stop_ids=renderer().stop_ids)
    engine = ScriptedEngine([], tokenizer=tokenizer())
    assert eval_collector(config, build_task(config), renderer(), engine).sampling == expected


def test_training_keeps_the_support_of_a_truncated_distribution(recipe: Recipe) -> None:
    engine = ScriptedEngine([], tokenizer=tokenizer())

    def samplings(*overrides: str) -> tuple[Sampling, Sampling, Sampling]:
        config = recipe.config("rollout.max_response_tokens=9", *overrides)
        made = (train_collector, greedy_collector, eval_collector)
        return tuple(make(config, build_task(config), renderer(), engine).sampling for make in made)  # type: ignore[return-value]

    plain = Sampling(max_tokens=9, stop_ids=renderer().stop_ids)
    greedy = replace(plain, temperature=0.0)
    assert samplings() == (plain, greedy, greedy)
    kept = replace(plain, top_p=0.9, top_k=40, keep_support=True)
    assert samplings("rollout.top_p=0.9", "rollout.top_k=40") == (kept, greedy, greedy)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("model")
    resolve("task.make_model", recipe=MINI)(directory=folder, seed=0)
    return folder


def test_a_chat_template_of_the_recipe_is_saved_with_the_model(
    recipe: Recipe, model_folder: Path, tmp_path: Path
) -> None:
    template = TEMPLATE.replace("{% for", "{# ours #}{% for", 1)
    recipe.write("ours.jinja", template)
    settings = [f"model.path={model_folder}", "rollout.max_context_tokens=512"]
    model = load_model(recipe.config(*settings, "model.chat_template=ours.jinja"), model_folder)
    save_model(model, tmp_path / "saved")
    assert AutoTokenizer.from_pretrained(str(tmp_path / "saved")).chat_template == template
    assert load_model(recipe.config(*settings), tmp_path / "saved").renderer.stop_ids == model.renderer.stop_ids


READS = TEMPLATE + (
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% generation %}{% endgeneration %}"
    "{% endif %}{{ namespace(day=strftime_now('%d')).day if dated }}{{ eos_token if closed }}"
)


def with_template_kwargs(recipe: Recipe, folder: Path, template: str, *given: str) -> None:
    recipe.write("reads.jinja", template)
    settings = [f"model.path={folder}", "rollout.max_context_tokens=512", "model.chat_template=reads.jinja"]
    load_model(recipe.config(*settings, *(f"model.template_kwargs.{each}" for each in given)), folder)


def test_settings_that_the_chat_template_reads_are_taken(recipe: Recipe, model_folder: Path) -> None:
    with_template_kwargs(recipe, model_folder, READS, "enable_thinking=false", "eos_token='<|im_end|>'", "dated=true")


@pytest.mark.parametrize(
    ("template", "given", "message"),
    [
        (READS, "enable_thinkin=false", r"template_kwargs\.enable_thinkin: .*Did you mean 'enable_thinking'"),
        (TEMPLATE, "enable_thinking=false", r"template_kwargs\.enable_thinking: "),
        (TEMPLATE, "add_generation_prompt=false", r"template_kwargs\.add_generation_prompt"),
    ],
)
def test_settings_that_the_chat_template_does_not_read_are_errors(
    recipe: Recipe, model_folder: Path, template: str, given: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        with_template_kwargs(recipe, model_folder, template, given)


def test_a_setting_may_be_read_by_any_of_several_templates(recipe: Recipe, model_folder: Path, tmp_path: Path) -> None:
    made, folder = AutoTokenizer.from_pretrained(str(model_folder)), tmp_path / "several"
    made.chat_template = {"default": TEMPLATE, "tool_use": READS}
    shutil.copytree(model_folder, folder)
    made.save_pretrained(folder)
    settings = [f"model.path={folder}", "rollout.max_context_tokens=512"]
    load_model(recipe.config(*settings, "model.template_kwargs.enable_thinking=false"), folder)
    with pytest.raises(ConfigError, match=r"template_kwargs\.thinking: .*'enable_think"):
        load_model(recipe.config(*settings, "model.template_kwargs.thinking=false"), folder)


def test_a_run_means_its_newest_checkpoint_and_anything_else_means_itself(
    recipe: Recipe, model_folder: Path, tmp_path: Path
) -> None:
    run = RunDir.create(tmp_path / "run", recipe.config())
    with pytest.raises(ConfigError, match=r"the run .*run has no checkpoint yet"):
        find_model(str(run.path))
    for step in ("step_000002", "step_000010"):
        (run.checkpoints / step).mkdir(parents=True)
        (run.checkpoints / step / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    assert find_model(str(run.path)) == str(run.checkpoints / "step_000010")
    assert find_model(str(run.checkpoints / "step_000002")) == str(run.checkpoints / "step_000002")
    (model_folder / "checkpoints").mkdir(exist_ok=True)  # does not make a run of a model
    assert find_model(str(model_folder)) == str(model_folder)
    assert find_model("owner/name") == "owner/name"


def test_data_errors_stay_data_errors(recipe: Recipe) -> None:
    with pytest.raises(DataError, match=r"no data file at .*recipe/none\.jsonl or /.*none\.jsonl"):
        build_plan(recipe.config("task.rows=none.jsonl"))


@pytest.mark.parametrize(
    ("changes", "most"),
    [
        (["rollout.rows_per_step=16", "rollout.group_size=8", "eval.rows=100"], 128),  # 16 x 8 train, 100 are evaluated
        (["rollout.rows_per_step=4", "eval.rows=50", "eval.samples=3", "eval.temperature=1.0"], 150),
        (["eval.rows=null", "rollout.max_concurrent=300"], 300),  # as many as there may be
        (["rollout.rows_per_step=64", "rollout.group_size=16", "rollout.max_concurrent=512"], 512),
    ],
)
def test_the_engine_is_sized_for_the_maximum_number_of_episodes(changes: list[str], most: int) -> None:
    config = load_config("quickstart", changes)
    assert max_episodes(config) == most
    # a context is up to 1,000 tokens, in 32 blocks of 32
    assert max_cached_tokens(load_config("quickstart", [*changes, "rollout.max_context_tokens=1000"])) == most * 1024


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        # 16 blocks of 32 are 512
        (
            ["engine.max_cached_tokens=530", "rollout.max_context_tokens=530"],
            r"of 530 tokens holds 512.*max_context_tokens=530",
        ),
        (["engine.max_cached_tokens=300"], r"holds 288.*=4096: raise engine\.max_cached_tokens"),
        (["rollout.max_context_tokens=131073"], r"holds 131072.*=131073: raise engine\.max_cached_tokens"),
        (["engine.max_cached_tokens=544", "rollout.max_context_tokens=530"], None),
        (["rollout.max_context_tokens=131072"], None),
    ],
)
def test_a_cache_smaller_than_one_context_is_refused(
    recipe: Recipe, model_folder: Path, sizes: list[str], message: str | None
) -> None:
    model = load_model(recipe.config("model.device=cpu", "rollout.max_context_tokens=512"), model_folder)
    config = recipe.config("model.device=cpu", *sizes)
    for make in (build_plan, lambda config: build_engine(config, model)):
        if message is None:
            make(config)
        else:
            with pytest.raises(ConfigError, match=message):
                make(config)
