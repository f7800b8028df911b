"""The chat templates we bring: what they write, and that a conversation only ever grows."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent_r1.config import RECIPES
from agent_r1.errors import DataError
from agent_r1.tokens.formats.table import FORMATS
from agent_r1.tokens.rendering import INDEPENDENT_TURNS, Renderer
from agent_r1.tokens.template_check import verify_template
from agent_r1.types import Message, Observation
from tests.pictures import PICTURE
from tests.tokens.small_tokenizers import TOOL, template_text
from tests.tokens.subjects import BUNDLED, CHATML_TOOLS, subject_of
from tests.tokens.talk import Talk

QUICKSTART = (RECIPES / "quickstart" / "chat_template.jinja").read_text(encoding="utf-8")
USER: Message = {"role": "user", "content": "Who wrote Faust?"}
HERMES = FORMATS["hermes"]
few = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
every_family = pytest.mark.parametrize("family", BUNDLED)


def written(*messages: Message, tools: list[dict[str, Any]] | None = None) -> str:
    return template_text(subject_of("chatml_tools-smollm2").tokenizer, list(messages), tools)


def turns(*pairs: tuple[str, str]) -> str:
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in pairs) + "<|im_start|>assistant\n"


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


TOOLS_TEXT = f"""Tools:
<tools>
{json.dumps(TOOL["function"])}
</tools>
To call a tool, write:
<tool_call>
{{"name": <tool>, "arguments": {{<parameter>: <value>}}}}
</tool_call>"""


@every_family
def test_the_bundled_template_has_no_problems(family: str) -> None:
    assert verify_template(subject_of(family).renderer, [TOOL]).problems == ()


def test_without_system_message_and_tools_there_is_no_system_turn() -> None:
    assert written(USER) == turns(("user", USER["content"]))


def test_the_system_turn_holds_the_system_message_and_the_tools() -> None:
    system: Message = {"role": "system", "content": "Be brief."}
    asked = ("user", USER["content"])
    assert written(system, USER) == turns(("system", "Be brief."), asked)
    assert written(USER, tools=[TOOL]) == turns(("system", TOOLS_TEXT), asked)
    assert written(system, USER, tools=[TOOL]) == turns(("system", f"Be brief.\n\n{TOOLS_TEXT}"), asked)


def test_the_text_about_tools_is_short() -> None:
    said = TOOLS_TEXT.replace(json.dumps(TOOL["function"]), "")
    assert len(said.split()) < 20


def test_later_system_messages_are_separate_turns() -> None:
    note: Message = {"role": "system", "content": "Note."}
    assert written(USER, note) == turns(("user", USER["content"]), ("system", "Note."))


@pytest.mark.parametrize("arguments", [{}, {"query": 'Faust "I" é\n'}, {"n": [1, None, True]}])
def test_calls_are_written_as_the_hermes_parser_reads_and_writes_them(arguments: dict[str, Any]) -> None:
    text = HERMES.write_call("search", arguments)
    reply: Message = {"role": "assistant", "content": "", "tool_calls": [call("search", arguments)]}
    assert written(USER, reply) == written(USER, {"role": "assistant", "content": text})
    reply["tool_calls"] = [call("search", json.dumps(arguments, ensure_ascii=False))]  # as OpenAI writes them
    assert written(USER, reply) == written(USER, {"role": "assistant", "content": text})


def test_words_and_calls_are_on_separate_lines() -> None:
    reply = {"role": "assistant", "content": "Let me look.", "tool_calls": [call("a", {}), call("b", {})]}
    text = "\n".join(["Let me look.", HERMES.write_call("a", {}), HERMES.write_call("b", {})])
    assert written(USER, reply) == turns(("user", USER["content"]), ("assistant", text))
    silent = {**reply, "content": None}
    assert written(USER, silent) == turns(("user", USER["content"]), ("assistant", text.partition("\n")[2]))


def test_consecutive_results_share_a_turn() -> None:
    reply: Message = {"role": "assistant", "content": "x"}
    results = [{"role": "tool", "content": text} for text in ("Goethe", " 1808\n")]
    one, two = "<tool_response>\nGoethe\n</tool_response>", "<tool_response>\n 1808\n\n</tool_response>"
    asked = [("user", USER["content"]), ("assistant", "x")]
    assert written(USER, reply, results[0]) == turns(*asked, ("user", one))
    assert written(USER, reply, *results) == turns(*asked, ("user", f"{one}\n{two}"))
    assert written(USER, reply, results[0], reply, results[1]) == turns(
        *asked, ("user", one), ("assistant", "x"), ("user", two)
    )


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"role": "critic", "content": "?"}, "unknown role critic"),
        ({"role": "user", "content": [{"type": "image", "image": PICTURE}]}, "the content of a message must be text"),
        ({"role": "user", "content": [{"type": "image"}]}, "has the type 'image' but no picture"),
        ({"role": "user", "content": None}, "the content of a message must be text"),
    ],
)
def test_messages_that_it_cannot_write_are_refused(message: Message, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        subject_of("chatml_tools-smollm2").renderer.render(Observation(messages=[USER, message]))


def test_a_reply_parsed_into_calls_is_extended_exactly() -> None:
    renderer = subject_of("chatml_tools-smollm2").renderer
    conversation = Talk(renderer)
    first = conversation.prompt(Observation(messages=[USER]), [TOOL])
    text = f"Let me look.\n{HERMES.write_call('search', {'query': 'Faust'})}"
    conversation.record(renderer.encode_response(text), text)
    reply = {"role": "assistant", "content": "Let me look.", "tool_calls": [call("search", {"query": "Faust"})]}
    messages: list[Message] = [USER, reply, {"role": "tool", "content": "Goethe"}]
    second = conversation.prompt(Observation(messages=messages), [TOOL])
    assert conversation.extended
    assert second[: len(first)] == first
    assert renderer.decode(second) == written(*messages, tools=[TOOL])


@every_family
@few
@given(data=st.data())
def test_rendering_only_new_turns_gives_the_ids_of_the_whole_conversation(family: str, data: st.DataObject) -> None:
    subject = subject_of(family)
    turns = data.draw(st.lists(st.tuples(subject.responses(), subject.answers(subject.wild())), min_size=1, max_size=3))
    first = data.draw(subject.conversations(subject.clean()))
    for template in (CHATML_TOOLS, QUICKSTART):
        whole, count = INDEPENDENT_TURNS.subn("", template)
        assert count == 1
        conversations = [
            Talk(Renderer(subject.tokenizer, chat_template=template)),
            Talk(Renderer(subject.tokenizer, chat_template=whole)),
        ]
        messages = list(first)
        for ids, answers in turns:
            prompts = [conversation.prompt(Observation(messages=messages), [TOOL]) for conversation in conversations]
            assert prompts[0] == prompts[1]
            text = subject.renderer.decode(ids)
            for conversation in conversations:
                conversation.record(ids, text)
            messages = [*messages, {"role": "assistant", "content": text}, *answers]
        prompts = [conversation.prompt(Observation(messages=messages), [TOOL]) for conversation in conversations]
        assert prompts[0] == prompts[1]
