"""The shortcuts to the library beneath transformers give the results of transformers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from agent_r1.tokens.rendering import Renderer
from agent_r1.tokens.tokenizer import fast_decoder, fast_encoder
from agent_r1.types import Message, Observation
from tests.tokens.small_tokenizers import FAMILIES, tokenizer_of
from tests.tokens.talk import Talk

LONG = "the answer is 42. " * 20


@pytest.fixture
def tokenizer() -> Any:
    """A tokenizer that the test may change."""
    return copy.deepcopy(tokenizer_of("qwen3"))


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_ids_and_text_are_the_tokenizers_own(name: str, data: st.DataObject) -> None:
    tokenizer = tokenizer_of(name)
    pieces = st.sampled_from(["<|im_end|>", "<tool_call>", "\n\n", " ", "é", "e\u0301", "🙂", "hello world 42"])
    text = "".join(data.draw(st.lists(pieces | st.text(max_size=5), max_size=8)))
    assert fast_encoder(tokenizer)(text) == tokenizer.encode(text, add_special_tokens=False)
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=12))
    for skip in (False, True):
        expected = tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert fast_decoder(tokenizer)(ids, skip_special_tokens=skip) == expected


def test_truncation_and_padding_of_the_tokenizer_have_no_effect(tokenizer: Any) -> None:
    encode = fast_encoder(tokenizer)
    whole = encode(LONG)
    assert len(tokenizer(LONG, truncation=True, max_length=5)["input_ids"]) == 5
    assert encode(LONG) == whole
    tokenizer.pad_token = tokenizer.eos_token
    assert len(tokenizer("42", padding="max_length", max_length=9)["input_ids"]) == 9
    assert encode("42") == tokenizer.encode("42", add_special_tokens=False)
    tokenizer.backend_tokenizer.enable_truncation(3)  # as if it had been saved with it
    assert fast_encoder(tokenizer)(LONG) == whole


def test_split_special_tokens_is_respected(tokenizer: Any) -> None:
    tokenizer.split_special_tokens = True
    ids = fast_encoder(tokenizer)("<|im_end|>")
    assert len(ids) > 1
    assert ids == tokenizer.encode("<|im_end|>", add_special_tokens=False)


def test_overridden_methods_of_a_tokenizer_are_used(tokenizer: Any) -> None:
    class Shouting(PreTrainedTokenizerFast):  # type: ignore[misc]
        def encode(self, text: Any, *args: Any, **kwargs: Any) -> Any:
            return super().encode(text.upper(), *args, **kwargs)

        def decode(self, *args: Any, **kwargs: Any) -> Any:
            return super().decode(*args, **kwargs).upper()

    shouting = Shouting(tokenizer_object=tokenizer.backend_tokenizer)
    assert fast_encoder(shouting)("hello") == tokenizer.encode("HELLO", add_special_tokens=False)
    assert fast_decoder(shouting)(tokenizer.encode("hello"), skip_special_tokens=False) == "HELLO"


def test_independent_turns_of_one_of_several_templates_are_ignored(tokenizer: Any) -> None:
    counting = (
        "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor %}"
        "{{- '<|im_start|>assistant ' ~ (messages | length) ~ '\n' }}"
    )
    tokenizer.chat_template = {"default": counting, "tool_use": "{% set independent_turns = true %}" + counting}
    user: Message = {"role": "user", "content": "hello"}
    conversation, renderer = Talk(Renderer(tokenizer)), Renderer(tokenizer)
    conversation.prompt(Observation(messages=[user]))
    conversation.record(renderer.encode_response("ok"), "ok")
    ids = conversation.prompt(Observation(messages=[user, {"role": "assistant", "content": "ok"}, user]))
    assert conversation.extended
    assert renderer.decode(ids).endswith("<|im_start|>assistant 3\n")  # not 2, as if the first message were gone
