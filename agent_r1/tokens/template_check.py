"""What a chat template can do for an agent, found by trying a short conversation on it."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable
from dataclasses import dataclass

from agent_r1.errors import DataError
from agent_r1.tokens.conversations import Conversations
from agent_r1.tokens.formats.infer import NAME, TOOL
from agent_r1.tokens.rendering import Renderer, ToolSchemas
from agent_r1.types import Message, Observation
from agent_r1.vision.pictures import Picture

# A grey square.
PROBE_PNG = "iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAAAAADhZOFXAAAAEElEQVR42mNsYIAAJgaKGAAmCACQtTEKkQAAAABJRU5ErkJggg=="


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateReport:
    usable: bool  # a conversation can be held at all
    extends: bool  # a next user message is appended, not rendered from scratch
    extends_after_tool: bool  # a tool's result is appended, too
    tool_role: bool  # messages of role "tool" are shown to the model
    tools_shown: bool  # tool schemas are shown to the model
    tool_pictures: bool  # pictures of role "tool" are shown to a model that takes pictures
    problems: tuple[str, ...]  # what is wrong; empty if all of the above hold


def verify_template(renderer: Renderer, tools: ToolSchemas = ()) -> TemplateReport:
    """Report what works and what does not. Never raises because of the template."""
    tools = tools or [TOOL]
    user, said = {"role": "user", "content": "Ping?"}, {"role": "assistant", "content": NAME}
    call = {"type": "function", "function": {"name": NAME, "arguments": {}}}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "name": NAME, "content": "tool-said-this"}

    def attempt(*messages: Message, tools: ToolSchemas = tools) -> list[int]:
        return renderer.try_render(list(messages), tools)

    def extends(reply: Message, added: Message) -> bool:
        talk = Conversations(renderer)
        talk.finish(talk.begin(Observation(messages=[user]), tools), renderer.encode_response(NAME), NAME)
        try:
            return talk.begin(Observation(messages=[user, reply, added]), tools).earlier is not None
        except DataError:
            return False

    a, b = (renderer.render(Observation(text=letter)) for letter in "ab")
    joins = renderer.decode(a + b) == "ab"
    renders, stops = bool(attempt(user)), bool(renderer.stop_ids)
    extends_user = renders and stops and extends(said, user)
    # gpt-oss accepts a tool's result only after a message with the call; other templates refuse such a message.
    extends_tool = renders and stops and (extends(said, result) or extends(called, result))
    tool_role = any(result["content"] in renderer.decode(attempt(user, reply, result)) for reply in (said, called))
    tools_shown = attempt(user) != attempt(user, tools=())
    pictures, tool_pictures = _shows_pictures(renderer, attempt, result, said, called)
    checks = {
        "the tokenizer writes a space before every piece of text (Llama-2 style), so nothing can be appended": joins,
        "the template cannot render a user message, or there is none": renders,
        "no stop token is known: set the tokenizer's eos_token or give extra stop ids": stops,
        "a next user message cannot be appended: each turn is rendered from scratch": extends_user,
        "a tool's result cannot be appended: each turn is rendered from scratch": extends_tool,
        'role "tool" is not shown: put results into user messages, or use a tool template': tool_role,
        "tools are not shown: describe them in the system message, or use a tool template": tools_shown,
        "pictures are not shown, not even those of users: use another template": pictures,
        'pictures of role "tool" are not shown: set task.env_kwargs.tool_role=user': tool_pictures or not pictures,
    }
    return TemplateReport(
        usable=joins and renders and stops,
        extends=extends_user,
        extends_after_tool=extends_tool,
        tool_role=tool_role,
        tools_shown=tools_shown,
        tool_pictures=tool_pictures,
        problems=tuple(problem for problem, holds in checks.items() if not holds),
    )


def _shows_pictures(
    renderer: Renderer, attempt: Callable[..., list[int]], result: Message, *replies: Message
) -> tuple[bool, bool]:
    """Whether pictures of users and of tools are shown; true for both if the model takes text only."""
    if renderer.pictures is None:
        return True, True
    picture = Picture.from_bytes(b64decode(PROBE_PNG))
    content = [{"type": "text", "text": "Seen?"}, {"type": "image", "image": picture}]
    user: Message = {"role": "user", "content": content}

    def shows(*messages: Message) -> bool:
        return any(token < 0 for token in attempt(*messages))

    return shows(user), any(shows(user, reply, {**result, "content": content}) for reply in replies)
