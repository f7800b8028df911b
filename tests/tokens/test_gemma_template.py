"""The bundled template for Gemma: what it writes, and that a conversation only ever grows."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from agent_r1.build.recipe import TEMPLATES
from agent_r1.errors import DataError
from agent_r1.tokens.formats.infer import template_format
from agent_r1.tokens.formats.table import FORMATS
from agent_r1.tokens.rendering import INDEPENDENT_TURNS, Renderer
from agent_r1.tokens.template_check import verify_template
from agent_r1.types import Message, Observation
from tests.tokens.small_tokenizers import TOOL, template_text, tokenizer_of
from tests.tokens.talk import Talk

TEMPLATE = (TEMPLATES / "gemma_tools.jinja").read_text(encoding="utf-8")
USER: Message = {"role": "user", "content": "Who wrote Faust?"}
CALL = FORMATS["hermes"].write_call("search", {"query": "Faust"})


@cache
def tokenizer() -> Any:
    backend = tokenizer_of("smollm2").backend_tokenizer
    names = ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"]
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>")
    made.add_special_tokens({"additional_special_tokens": names[2:]})
    made.chat_template = TEMPLATE
    return made


def written(*messages: Message, tools: list[dict[str, Any]] | None = None) -> str:
    return template_text(tokenizer(), list(messages), tools)


def test_the_template_has_no_problems_and_ends_answers_with_the_turn() -> None:
    renderer = Renderer(tokenizer())
    assert verify_template(renderer, [TOOL]).problems == ()
    assert template_format(renderer).name == "hermes"
    assert [tokenizer().decode([each]) for each in renderer.stop_ids] == ["<end_of_turn>", "<eos>"]


def test_system_message_and_tools_open_the_first_user_turn() -> None:
    asked = "<bos><start_of_turn>user\nWho wrote Faust?<end_of_turn>\n<start_of_turn>model\n"
    assert written(USER) == asked
    assert written({"role": "system", "content": "Be brief."}, USER) == asked.replace("Who", "Be brief.\n\nWho")
    with_tools = written({"role": "system", "content": "Be brief."}, USER, tools=[TOOL])
    opening = with_tools.removeprefix("<bos><start_of_turn>user\nBe brief.\n\nTools:\n<tools>\n{").partition(
        "\n</tools>"
    )
    assert opening[0].startswith('"name": "search"')
    assert opening[2].endswith("</tool_call>\n\n" + asked.partition("user\n")[2])
    begun = written({"role": "system", "content": "Be brief."}, {"role": "assistant", "content": "Yes?"}, USER)
    assert begun.startswith(
        "<bos><start_of_turn>user\nBe brief.<end_of_turn>\n<start_of_turn>model\nYes?<end_of_turn>\n"
    )


def test_calls_are_written_as_hermes_and_results_share_a_turn() -> None:
    parsed = {"type": "function", "function": {"name": "search", "arguments": {"query": "Faust"}}}
    results = [{"role": "tool", "content": text} for text in ("Goethe", "1808")]
    shown = written(USER, {"role": "assistant", "content": "", "tool_calls": [parsed]}, *results)
    assert shown == written(USER, {"role": "assistant", "content": CALL}, *results)
    responses = "\n".join(f"<tool_response>\n{text}\n</tool_response>" for text in ("Goethe", "1808"))
    assert shown.endswith(f"{CALL}<end_of_turn>\n<start_of_turn>user\n{responses}<end_of_turn>\n<start_of_turn>model\n")
    with pytest.raises(DataError, match="unknown role critic"):
        Renderer(tokenizer()).render(Observation(messages=[USER, {"role": "critic", "content": "?"}]))


def test_rendering_only_new_turns_gives_the_ids_of_the_whole_conversation() -> None:
    whole, count = INDEPENDENT_TURNS.subn("", TEMPLATE)
    assert count == 1
    conversations = [Talk(Renderer(tokenizer(), chat_template=each)) for each in (TEMPLATE, whole)]
    messages: list[Message] = [{"role": "system", "content": "Be brief."}, USER]
    for answers in ([{"role": "tool", "content": "Goethe"}], [USER], [USER, {"role": "system", "content": "Note."}]):
        ids = Renderer(tokenizer()).encode_response(CALL)
        prompts = [conversation.prompt(Observation(messages=list(messages)), [TOOL]) for conversation in conversations]
        assert prompts[0] == prompts[1]
        assert tokenizer().decode(prompts[0]) == written(*messages, tools=[TOOL])
        for conversation in conversations:
            conversation.record(ids, CALL)
        messages += [{"role": "assistant", "content": CALL}, *answers]
