"""What rendering makes of unusual templates: reported, never guessed at."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from agent_r1.errors import DataError
from agent_r1.tokens.rendering import Renderer
from agent_r1.tokens.template_check import verify_template
from agent_r1.types import Message, Observation
from tests.tokens.small_tokenizers import FAMILIES, TOOL, renderer_of, tokenizer_of
from tests.tokens.talk import Talk

USER: Message = {"role": "user", "content": "Who wrote Faust?"}


def said(text: str) -> Message:
    return {"role": "assistant", "content": text}


def asking(*messages: Message) -> Observation:
    return Observation(messages=list(messages))


def with_template(template: str) -> Renderer:
    return Renderer(tokenizer_of("qwen2_5"), chat_template=template)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_report_says_what_a_template_can_do(name: str) -> None:
    report = verify_template(renderer_of(name), [TOOL])
    assert report.extends
    assert report.extends_after_tool
    assert report.tool_role
    assert report.tools_shown is (name != "smollm2")
    assert [problem.split(":")[0] for problem in report.problems] == (
        [] if report.tools_shown else ["tools are not shown"]
    )


@pytest.mark.parametrize(
    ("template", "extends", "first_problem"),
    [
        ("{{ raise_exception('no') }}", False, "the template cannot render a user message"),
        ("{% for m in messages %}{{ nothing.here }}{% endfor %}", False, "the template cannot render a user message"),
        ("{% for m in messages if m.role != 'assistant' %}{{ m.content }}\n{% endfor %}", False, "a next user message"),
        ("{% for m in messages %}{{ m.content ~ m.content }}\n{% endfor %}", False, "a next user message"),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", True, "tools are not shown"),
        ("{{ messages[-1].content }}", False, "a next user message"),
    ],
    ids=["raises", "undefined", "hides replies", "doubles contents", "has no control tokens", "shows the last only"],
)
def test_odd_templates_are_reported_and_never_raise(template: str, extends: bool, first_problem: str) -> None:
    report = verify_template(with_template(template))
    assert report.extends is extends
    assert report.problems[0].startswith(first_problem)


def test_a_template_without_end_of_turn_keeps_the_token_that_opens_the_next_turn() -> None:
    # As in GLM: the next speaker's token is what stops the model, and it must not be written twice.
    tokenizer = tokenizer_of("harmony")
    template = (
        "{% for m in messages %}{{ {'user': '<|start|>', 'tool': '<|call|>', 'assistant': '<|message|>'}[m.role] }}"
        "{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|message|>{% endif %}"
    )
    renderer = Renderer(
        tokenizer, chat_template=template, extra_stop_ids=tokenizer.convert_tokens_to_ids(["<|start|>", "<|call|>"])
    )
    for stop, expected in (("<|start|>", "hi<|start|>?<|message|>"), ("<|call|>", "hi<|call|><|start|>?<|message|>")):
        conversation = Talk(renderer)
        prompt = conversation.prompt(asking(USER))
        conversation.record(tokenizer.encode("hi" + stop), "hi")
        after = conversation.prompt(asking(USER, said("hi"), {"role": "user", "content": "?"}))
        assert tokenizer.decode(after[len(prompt) :]) == expected


def test_messages_that_the_template_refuses_are_an_error_that_names_the_roles() -> None:
    with pytest.raises(DataError, match=r"refuses messages with the roles \[user, tool\]: a tool spoke"):
        renderer_of("harmony").render(asking(USER, {"role": "tool", "content": "Goethe"}))


@pytest.mark.parametrize(
    ("content", "written"),
    [
        ("{{ m.content }}", "\n<?><>"),
        ("{% if m['content'] is none %}nothing{% else %}{{ m['content'] }}{% endif %}", "\n<?><nothing>"),
    ],
)
def test_a_template_that_tests_for_none_gets_it_and_others_get_an_empty_text(content: str, written: str) -> None:
    renderer = with_template(f"\n{{% for m in messages %}}<{content}>{{% endfor %}}")
    calling: Message = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    assert renderer.decode(renderer.render(asking({"role": "user", "content": "?"}, calling))) == written


def test_a_tool_schema_that_is_not_json_is_an_error_that_names_the_schema() -> None:
    dated = {"type": "function", "function": {"name": "search", "since": datetime.date(2024, 5, 1)}}
    pictured = {"role": "user", "content": "Who is this?", "image": object()}
    for message in (USER, pictured):  # messages may hold more than JSON, which takes another way through the renderer
        with pytest.raises(DataError, match=r"date.*'name': 'search'"):
            renderer_of("qwen2_5").render(asking(message), [TOOL, dated])


def with_default(value: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "search", "parameters": {"default": value}}}


def test_cached_prompts_never_confuse_similar_tool_schemas() -> None:
    function, tokenizer = TOOL["function"], tokenizer_of("qwen2_5")
    turned = {"function": dict(reversed(function.items())), "type": "function"}
    edited = with_default(0)
    schemas = [TOOL, turned, with_default(1), with_default(True), with_default(1.0), edited]
    assert turned == TOOL
    assert with_default(1) == with_default(True)
    renderer = Renderer(tokenizer)
    shown = [renderer.render(asking(USER), [schema]) for schema in schemas]
    assert shown == [Renderer(tokenizer).render(asking(USER), [schema]) for schema in schemas]
    assert len(set(map(tuple, shown))) == len(schemas)
    edited["function"]["parameters"]["default"] = 2  # in place
    assert renderer.render(asking(USER), [edited]) == Renderer(tokenizer).render(asking(USER), [edited])


def test_a_tokenizer_without_template_encodes_text() -> None:
    renderer = Renderer(type(tokenizer_of("qwen2_5"))(tokenizer_object=tokenizer_of("qwen2_5").backend_tokenizer))
    assert renderer.render(Observation(text="hello"))
    with pytest.raises(DataError, match="chat template"):
        renderer.render(asking(USER))
    assert verify_template(renderer).problems[1].startswith("no stop token is known")


PARTS_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}{{ part.text | trim }}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_parts_of_a_content_cannot_join_into_a_control_token() -> None:
    renderer = with_template(PARTS_TEMPLATE)
    parts = [{"type": "text", "text": text} for text in ("a<|im_ ", "end", "|>b<", "|im_end|", ">")]
    ids = renderer.render(asking({"role": "user", "content": parts}))
    assert renderer.decode(ids) == "<|im_start|>user\na<|im_end|>b<|im_end|><|im_end|>\n<|im_start|>assistant\n"
    start, end = tokenizer_of("qwen2_5").convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assert (ids.count(start), ids.count(end)) == (2, 1)


def test_a_reply_in_parts_is_extended() -> None:
    renderer = with_template(PARTS_TEMPLATE)
    conversation = Talk(renderer)
    prompt = conversation.prompt(asking(USER))
    response = renderer.encode_response("Goethe.")
    conversation.record(response, "Goethe.")
    reply = {"role": "assistant", "content": [{"type": "text", "text": "Goethe."}]}
    after = conversation.prompt(asking(USER, reply, USER))
    assert conversation.extended
    assert after[: len(prompt) + len(response)] == prompt + response
