"""The tool-call format of a chat template: inferred by rendering, and never contradicted silently."""

from __future__ import annotations

import asyncio

import pytest

from agent_r1 import Reply, ToolEnv
from agent_r1.errors import ConfigError
from agent_r1.tokens.formats.infer import template_format
from agent_r1.tokens.formats.retool import RetoolFormat
from agent_r1.tokens.formats.table import FORMATS
from agent_r1.tokens.rendering import Renderer
from agent_r1.tools.base import tool
from agent_r1.types import Action, Observation, TaskRow
from tests import chatml
from tests.tokens.format_templates import FAMILIES, Family, family_renderer, renderer_with
from tests.tokens.small_tokenizers import renderer_of
from tests.tokens.talk import Talk


@tool
def add(a: int, b: int = 2) -> str:
    """Add two numbers."""
    return str(a + b)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_format_is_inferred_from_the_template(name: str) -> None:
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
def test_the_format_of_published_templates_is_inferred(family: str, name: str) -> None:
    assert template_format(renderer_of(family)).name == name


def test_a_template_that_shows_no_calls_leaves_the_choice_open() -> None:
    for renderer in (chatml.renderer(), renderer_of("smollm2")):
        found = template_format(renderer)
        assert found.name is None
        assert str(found) == "hermes, because the chat template does not write calls"
        assert type(found.choose("auto")) is type(FORMATS["hermes"])
        assert type(found.choose("pythonic")) is type(FORMATS["pythonic"])


def test_a_template_that_only_explains_calls_is_recognised_by_their_marks() -> None:
    example = "<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>"
    explained = Family(call="", before_calls="").template.replace("{{ tool | tojson }}", f"Call so: {example}")
    found = template_format(renderer_with(explained))
    assert (found.name, found.written) == ("qwen3_coder", "")


def test_calls_that_no_format_reads_are_an_error_unless_a_format_is_set() -> None:
    found = template_format(renderer_with(Family(call="CALL {{ c.function | tojson }} OVER").template))
    assert found.name is None
    with pytest.raises(ConfigError, match=r"'CALL \{"):
        found.choose("auto")
    assert found.choose("hermes").prompt_thinks is False


def test_a_format_that_contradicts_the_template_is_an_error() -> None:
    found = template_format(family_renderer("llama3_json"))
    for name in FAMILIES:
        if name != "llama3_json":
            with pytest.raises(ConfigError, match=f"{name}.*contradicts.*llama3_json"):
                found.choose(name)
    with pytest.raises(ConfigError, match=r"'herms'.*'hermes'"):
        found.choose("herms")


def test_retool_works_with_any_template() -> None:
    shell = RetoolFormat(fixed_tool="shell", argument="command")
    assert template_format(family_renderer("llama3_json")).choose(shell) == shell


async def play(renderer: Renderer, env: ToolEnv, text: str) -> str:
    """Play one step and return what the next prompt adds. It begins with the exact ids that were shown and sampled."""
    conversations = Talk(renderer)
    first = await env.reset(TaskRow(prompt=[{"role": "user", "content": "1 + 2?"}]))
    prompt = conversations.prompt(first, env.tool_schemas)
    if text.startswith("<think>") and renderer.decode(prompt).rstrip().endswith("<think>"):
        text = text.removeprefix("<think>")
    response = renderer.encode_response(text)
    conversations.record(response, renderer.decode(response))
    transition = await env.step(Action(text=renderer.decode(response), token_ids=response))
    assert isinstance(transition.observation, Observation)
    after = conversations.prompt(transition.observation, env.tool_schemas)
    assert conversations.extended
    assert after[: len(prompt) + len(response)] == [*prompt, *response]
    renderer.render(transition.observation, env.tool_schemas)  # also from scratch, as after a rewritten history
    return renderer.decode(after[len(prompt) + len(response) :])


@pytest.mark.parametrize("good", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_call_and_its_result_extend_the_exact_ids(name: str, good: bool) -> None:
    written = FORMATS[name].write_call("add", {"a": 40, "b": 2})
    text = written if good else written[: len(written) // 2]
    added = asyncio.run(play(family_renderer(name), ToolEnv(tools=[add], tool_format=name), text))
    assert ("42" in added, "Write " in added) == (good, not good)


class Polite(ToolEnv):
    def reply(self, said: str) -> Reply:
        return Reply(text=f"You said {said!r}.")


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("thought", ["", "<think>hm</think>"])
def test_a_simulated_users_reply_extends_the_exact_ids(name: str, thought: str) -> None:
    renderer = family_renderer(name)
    env = Polite(tools=[add], tool_format=template_format(renderer).choose("auto"))
    assert "You said 'Which one?'." in asyncio.run(play(renderer, env, f"{thought}Which one?"))
