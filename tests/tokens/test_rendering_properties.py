"""What rendering guarantees, on every tokenizer and chat template under test."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent_r1.tokens.template_check import verify_template
from agent_r1.types import Message, Observation
from tests.tokens.small_tokenizers import FAMILIES, TOOL, template_ids, template_text
from tests.tokens.subjects import SUBJECTS, Subject, subject_of
from tests.tokens.talk import Talk

STAND_IN = "@what-was-sampled@"  # in the template's text, for replies whose own text a template may parse
USER: Message = {"role": "user", "content": "Who wrote Faust?"}

every_subject = pytest.mark.parametrize("name", SUBJECTS)
few = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))  # a first load takes seconds


@every_subject
def test_a_next_user_message_is_appended(name: str) -> None:
    assert verify_template(subject_of(name).renderer, [TOOL]).extends


@every_subject
@few
@given(data=st.data())
def test_a_fresh_prompt_without_look_alikes_is_the_tokenizers_own(name: str, data: st.DataObject) -> None:
    subject = subject_of(name)
    messages = data.draw(subject.conversations(subject.clean()))
    tools = data.draw(st.sampled_from([[], [TOOL]]))
    ids = subject.renderer.render(Observation(messages=messages), tools)
    assert ids == template_ids(subject.tokenizer, messages, tools or None)


@every_subject
@few
@given(data=st.data())
def test_contents_change_no_text_and_make_no_control_tokens(name: str, data: st.DataObject) -> None:
    subject = subject_of(name)
    messages = data.draw(subject.conversations(subject.wild()))
    ids = subject.renderer.render(Observation(messages=messages))
    assert subject.text(ids) == subject.spelled(template_text(subject.tokenizer, messages))
    neutral = template_ids(subject.tokenizer, [subject.neutral(message) for message in messages])
    assert subject.control(ids) == subject.control(neutral)


@every_subject
@few
@given(data=st.data())
def test_every_prompt_starts_with_the_exact_prompt_and_response_before_it(name: str, data: st.DataObject) -> None:
    subject = subject_of(name)
    messages = data.draw(subject.conversations(subject.wild()))
    turns = st.lists(st.tuples(subject.responses(), subject.answers(subject.wild())), min_size=1, max_size=3)
    conversation = Talk(subject.renderer)
    prompt_ids = conversation.prompt(Observation(messages=messages))
    as_seen_by_template = list(messages)
    for response_ids, added in data.draw(turns):  # what the model sampled, and what the env adds to it
        text = subject.renderer.decode(response_ids)
        conversation.record(response_ids, text)
        messages = [*messages, {"role": "assistant", "content": text}, *added]
        as_seen_by_template += [{"role": "assistant", "content": STAND_IN}, *added]

        seen = prompt_ids + response_ids
        prompt_ids = conversation.prompt(Observation(messages=messages))
        assert conversation.extended
        assert prompt_ids[: len(seen)] == seen

        new_ids = prompt_ids[len(seen) :]
        ended = bool(response_ids) and response_ids[-1] in subject.renderer.stop_ids
        assert subject.text(new_ids) == subject.spelled(_rest(subject, as_seen_by_template, ended))
        neutral_rest = _rest(subject, [subject.neutral(message) for message in as_seen_by_template], ended)
        assert subject.control(new_ids) == subject.control(
            subject.tokenizer.encode(neutral_rest, add_special_tokens=False)
        )


def _rest(subject: Subject, messages: list[Message], ended: bool) -> str:
    """The template's text after the last reply; without the end of its turn if the model has sampled that itself."""
    rest = template_text(subject.tokenizer, messages).rpartition(STAND_IN)[2]
    assert rest.startswith(subject.turn_end)
    return rest.removeprefix(subject.turn_end) if ended else rest


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "smollm2", "llama3"])
@few
@given(data=st.data())
def test_appending_gives_the_templates_own_text_for_canonical_replies(name: str, data: st.DataObject) -> None:
    subject = subject_of(name)
    contents = subject.clean().map(str.strip)
    conversation, messages = Talk(subject.renderer), [USER]
    for text, added in data.draw(st.lists(st.tuples(contents, subject.answers(contents)), min_size=1, max_size=3)):
        conversation.prompt(Observation(messages=messages))
        conversation.record(subject.renderer.encode_response(text), text)
        messages = [*messages, {"role": "assistant", "content": text}, *added]
    prompt_ids = conversation.prompt(Observation(messages=messages))
    assert conversation.extended
    assert subject.text(prompt_ids) == template_text(subject.tokenizer, messages)


@every_subject
@few
@given(data=st.data())
def test_token_span_covers_the_characters(name: str, data: st.DataObject) -> None:
    subject = subject_of(name)
    ids = subject.renderer.encode_response(data.draw(subject.clean()) + "🙂👩‍🚀你")
    text = subject.renderer.decode(ids)
    start = data.draw(st.integers(0, len(text) - 1))
    end = data.draw(st.integers(start + 1, len(text)))
    first, last = subject.renderer.token_span(ids, start, end)
    # The tokens before the span spell at most `start` characters; those up to its end spell all of it.
    assert len(subject.text(ids[:first]).rstrip("\ufffd")) <= start
    assert subject.text(ids[:last])[:end] == text[:end]
    assert subject.text(ids[: last - 1])[:end] != text[:end]


@pytest.mark.parametrize("name", FAMILIES)
@few
@given(data=st.data())
def test_token_span_is_every_token_with_a_byte_of_the_characters(name: str, data: st.DataObject) -> None:
    tokenizer, renderer = subject_of(name).tokenizer, subject_of(name).renderer
    words = data.draw(st.lists(st.sampled_from(["🙂", "é", "ab", " 42", "<|im_end|>", "\n\n"]), min_size=1, max_size=8))
    ids = [i for word in words for i in tokenizer.encode(word, add_special_tokens=False)]  # emojis span several tokens
    text = renderer.decode(ids)
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, len(text)))
    # In byte-level vocabularies a token has one character per byte, so the bytes of each token can be counted.
    lengths = [len(token) for token in tokenizer.convert_ids_to_tokens(ids)]
    starts = [sum(lengths[:i]) for i in range(len(ids))]
    low, high = len(text[:start].encode()), len(text[:end].encode())
    overlapping = [i for i in range(len(ids)) if starts[i] < high and starts[i] + lengths[i] > low]
    first, last = renderer.token_span(ids, start, end)
    assert list(range(first, last)) == (overlapping if start < end else [])
