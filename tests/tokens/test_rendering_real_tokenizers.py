"""The same promises on the real tokenizers and templates of published models.

Set AGENT_R1_TOKENIZERS to a directory whose sub-directories each hold a tokenizer.json and a tokenizer_config.json
(as `AutoTokenizer.from_pretrained` reads them); without it these tests are skipped.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent_r1.tokens.rendering import Renderer
from agent_r1.tokens.template_check import verify_template
from tests.tokens.rendering_checks import (
    Subject,
    check_contents_make_no_control_tokens,
    check_ids_are_the_tokenizers_own,
    check_prompts_extend_what_was_sampled,
)
from tests.tokens.small_tokenizers import TOOL

VARIABLE = "AGENT_R1_TOKENIZERS"
ROOT = os.environ.get(VARIABLE)
DIRECTORIES = sorted(path.parent for path in Path(ROOT).glob("*/tokenizer.json")) if ROOT else []

pytestmark = pytest.mark.skipif(not DIRECTORIES, reason=f"{VARIABLE} names no directory of real tokenizers")
every_tokenizer = pytest.mark.parametrize("directory", DIRECTORIES, ids=lambda path: path.name)
few = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))  # a first load takes seconds


@cache
def subject_of(directory: Path) -> Subject:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(directory))
    renderer = Renderer(tokenizer)
    return Subject.of(
        tokenizer, renderer, turn_end=tokenizer.eos_token, tool_role=verify_template(renderer).extends_after_tool
    )


@every_tokenizer
def test_a_next_user_message_is_appended(directory: Path) -> None:
    assert verify_template(subject_of(directory).renderer, [TOOL]).extends


@every_tokenizer
@few
@given(data=st.data())
def test_a_fresh_prompt_without_look_alikes_is_the_tokenizers_own(directory: Path, data: st.DataObject) -> None:
    subject = subject_of(directory)
    messages = data.draw(subject.conversations(subject.clean()))
    check_ids_are_the_tokenizers_own(subject, messages, data.draw(st.sampled_from([[], [TOOL]])))


@every_tokenizer
@few
@given(data=st.data())
def test_contents_change_no_text_and_make_no_control_tokens(directory: Path, data: st.DataObject) -> None:
    subject = subject_of(directory)
    check_contents_make_no_control_tokens(subject, data.draw(subject.conversations(subject.wild())))


@every_tokenizer
@few
@given(data=st.data())
def test_every_prompt_starts_with_the_exact_prompt_and_response_before_it(directory: Path, data: st.DataObject) -> None:
    subject = subject_of(directory)
    turns = st.lists(st.tuples(subject.responses(), subject.answers(subject.wild())), min_size=1, max_size=3)
    check_prompts_extend_what_was_sampled(subject, data.draw(subject.conversations(subject.wild())), data.draw(turns))


@every_tokenizer
@few
@given(data=st.data())
def test_token_span_holds_the_characters_it_was_asked_for(directory: Path, data: st.DataObject) -> None:
    subject = subject_of(directory)
    ids = subject.renderer.encode_response(data.draw(subject.clean()) + "🙂👩‍🚀你")
    text = subject.renderer.decode(ids)
    start = data.draw(st.integers(0, len(text) - 1))
    end = data.draw(st.integers(start + 1, len(text)))
    first, last = subject.renderer.token_span(ids, start, end)
    # The tokens up to the span say less than its start and one more character, those up to its end all of it.
    assert len(subject.text(ids[:first]).rstrip("\ufffd")) <= start
    assert subject.text(ids[:last])[:end] == text[:end]
    assert subject.text(ids[: last - 1])[:end] != text[:end]
