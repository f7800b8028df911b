"""Context policies in whole runs: each is warm-started, trained, evaluated and talked to, and what would be ignored is
refused."""

from __future__ import annotations

import asyncio
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from agent_r1.build.collectors import eval_collector, greedy_collector, train_collector
from agent_r1.build.models.load import load_model
from agent_r1.build.plan import build_plan
from agent_r1.build.start import base_model, sft_trajectories, warm_start_key
from agent_r1.build.task import build_task
from agent_r1.cli.commands.play import run_eval
from agent_r1.cli.commands.train import run_training
from agent_r1.config import RunConfig, load_config, parse_config
from agent_r1.engines.base import Completion, Prompt, Sampling
from agent_r1.engines.scripted import ScriptedEngine
from agent_r1.errors import ConfigError, DataError
from agent_r1.flows.flow import AgentEnvLoop, AgentFlowBase
from agent_r1.learn.batch.packs import merge_steps
from agent_r1.runs.outcomes import Subject
from agent_r1.runs.run_dir import RunDir
from agent_r1.runs.trajectories import read_trajectories
from agent_r1.types import Message, Observation, StopReason, TaskRow, Trajectory
from tests.chatml import collector, renderer, row, tokenizer
from tests.engines.engine_sides import assert_logprobs_match, both, engine
from tests.engines.tiny_models import tiny
from tests.flows.test_context_episode import POLICIES, Vault

BASE = """
task: {rows: task.rows, env: task.Walk, reward: task.reward}
model: {make: task.make_model, device: cpu}
sft: {demos: task.demos, count: 16, epochs: 6, batch_size: 4, lr: 1.0e-2}
rollout: {rows_per_step: 3, group_size: 4, max_steps: 6, max_response_tokens: 12, max_context_tokens: 400}
learner: {lr: 1.0e-3}
trainer: {steps: 2, eval_every: 2, save_every: 2, threads: 1}
engine: {threads: 1, max_cached_tokens: 8192}
eval: {rows: 2}
"""
TASK = """
from agent_r1 import AgentEnv, AgentEnvLoop, AgentFlowBase, Reply, TextEnv
from agent_r1.types import Observation, StopReason, TaskRow
from tests.mini.task import make_model as make_model

class Walk(TextEnv):
    def begin(self, row):
        self.place = 0
        return f"walk to {row.row_id}"

    def reply(self, said):
        self.place += 1
        return Reply(text=f"place {self.place}, says {said}", done=self.place == 6, reward=0.1 * said.count("a"))

def rows(split, count=12):
    return [TaskRow(prompt=[], row_id=f"{split}-{i}", extra_info={"n": f"{split}{i}"}) for i in range(count)]

def demos(count, seed):
    return [(row, ["ab", "ba", "a", "b", "aa", "bb"]) for row in rows("train", count)]

def reward(row, trajectory):
    return trajectory.num_response_tokens % 3 / 2

def remember(messages):
    return f"seen {sum(m['role'] == 'assistant' for m in messages)}"

async def forget(messages):
    return [messages[0], messages[-1]]

def nonsense(messages):
    return 7

def no_arguments():
    return ""

@AgentEnv.register("terse_of_a_row")
class Terse(Walk):
    if_forgotten = {"whole": True}

    def __init__(self, whole: bool = False):
        pass

class Own(AgentFlowBase):
    async def run(self, row, episode):
        await episode.act(Observation(messages=[{"role": "user", "content": "?"}]))
        return StopReason.ANSWERED

class Aware(AgentEnvLoop):
    uses_context = True

    async def run(self, row, episode):
        return await super().run(row, episode)
"""
SETTINGS: dict[str, list[str]] = {
    "append": [],
    "window": ["context.turns=2"],
    "drop_results": ["context.keep=1", "context.placeholder=gone"],
    "summary": ["context.max_tokens=180", "context.summary_tokens=16", "context.demo_summary=task.remember"],
    "rewrite": ["context.function=task.forget"],
    "notes": ["context.turns=1", "context.notes=2", "context.note_chars=20"],
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, cache: None) -> str:
    folder = tmp_path_factory.mktemp("recipe")
    (folder / "base.yaml").write_text(BASE, encoding="utf-8")
    (folder / "task.py").write_text(TASK, encoding="utf-8")
    return str(folder)


def config(recipe: str, policy: str, *more: str) -> RunConfig:
    return load_config(recipe, [f"context.policy={policy}", *SETTINGS[policy], *more])


@pytest.fixture(scope="module", params=list(SETTINGS))
def run(request: pytest.FixtureRequest, recipe: str, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Two steps of training with a policy, from demonstrations played with it."""
    chosen = config(recipe, request.param)
    made = RunDir.create(tmp_path_factory.mktemp("runs") / request.param, chosen)
    run_training(chosen, build_plan(chosen), made, Console(file=io.StringIO()), resume=False)
    return made


def test_an_evaluation_says_what_the_policy_did(run: RunDir) -> None:
    shown = Console(file=io.StringIO(), width=200)
    run_eval(parse_config(run.settings), run, shown)
    assert isinstance(shown.file, io.StringIO)
    told = [line.split()[0] for line in shown.file.getvalue().splitlines() if line.startswith("  context/")]
    shows_all = run.settings["context"]["policy"] == "append"
    names = [] if shows_all else ["hidden_messages", "summaries", "bad_summaries"]
    assert told == [f"context/{name}" for name in names]


def test_every_policy_trains_on_exactly_what_it_showed(run: RunDir) -> None:
    policy = run.settings["context"]["policy"]
    records = run.read_metrics("train")
    assert [record["step"] for record in records] == [1, 2]
    assert all(record["mismatch_max"] < 1e-4 for record in records)  # sampler and learner read the same prompts
    assert all(record["stop/error"] == 0 for record in records)
    assert any(record["loss"] != 0 for record in records)
    assert all(("context/hidden_messages" in record) is (policy != "append") for record in run.read_metrics())
    trajectories = list(read_trajectories(run.path / "trajectories", "train_*"))
    assert max(len(trajectory.steps) for trajectory in trajectories) > 3
    assert sum(len(s.trained) for s in merge_steps(trajectories)) == sum(t.num_response_tokens for t in trajectories)
    wrote = [trajectory for trajectory in trajectories if any(step.is_summary for step in trajectory.steps)]
    assert bool(wrote) is (policy == "summary")
    segments = [len(merge_steps([trajectory])) for trajectory in trajectories]
    assert (max(segments) == 1) is (policy == "append")  # episodes are long enough for every other to hide something
    if policy == "summary":
        assert segments == [1 + sum(step.is_summary for step in trajectory.steps) for trajectory in trajectories]


def test_a_run_keeps_its_policy_and_evaluations_say_which_it_was(run: RunDir) -> None:
    policy = run.settings["context"]["policy"]
    config = parse_config(RunDir.open(run.path).settings)
    assert parse_config(json.loads(config.model_dump_json())) == config
    known = Subject.of(run.settings, model="m", panel="p").settings
    assert known.get("context", {"policy": "append"})["policy"] == policy
    model = load_model(config, base_model(config))
    made = train_collector(config, build_task(config), model.renderer, ScriptedEngine([]))
    assert (made.make_flow(TaskRow(prompt=[])).context is None) is (policy == "append")


@pytest.mark.parametrize("policy", ["window", "summary"])
def test_demonstrations_are_played_with_the_policy(recipe: str, policy: str) -> None:
    chosen = config(recipe, policy)
    played = demonstrated(chosen)
    assert {trajectory.stop for trajectory in played} == {StopReason.ANSWERED}
    for trajectory in played:
        actions = [step.action_text for step in trajectory.steps if not step.is_summary]
        assert actions == ["ab", "ba", "a", "b", "aa", "bb"]
        summaries = [step.action_text for step in trajectory.steps if step.is_summary]
        assert summaries == (["seen 4"] if policy == "summary" else [])  # of the whole conversation, whatever is shown


def demonstrated(chosen: RunConfig) -> list[Trajectory]:
    return asyncio.run(sft_trajectories(chosen, build_task(chosen), renderer(), lambda line: None))


def test_invalid_expert_summaries_are_errors(recipe: str) -> None:
    with pytest.raises(DataError, match=r"failed when played: .*demo_summary returned 7; it must return a string"):
        demonstrated(config(recipe, "summary", "context.demo_summary=task.nonsense"))
    with pytest.raises(DataError, match=r"demo_summary wrote 7 tokens, and 3 are allowed: 'seen"):
        demonstrated(config(recipe, "summary", "context.summary_tokens=3"))


def test_a_warm_start_with_another_policy_is_another_warm_start(recipe: str) -> None:
    chosen = [config(recipe, policy) for policy in SETTINGS]
    assert len({warm_start_key(each, base_model(each)) for each in chosen}) == len(SETTINGS)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["context.turns=2"], r"context \(policy append\) has no field 'turns'"),
        (["context.policy=windo"], r"unknown context\.policy 'windo'\. Did you mean 'window'\?"),
        (["context.policy=window", "context.turn=2"], r"has no field 'turn'\. Did you mean 'turns'\?"),
        (["context.policy=window", "context.turns=0"], r"context\.turns=0: input should be greater than or equal to 1"),
        (["context.policy=rewrite"], r"context\.function is missing; give it in the recipe or as context\.function="),
        (["context=window"], r"context='window': .* Did you mean context\.policy=window\?"),
        (["rollout.turns=2"], r"rollout has no field 'turns'\. Did you mean 'context\.turns'\?"),
        (
            ["context.policy=summary", "context.max_tokens=390", "context.summary_tokens=16"],
            r"context\.max_tokens \(390\) and context\.summary_tokens \(16\) must fit into .*_context_tokens \(400\)",
        ),
        (
            ["context.policy=summary", "context.max_tokens=180", "context.summary_tokens=16"],
            r"sft\.demos .*context\.demo_summary",
        ),
        (
            ["context.policy=summary", *SETTINGS["summary"], "sft.demos=null"],
            r"context\.demo_summary does nothing without sft\.demos",
        ),
    ],
)
def test_a_wrong_setting_is_an_error_that_helps(recipe: str, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(recipe, overrides)


@pytest.mark.parametrize(
    ("policy", "more", "message"),
    [
        ("window", ["task.flow=single_step"], r"context\.policy=window .*SingleStepFlow"),
        ("window", ["task.flow=task.Own"], r"flow Own\. .*uses_context = True"),
        ("window", ["task.flow=task.Aware"], None),
        ("append", ["task.flow=task.Own"], None),
        ("rewrite", ["context.function=task.nowhere"], r"task has no 'nowhere'"),
        ("rewrite", ["context.function=task.no_arguments"], r"context\.function='task\.no_arguments' cannot be called"),
        ("rewrite", ["context.function=task.SETTINGS"], r"task has no 'SETTINGS'"),
        ("summary", ["context.demo_summary=task.no_arguments"], r"context\.demo_summary='task\.no_arguments' cannot"),
    ],
)
def test_policies_without_effect_are_refused_before_the_run(
    recipe: str, policy: str, more: list[str], message: str | None
) -> None:
    if message is None:
        build_plan(config(recipe, policy, *more))
    else:
        with pytest.raises(ConfigError, match=message):
            build_plan(config(recipe, policy, *more))


def test_a_context_budget_without_room_for_a_summary_is_refused(recipe: str) -> None:
    instruction = "Sum up."  # 7 tokens of one byte, after 2 line ends
    fits = 400 - len("\n\nSum up.") - 16
    for max_tokens in (fits, fits + 1):
        chosen = config(recipe, "summary", f"context.instruction={instruction}", f"context.max_tokens={max_tokens}")
        for make in (train_collector, greedy_collector, eval_collector):
            if max_tokens == fits:
                make(chosen, build_task(chosen), renderer(), ScriptedEngine([]))
            else:
                needed = r"instruction \(9 tokens\) .*=16 .*max_context_tokens=400"
                with pytest.raises(ConfigError, match=needed):
                    make(chosen, build_task(chosen), renderer(), ScriptedEngine([]))


def test_a_context_budget_below_what_is_never_summarised_is_refused(recipe: str) -> None:
    turn = len("<|im_start|>user\n?<|im_end|>\n")  # characters: each is one token, but the two control tokens
    for keep_turns in (1, 2):
        messages: list[Message] = [{"role": "user", "content": "?"}]
        messages += [{"role": "assistant", "content": "?"}, *messages] * keep_turns
        least = len(renderer().render(Observation(messages=messages)))
        assert least < (2 * keep_turns + 2) * turn
        for max_tokens in (least, least - 1):
            chosen = config(recipe, "summary", f"context.max_tokens={max_tokens}", f"context.keep_turns={keep_turns}")
            if max_tokens == least:
                train_collector(chosen, build_task(chosen), renderer(), ScriptedEngine([]))
                continue
            told = rf"context\.max_tokens={max_tokens} .*keep_turns={keep_turns}\).* {least} tokens"
            with pytest.raises(ConfigError, match=told):
                train_collector(chosen, build_task(chosen), renderer(), ScriptedEngine([]))


@pytest.mark.parametrize("policy", SETTINGS)
def test_an_env_that_refers_to_hidden_messages_is_refused(recipe: str, policy: str) -> None:
    def build(*more: str) -> None:
        build_task(config(recipe, policy, "task.env=task.Terse", *more))

    build("task.env_kwargs.whole=true")
    if policy in ("append", "rewrite"):  # a function may look at what it hides
        build()
        return
    told = rf"context\.policy={policy} .*Terse .*: set task\.env_kwargs\.whole=true, or use"
    for more in ([], ["task.env_kwargs.whole=false"]):
        with pytest.raises(ConfigError, match=told):
            build(*more)


def test_an_env_or_flow_chosen_by_a_row_is_checked_too(recipe: str) -> None:
    told = "context.policy=window .*Terse"
    chosen = {"env_type": "terse_of_a_row"}
    cases: list[tuple[list[str], dict[str, Any], bool]] = [
        ([], chosen, False),
        ([], {**chosen, "whole": True}, True),
        (["task.env=task.Terse", "task.env_kwargs.whole=true"], {}, True),
        (["task.env=task.Terse", "task.env_kwargs.whole=true"], {"whole": False}, False),
    ]
    for settings, env_kwargs, fits in cases:
        task, asked = build_task(config(recipe, "window", *settings)), TaskRow(prompt=[], env_kwargs=env_kwargs)
        if fits:
            task.make_flow(asked).make_env(asked)
            continue
        with pytest.raises(ConfigError, match=told):
            task.make_flow(asked).make_env(asked)
    with pytest.raises(ConfigError, match="flow SingleStepFlow"):  # and a flow chosen by a row
        build_task(config(recipe, "window")).make_flow(TaskRow(prompt=[], agent_name="single_step"))
    for policy in ("append", "rewrite"):
        task, asked = build_task(config(recipe, policy)), TaskRow(prompt=[], env_kwargs=chosen)
        task.make_flow(asked).make_env(asked)


def test_a_preset_or_override_with_another_policy_does_not_inherit_settings(recipe: str) -> None:
    preset = Path(recipe) / "narrow.yaml"

    def context(*overrides: str) -> dict[str, Any]:
        return load_config(str(preset), overrides).context.model_dump(exclude={"reasoning"})

    preset.write_text("base: base.yaml\ncontext: {policy: window, turns: 3}\n", encoding="utf-8")
    assert context() == {"policy": "window", "turns": 3}
    assert context("context.policy=window") == {"policy": "window", "turns": 3}
    assert context("context.turns=5") == {"policy": "window", "turns": 5}
    assert context("context.policy=append") == {"policy": "append"}
    assert context("context.policy=notes") == {"policy": "notes", "turns": 4, "notes": 4, "note_chars": 400}
    preset.write_text("base: base.yaml\ncontext: {turns: 3}\n", encoding="utf-8")  # of whatever policy is chosen
    assert context("context.policy=window") == {"policy": "window", "turns": 3}
    with pytest.raises(ConfigError, match=r"context \(policy drop_results\) has no field 'turns'"):
        context("context.policy=drop_results")
    preset.write_text("base: base.yaml\ncontext: {policy: window, turns: 3, reasoning: strip}\n", encoding="utf-8")
    assert load_config(str(preset), ["context.policy=append"]).context.reasoning == "strip"  # of any policy


# The engine: what it keeps of a session serves prompts that were rewritten as well as those that grew.


class Brief:
    """An engine of random weights that is interrupted after five tokens, so that episodes have several turns."""

    def __init__(self, local: Any) -> None:
        self.local = local

    async def generate(self, prompt: Prompt, sampling: Sampling, *, session: str) -> Completion:
        made: Completion = await self.local.generate(prompt, replace(sampling, max_tokens=5), session=session)
        return replace(made, stop="stop")

    def release(self, session: str) -> None:
        self.local.release(session)


@both
@pytest.mark.parametrize("policy", list(POLICIES))
def test_the_engine_samples_from_what_is_shown_whatever_its_cache_holds(policy: str, side: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    model = tiny("llama", vocab_size=len(tokenizer()), max_position_embeddings=1024)

    def make_flow(_: TaskRow) -> AgentFlowBase:
        flow = AgentEnvLoop(lambda _: Vault())
        flow.context = POLICIES[policy]()
        return flow

    with engine(model, **side, max_cached_tokens=4096) as local:
        played = replace(collector(Brief(local), make_flow=make_flow, max_steps=8), group_size=3)
        [group] = asyncio.run(played([row()], seed=1))
        reused = local.stats.reused_tokens
    steps = [step for trajectory in group.trajectories for step in trajectory.steps]
    assert len(steps) >= 3 * 6
    assert any(step.is_summary for step in steps) is (policy == "summary")
    for step in steps:
        sampled = Completion(token_ids=step.response_ids, logprobs=step.response_logprobs, stop="stop")
        assert_logprobs_match(model, step.prompt_ids, sampled)
    assert reused > 0.2 * sum(len(step.prompt_ids) for step in steps)  # at least the head of each prompt but the first
