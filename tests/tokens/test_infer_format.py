"""The tool-call format is that of the chat template: found by rendering, never contradicted in silence."""

from __future__ import annotations

import asyncio

import pytest

from agent_r1.envs.tool_env import ToolEnv
from agent_r1.errors import ConfigError
from agent_r1.tokens.conversations import Conversations
from agent_r1.tokens.formats import FORMATS, RetoolFormat
from agent_r1.tokens.formats.infer import template_format
from agent_r1.tokens.rendering import Renderer
from agent_r1.tools.base import tool
from agent_r1.types import Action, Observation, TaskRow
from tests import chatml
from tests.tokens.format_templates import FAMILIES, Family, family_renderer, renderer_with
from tests.tokens.small_tokenizers import renderer_of


@tool
def add(a: int, b: int = 2) -> str:
    """Add two numbers."""
    return str(a + b)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_format_is_the_one_the_template_writes(name: str) -> None:
    found = template_format(family_renderer(name))
    assert (found.name, found.thinks) == (name, FAMILIES[name].thinks)
    assert str(found) == f"{name}, as in the chat template"
    chosen = found.choose("auto")
    assert type(chosen) is type(FORMATS[name])
    assert chosen.prompt_thinks is FAMILIES[name].thinks
    assert type(found.choose(name)) is type(chosen)


@pytest.mark.parametrize(
    ("family", "name"),
    [("qwen2_5", "hermes"), ("qwen3", "hermes"), ("llama3", "llama3_json"), ("harmony", "harmony")],
)
def test_so_it_is_with_published_templates(family: str, name: str) -> None:
    assert template_format(renderer_of(family)).name == name


def test_a_template_that_shows_no_calls_leaves_the_choice_open() -> None:
    for renderer in (chatml.renderer(), renderer_of("smollm2")):
        found = template_format(renderer)
        assert found.name is None
        assert str(found) == "hermes, because the chat template does not write calls"
        assert type(found.choose("auto")) is type(FORMATS["hermes"])
        assert type(found.choose("pythonic")) is type(FORMATS["pythonic"])


def test_a_template_that_only_explains_calls_tells_the_format_by_its_marks() -> None:
    example = "<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>"
    explained = Family(call="", before_calls="").template.replace("{{ tool | tojson }}", f"Call so: {example}")
    found = template_format(renderer_with(explained))
    assert (found.name, found.written) == ("qwen3_coder", "")


def test_calls_that_no_format_reads_are_an_error_unless_one_is_named() -> None:
    found = template_format(renderer_with(Family(call="CALL {{ c.function | tojson }} OVER").template))
    assert found.name is None
    with pytest.raises(ConfigError, match=r"no known tool-call format can read .*: 'CALL \{"):
        found.choose("auto")
    assert found.choose("hermes").prompt_thinks is False


def test_a_format_that_contradicts_the_template_is_an_error_with_both_names() -> None:
    found = template_format(family_renderer("llama3_json"))
    with pytest.raises(
        ConfigError,
        match=r"tool_format='hermes' contradicts the chat template, which writes calls as 'llama3_json': '\{.*"
        r"model\.chat_template",
    ):
        found.choose("hermes")
    for name in FAMILIES:
        if name != "llama3_json":
            with pytest.raises(ConfigError, match="contradicts the chat template"):
                found.choose(name)
    with pytest.raises(ConfigError, match=r"unknown tool_format 'herms'\. Did you mean 'hermes'"):
        found.choose("herms")


def test_code_between_tags_goes_with_any_template() -> None:
    shell = RetoolFormat(fixed_tool="shell", argument="command")
    assert template_format(family_renderer("llama3_json")).choose(shell) == shell


@pytest.mark.parametrize("good", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_call_and_its_result_extend_the_exact_ids(name: str, good: bool) -> None:
    """One step with a good call or a malformed one: the next prompt begins with what was shown and sampled."""
    written = FORMATS[name].write_call("add", {"a": 40, "b": 2})
    added = asyncio.run(_second_prompt(family_renderer(name), name, written if good else written[: len(written) // 2]))
    assert ("42" in added, "Write " in added) == (good, not good)


async def _second_prompt(renderer: Renderer, name: str, text: str) -> str:
    env, talk = ToolEnv(tools=[add], tool_format=name), Conversations(renderer)
    first = await env.reset(TaskRow(prompt=[{"role": "user", "content": "1 + 2?"}]))
    prompt = talk.prompt(first, env.tool_schemas)
    response = renderer.encode_response(text)
    talk.record(response, renderer.decode(response))
    step = await env.step(Action(text=renderer.decode(response), token_ids=response))
    assert isinstance(step.observation, Observation)
    assert step.calls
    after = talk.prompt(step.observation, env.tool_schemas)
    assert talk.extended
    assert after[: len(prompt) + len(response)] == [*prompt, *response]
    renderer.render(step.observation, env.tool_schemas)  # also afresh, as after a rewritten history
    return renderer.decode(after[len(prompt) + len(response) :])
