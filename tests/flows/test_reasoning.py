"""Thinking in earlier replies is kept or stripped, for several templates, and every step stays exact either way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from agent_r1.build.context import check_flow, check_keeps_reasoning
from agent_r1.config import RunConfig, load_config
from agent_r1.engines.scripted import ScriptedEngine
from agent_r1.envs.base import AgentEnv
from agent_r1.envs.text_env import Reply, TextEnv
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.errors import ConfigError
from agent_r1.flows.context import ContextPolicy, Summary, Window
from agent_r1.flows.flow import AgentEnvLoop, AgentFlowBase, SingleStepFlow
from agent_r1.flows.reasoning import StripReasoning, strip_thinking
from agent_r1.runs.outcomes import Subject
from agent_r1.tokens.formats.base import ToolCallFormat
from agent_r1.tokens.formats.harmony import HarmonyFormat
from agent_r1.tokens.formats.infer import template_format
from agent_r1.tokens.formats.table import FORMATS
from agent_r1.tokens.rendering import Renderer
from agent_r1.tools.base import tool
from agent_r1.types import Message, StopReason, TaskRow, Trajectory
from tests import chatml
from tests.flows.test_context_episode import segments
from tests.tokens.format_templates import family_renderer, renderer_with
from tests.tokens.small_tokenizers import renderer_of

HERMES = FORMATS["hermes"]
CALL = HERMES.write_call("look", {"at": "x"})
QUOTED_CALL = HERMES.write_call("look", {"at": "<think>x</think><think>"})
# As DeepSeek-R1's: prompts open the thinking, and what is rendered from scratch drops that of earlier replies.
R1 = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>{{ m.content.split('</think>')[-1] }}<|end|>"
    "{% else %}<|{{ m.role }}|>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)


@cache
def renderer_named(name: str) -> Renderer:
    if name == "plain":
        return chatml.renderer()
    if name == "r1":
        return renderer_with(R1, ("<|user|>", "<|assistant|>", "<|tool|>", "<|system|>", "<|end|>"), "<|end|>")
    return renderer_of(name)


class Halls(TextEnv):
    """Ends after three replies."""

    def begin(self, row: TaskRow) -> str:
        self.left = 3
        return "Go."

    def reply(self, said: str) -> Reply:
        self.left -= 1
        return Reply(text=f"Hall {self.left}.", done=not self.left)


@tool
async def look(at: str) -> str:
    """Look at something."""
    return f"It is {at}."


def thinking(renderer: Renderer, thought: str, said: str) -> str:
    """A reply as a model of this template samples it."""
    opened = template_format(renderer).thinks
    return f"{'' if opened else '<think>'}{thought}</think>{said}"


def play(
    renderer: Renderer,
    texts: list[str],
    context: ContextPolicy | None,
    *,
    make_env: Callable[[TaskRow], AgentEnv] = lambda _: Halls(),
    **limits: Any,
) -> tuple[Trajectory, ScriptedEngine]:
    def make_flow(_: TaskRow) -> AgentFlowBase:
        flow = AgentEnvLoop(make_env)
        flow.context = context
        return flow

    engine = ScriptedEngine(texts, tokenizer=renderer._tokenizer)
    made = chatml.collector(engine, make_flow=make_flow, **({"max_response_tokens": 200} | limits))
    sampling = replace(made.sampling, stop_ids=tuple(renderer.stop_ids))
    [group] = asyncio.run(replace(made, renderer=renderer, sampling=sampling)([chatml.row()], seed=0))
    return group.trajectories[0], engine


def strip(renderer: Renderer, policy: ContextPolicy | None = None) -> StripReasoning:
    return StripReasoning(policy, tool_format=template_format(renderer).choose("hermes"))


def prompts(renderer: Renderer, trajectory: Trajectory) -> list[str]:
    return [renderer.decode(step.prompt_ids) for step in trajectory.steps]


TEMPLATES = ("plain", "qwen3", "r1")


# One reply


@pytest.mark.parametrize(
    ("text", "opened", "shown"),
    [
        ("<think>so</think>go", False, "go"),
        ("\n<think>\nso\n</think>\n\ngo\n", False, "go"),
        ("so</think>go", True, "go"),
        ("<think>so</think>go", True, "go"),  # some models write the tag again
        ("so, and then", True, ""),  # nothing closed it
        ("go <think>so, and then", False, "go"),
        ("<think>a</think>b<think>c</think>d", False, "bd"),
        ("a</think>b<think>c</think>d", True, "bd"),
        ("  go  ", False, "  go  "),  # without thinking, nothing changes
        ("so</think>go", False, "so</think>go"),  # a tag that closes nothing is text
        (f"<think>so</think>{CALL}", False, CALL),
        (f"<think>so: {CALL}</think>{CALL}", False, CALL),
        (f"<think>so: {CALL}", False, ""),  # the env refused this call
        (QUOTED_CALL, False, QUOTED_CALL),  # tags within a call are its own
        (f"so</think>{QUOTED_CALL}", True, QUOTED_CALL),
        (f"so: {CALL}", True, CALL),  # nothing closed it, but the env runs this call
        (f"so: {QUOTED_CALL}", True, QUOTED_CALL),
        (f"so: {CALL} so</think>{CALL}", True, CALL),  # only the second one is run
    ],
)  # fmt: skip
def test_a_reply_is_shown_without_its_thinking(text: str, opened: bool, shown: str) -> None:
    assert strip_thinking(text, HERMES.for_prompt(thinks=opened)) == shown


@pytest.mark.parametrize(("text", "opened"), [("<think>so {} more</think>go", False), ("so {} more</think>go", True)])
def test_calls_that_a_format_runs_in_the_middle_of_thinking_stay(text: str, opened: bool) -> None:
    retool = FORMATS["retool"].for_prompt(thinks=opened)
    call = retool.write_call("python", {"code": "print('</think>')"})
    assert len(retool.parse(text.format(call))[1]) == 1  # it is run
    assert strip_thinking(text.format(call), retool) == f"{call}go"


# Episodes


@pytest.mark.parametrize("name", TEMPLATES)
def test_thinking_stays_in_one_growing_prompt_if_it_is_kept(name: str) -> None:
    renderer = renderer_named(name)
    texts = [thinking(renderer, f"thought {n}", f"said {n}") for n in range(3)]
    trajectory, engine = play(renderer, texts, None)
    assert [step.prompt_ids for step in trajectory.steps] == [call.prompt_ids for call in engine.calls]
    assert segments(trajectory) == 1
    last = prompts(renderer, trajectory)[-1]
    assert all(f"thought {n}" in last and f"said {n}" in last for n in range(2))


@pytest.mark.parametrize("name", TEMPLATES)
def test_stripped_thinking_is_sampled_and_trained_but_not_shown_again(name: str) -> None:
    renderer = renderer_named(name)
    texts = [thinking(renderer, f"thought {n}", f"said {n}") for n in range(3)]
    trajectory, engine = play(renderer, texts, strip(renderer))
    assert trajectory.stop is StopReason.ANSWERED
    assert [step.prompt_ids for step in trajectory.steps] == [call.prompt_ids for call in engine.calls]
    assert [step.action_text for step in trajectory.steps] == texts
    assert segments(trajectory) == 3  # each token is trained once, after what the sampler saw before it
    assert [step.hidden_messages for step in trajectory.steps] == [0, 1, 2]
    shown = prompts(renderer, trajectory)
    assert all("thought" not in prompt for prompt in shown)
    assert all(f"said {n}" in shown[2] for n in range(2))


@pytest.mark.parametrize("name", ["plain", "qwen3"])
@pytest.mark.parametrize("strips", [False, True])
def test_calls_and_results_stay_when_thinking_goes(name: str, strips: bool) -> None:
    renderer = renderer_named(name)
    texts = [*(thinking(renderer, f"thought {n}", CALL) for n in range(2)), thinking(renderer, "done", "It is x.")]
    trajectory, _ = play(renderer, texts, strip(renderer) if strips else None, make_env=lambda _: ToolEnv(tools=[look]))
    assert trajectory.stop is StopReason.ANSWERED
    shown = prompts(renderer, trajectory)[-1]
    assert shown.count('"at": "x"') == shown.count("It is x.") == 2
    assert shown.count("thought") == (0 if strips else 2)
    assert segments(trajectory) == (3 if strips else 1)


def test_replies_without_thinking_extend_the_prompt_as_before() -> None:
    renderer = renderer_named("qwen3")
    trajectory, _ = play(renderer, ["a", "b", "c"], strip(renderer))
    assert segments(trajectory) == 1
    assert [step.hidden_messages for step in trajectory.steps] == [0, 0, 0]
    mixed, _ = play(renderer, ["a", thinking(renderer, "so", "b"), "c"], strip(renderer))
    assert segments(mixed) == 2  # the third step cannot extend the second


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("strips", [False, True])
def test_a_token_limit_in_the_middle_of_thinking_ends_the_episode(name: str, strips: bool) -> None:
    renderer = renderer_named(name)
    texts = [thinking(renderer, "a", "b"), thinking(renderer, "and then " * 50, "c")]
    trajectory, _ = play(renderer, texts, strip(renderer) if strips else None, max_response_tokens=40)
    assert trajectory.stop is StopReason.MAX_TOKENS
    assert [step.is_cut for step in trajectory.steps] == [False, True]
    assert len(trajectory.steps[1].response_ids) == 40
    assert segments(trajectory) == (2 if strips else 1)  # what was sampled is trained


def test_replies_that_the_env_parses_are_never_extended() -> None:
    """The ids of such a reply hold thinking that its message does not show."""
    renderer = family_renderer("deepseek_v3")
    deepseek = FORMATS["deepseek_v3"] if "deepseek_v3" in FORMATS else template_format(renderer).choose("auto")
    text = f"thought</think>{deepseek.write_call('look', {'at': 'x'})}"
    texts, format_named = [text, text, "done</think>It is x."], deepseek.for_prompt(thinks=True)

    def make_env(_: TaskRow) -> AgentEnv:
        return ToolEnv(tools=[look], tool_format=format_named)

    kept, _ = play(renderer, texts, None, make_env=make_env)
    assert (segments(kept), prompts(renderer, kept)[-1].count("thought")) == (1, 2)
    stripped, _ = play(renderer, texts, StripReasoning(None, tool_format=format_named), make_env=make_env)
    assert (segments(stripped), prompts(renderer, stripped)[-1].count("thought")) == (3, 0)


def test_what_a_reply_says_beside_its_calls_stays_when_the_env_has_parsed_its_thinking() -> None:
    renderer = family_renderer("deepseek_v3")
    deepseek = FORMATS["deepseek_v3"].for_prompt(thinks=True)
    text = f"thought</think>I look it up. {deepseek.write_call('look', {'at': 'x'})}"
    policy = StripReasoning(None, tool_format=deepseek)
    trajectory, _ = play(
        renderer, [text, "so</think>x"], policy, make_env=lambda _: ToolEnv(tools=[look], tool_format=deepseek)
    )
    [_, shown] = prompts(renderer, trajectory)
    assert (shown.count("thought"), shown.count("I look it up.")) == (0, 1)
    policy.begin(chatml.row().prompt)
    for content, expected in {"pong": "pong", "so</think>pong": "pong"}.items():
        reply: Message = {"role": "assistant", "content": content, "reasoning_content": "so"}
        view = asyncio.run(policy.show([*chatml.row().prompt, reply]))
        assert view.messages[-1] == {"role": "assistant", "content": expected}


@pytest.mark.parametrize("name", TEMPLATES)
def test_other_policies_work_on_the_stripped_conversation(name: str) -> None:
    renderer = renderer_named(name)
    texts = [thinking(renderer, f"thought {n}", f"said {n}") for n in range(3)]
    trajectory, _ = play(renderer, texts, strip(renderer, Window(turns=1)))
    shown = prompts(renderer, trajectory)
    assert all("thought" not in prompt for prompt in shown)
    assert "said 0" not in shown[2]
    assert "said 1" in shown[2]
    assert trajectory.steps[2].hidden_messages == 2 + 1  # an exchange, and the thinking of one reply


def test_summaries_are_asked_for_by_the_length_that_is_shown() -> None:
    renderer = renderer_named("plain")
    texts = [thinking(renderer, "thought " * 6, f"said {n}") for n in range(3)]
    policy = Summary(max_tokens=200, summary_tokens=20, keep_turns=1, instruction="Sum up.")
    trajectory, _ = play(renderer, texts, strip(renderer, policy))
    assert not any(step.is_summary for step in trajectory.steps)
    policy = Summary(max_tokens=200, summary_tokens=20, keep_turns=1, instruction="Sum up.")
    unstripped, _ = play(renderer, [*texts[:2], "what I know", texts[2]], policy)
    assert any(step.is_summary for step in unstripped.steps)


class Dictated:
    """A writer whose summaries are numbered."""

    def __init__(self) -> None:
        self.written = 0

    def count_tokens(self, messages: list[Message]) -> int:
        return 1000

    async def write(self, messages: list[Message], *, max_tokens: int) -> str:
        self.written += 1
        return f"summary {self.written}"


def test_a_copy_keeps_the_summary_that_the_conversation_had() -> None:
    # As a chat does, to go back after a question whose answer failed.
    summary = Summary(max_tokens=1, summary_tokens=20, keep_turns=1, instruction="Sum up.")
    policy, writer = StripReasoning(summary, tool_format=HERMES.for_prompt(thinks=False)), Dictated()
    talk: list[Message] = [{"role": "user", "content": "Go."}]
    policy.begin(talk)
    for number in range(3):
        said = {"role": "assistant", "content": f"<think>so</think>said {number}"}
        talk = [*talk, said, {"role": "user", "content": f"Hall {number}."}]

    async def main() -> tuple[str, str]:
        await policy.prepare(talk[:5], writer)
        kept = copy(policy)
        await policy.prepare(talk, writer)
        shown = [await each.show(messages) for each, messages in ((kept, talk[:5]), (policy, talk))]
        old, new = (view.messages[0]["content"] for view in shown)
        return old, new

    old, new = asyncio.run(main())
    assert ("summary 1" in old, "summary 2" in new) == (True, True)


def test_examples_in_the_first_observation_stay_as_they_are() -> None:
    policy = StripReasoning(None, tool_format=HERMES.for_prompt(thinks=False))
    opening: list[Message] = [
        {"role": "user", "content": "Ping?"},
        {"role": "assistant", "content": "<think>an example</think>pong"},
        {"role": "user", "content": "And now?"},
    ]
    policy.begin(opening)
    reply: Message = {"role": "assistant", "content": "<think>own</think>so", "reasoning_content": "own"}
    shown = asyncio.run(policy.show([*opening, reply, opening[0]]))
    assert shown.messages == [*opening, {"role": "assistant", "content": "so"}, opening[0]]
    assert shown.hidden == 1


# Settings


def configured(*settings: str) -> RunConfig:
    return load_config("quickstart", list(settings))


def test_every_policy_takes_the_setting_and_a_new_policy_keeps_it() -> None:
    assert configured().context.reasoning is None
    assert configured("context.reasoning=strip").context.policy == "append"
    both = configured("context.reasoning=strip", "context.policy=window", "context.turns=2")
    assert both.context.model_dump() == {"reasoning": "strip", "policy": "window", "turns": 2}
    with pytest.raises(ConfigError, match=r"context\.reasoning|reasoning"):
        configured("context.reasoning=hide")


def test_a_flow_that_ignores_the_context_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"context\.reasoning=strip has no effect with the flow SingleStepFlow"):
        check_flow(SingleStepFlow, configured("context.reasoning=strip"))
    check_flow(SingleStepFlow, configured("context.reasoning=keep"))


@pytest.mark.parametrize(
    ("name", "policy", "calls_tools", "is_possible"),
    [
        ("plain", "append", False, True),
        ("plain", "window", False, True),  # shows whatever a reply holds
        ("qwen3", "append", False, True),  # ids are appended, so the template drops nothing
        ("qwen3", "window", False, False),
        ("qwen3", "window", True, True),  # results are no new question to it
        ("r1", "append", False, True),
        ("r1", "window", False, False),
        ("r1", "drop_results", True, False),
    ],
)
def test_keep_is_refused_where_the_template_would_drop_thinking(
    name: str, policy: str, calls_tools: bool, is_possible: bool
) -> None:
    config, renderer = configured(f"context.policy={policy}", "context.reasoning=keep"), renderer_named(name)
    if is_possible:
        check_keeps_reasoning(config, renderer, calls_tools=calls_tools)
    else:
        with pytest.raises(ConfigError, match=r"context\.reasoning=keep: "):
            check_keeps_reasoning(config, renderer, calls_tools=calls_tools)
        check_keeps_reasoning(configured(f"context.policy={policy}"), renderer, calls_tools=calls_tools)


def test_evaluations_with_and_without_thinking_are_told_apart() -> None:
    def settings(*overrides: str, drop: bool = False) -> Any:
        run = configured(*overrides).model_dump()
        if drop:  # as a run before this setting was recorded
            del run["context"]["reasoning"]
        return Subject.of(run, model="m", panel="p").settings.get("context")

    assert settings() is None
    assert settings("context.reasoning=strip") == {"reasoning": "strip", "policy": "append"}
    assert settings("context.policy=window") == settings("context.policy=window", drop=True)


def formats_under_test() -> list[ToolCallFormat]:
    """Those whose models think in tags; gpt-oss has a channel for it, which the env parses."""
    return [each for each in FORMATS.values() if each.has_marks and not isinstance(each, HarmonyFormat)]


@pytest.mark.parametrize("each", formats_under_test(), ids=lambda each: type(each).__name__)
def test_calls_of_every_format_survive_the_stripping(each: ToolCallFormat) -> None:
    name = each.fixed_tool or "look"
    arguments = {"code": "1 + 1"} if each.fixed_tool else {"at": "x"}
    try:
        call = each.write_call(name, arguments)
    except ValueError:
        pytest.skip("this format cannot write the call")
    assert strip_thinking(f"so</think>{call}", each.for_prompt(thinks=True)) == call.strip()
    assert strip_thinking(f"<think>so</think>{call}", each.for_prompt(thinks=False)) == call.strip()
    assert strip_thinking(f"so {call}", each.for_prompt(thinks=True)) == call.strip()  # run, although nothing closed it
