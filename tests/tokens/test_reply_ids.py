"""Turns with a simulated user: what the policy said keeps the ids that were sampled."""

from __future__ import annotations

import asyncio

import pytest

from agent_r1 import Reply, ToolEnv, tool
from agent_r1.tokens.conversations import Conversations
from agent_r1.tokens.formats.infer import template_format
from agent_r1.types import Action, TaskRow
from tests.tokens.format_templates import FAMILIES, family_renderer


@tool
def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


class Polite(ToolEnv):
    def reply(self, said: str) -> Reply:
        return Reply(text=f"You said {said!r}.")


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("thought", ["", "hm</think>"])
def test_a_prompt_after_a_users_reply_extends_the_sampled_ids(name: str, thought: str) -> None:
    async def play() -> None:
        renderer = family_renderer(name)
        env = Polite(tools=[add], tool_format=template_format(renderer).choose("auto"))
        conversations = Conversations(renderer)
        observation = await env.reset(TaskRow(prompt=[{"role": "user", "content": "Hello"}]))
        prompt = conversations.prompt(observation, env.tool_schemas)
        opens = "<think>" if thought and not renderer.decode(prompt).rstrip().endswith("<think>") else ""
        response = renderer.encode_response(f"{opens}{thought}Which one?")
        text = renderer.decode(response)
        conversations.record(response, text)
        transition = await env.step(Action(text=text, token_ids=response))
        assert transition.observation is not None
        after = conversations.prompt(transition.observation, env.tool_schemas)
        assert conversations.extended
        assert after[: len(prompt) + len(response)] == prompt + response
        assert "You said 'Which one?'." in renderer.decode(after[len(prompt) + len(response) :])

    asyncio.run(play())
