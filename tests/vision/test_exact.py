"""A model that sees, computed in parts, is exactly the model: the tower apart, packed, as a tree, and paged."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from agent_r1.engines.base import Completion, Prompt, Sampling
from agent_r1.engines.local.local_engine import LocalEngine
from agent_r1.errors import DataError
from agent_r1.learn.batch.packs import Pack, merge_steps, pack
from agent_r1.learn.batch.tree import PrefixSharing
from agent_r1.learn.model.policy import PolicyModel
from agent_r1.tokens.rendering import Renderer
from agent_r1.types import Message, Observation, Step, StopReason, Trajectory
from agent_r1.vision.eyes import Eyes, Sight
from agent_r1.vision.pictures import Picture, by_key, without_repeats
from tests.engines.engine_sides import both
from tests.vision.tiny_models import KINDS, make_model, make_tokenizer, own_logits, picture

TALL, WIDE, SMALL = picture(1, 64, 24), picture(2, 40, 96), picture(3, 16, 16)
PICTURES = [TALL, WIDE, SMALL]


def parts(*content: Picture | str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": c} if isinstance(c, str) else {"type": "image", "image": c} for c in content]


CONVERSATIONS: dict[str, list[Message]] = {
    "none": [{"role": "user", "content": "no picture at all"}],
    "several in a message": [{"role": "user", "content": parts(TALL, "and", WIDE, "which?")}],
    "the same twice": [{"role": "user", "content": parts(SMALL, SMALL, "alike?")}],
    "several messages": [
        {"role": "user", "content": parts("look ", WIDE)},
        {"role": "assistant", "content": "once more"},
        {"role": "user", "content": parts(TALL, " now?")},
    ],
}


def render(kind: str, messages: list[Message]) -> tuple[list[int], list[Picture]]:
    tokenizer = make_tokenizer(kind)
    _, form = make_model(kind, tokenizer)
    ids = Renderer(tokenizer, pictures=form).render(Observation(messages=messages))
    shown = [p["image"] for m in messages if isinstance(m["content"], list) for p in m["content"] if "image" in p]
    return ids, shown


@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_tower_apart_and_the_decoder_over_embeddings_are_the_model(kind: str, messages: list[Message]) -> None:
    ids, shown = render(kind, messages)
    model, form = make_model(kind, make_tokenizer(kind))
    expected = own_logits(model, form, ids, shown)
    ids_N, known = np.array(ids), by_key(shown)
    with torch.no_grad():
        positions = torch.from_numpy(form.positions(ids_N, known))
        hidden = Eyes(model, form).hidden(torch.tensor(ids), positions, Sight.of(ids_N, known, form))
        got = model.get_output_embeddings()(hidden)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


def trajectories(kind: str) -> list[Trajectory]:
    """Two attempts at a row that share their first picture, one with a second picture, and one without pictures."""
    tokenizer = make_tokenizer(kind)
    _, form = make_model(kind, tokenizer)
    renderer, said = Renderer(tokenizer, pictures=form), tokenizer.encode("it is<|im_end|>", add_special_tokens=False)
    pad = tokenizer.convert_tokens_to_ids(form.placeholder)

    def step(messages: list[Message], response: list[int]) -> Step:
        shown = [p["image"] for m in messages if isinstance(m["content"], list) for p in m["content"] if "image" in p]
        ids = renderer.render(Observation(messages=messages))
        none = [0.0] * len(response)
        return Step(prompt_ids=ids, response_ids=response, response_logprobs=none, pictures=without_repeats(shown))

    first = step(CONVERSATIONS["several in a message"], said)
    more = renderer.new_ids(
        Observation(messages=CONVERSATIONS["several in a message"]),
        said,
        "it is",
        Observation(
            messages=[
                *CONVERSATIONS["several in a message"],
                {"role": "assistant", "content": "it is"},
                {"role": "user", "content": parts(SMALL, "sure?")},
            ]
        ),
    )
    assert more is not None
    second = Step(
        prompt_ids=[*first.prompt_ids, *said, *more],
        response_ids=[pad, *said],  # an untrained policy samples the placeholder: a token like any other
        response_logprobs=[0.0] * (1 + len(said)),
        pictures=(TALL, WIDE, SMALL),
    )
    made = [
        [first, second],
        [step(CONVERSATIONS["several in a message"], said[1:])],
        [step(CONVERSATIONS["none"], said)],
    ]
    return [
        Trajectory(row_id="r", trajectory_id=f"t{index}", steps=steps, stop=StopReason.ANSWERED)
        for index, steps in enumerate(made)
    ]


def logprobs(policy: PolicyModel, packs: Sequence[Pack]) -> Tensor:
    """By column."""
    numbers = torch.cat([policy.logprobs(each, temperature=1.0)[0] for each in packs])
    return numbers[torch.cat([each.columns_T for each in packs]).argsort()]


def by_definition(kind: str, made: list[Trajectory]) -> Tensor:
    """The log-prob of every response token from the whole model, one step at a time."""
    model, form = make_model(kind, make_tokenizer(kind))
    rows = []
    for step in (step for each in made for step in each.steps):
        ids = step.prompt_ids + step.response_ids
        shown = [p for _, p in form.spans(np.array(ids), by_key(step.pictures))]
        logits = own_logits(model, form, ids, shown)[len(step.prompt_ids) - 1 : -1]
        rows.append(logits.log_softmax(-1).gather(-1, torch.tensor(step.response_ids)[:, None])[:, 0])
    return torch.cat(rows)


@pytest.mark.parametrize("sharing", ["off", "on"])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_merged_and_tree_give_the_log_probs_and_the_gradient_of_single_steps(kind: str, sharing: Any) -> None:
    made = trajectories(kind)
    segments = merge_steps(made)
    assert [len(segment.pictures) for segment in segments] == [3, 2, 0]  # the two steps are one segment
    gradients = []
    cases: list[tuple[int, PrefixSharing]] = [(10_000, sharing), (1, "off")]
    for budget, share in cases:
        model, form = make_model(kind, make_tokenizer(kind))
        policy = PolicyModel(model, pictures=form, train_vision=True)
        got = logprobs(policy, pack(segments, budget, prefix_sharing=share, pictures=form))
        torch.testing.assert_close(got, by_definition(kind, made), rtol=0, atol=1e-5)
        (got * torch.linspace(-1, 1, len(got))).sum().backward()
        gradients.append({name: p.grad for name, p in policy.model.named_parameters() if p.grad is not None})
    together, apart = gradients
    assert together.keys() == apart.keys()
    assert any("vis" in name for name in together)  # the tower learns
    for name, gradient in together.items():
        torch.testing.assert_close(gradient, apart[name], rtol=1e-4, atol=1e-5, msg=name)


def test_a_frozen_tower_gets_no_gradient_and_looks_once() -> None:
    model, form = make_model("qwen3_vl", make_tokenizer("qwen3_vl"))
    policy = PolicyModel(model, pictures=form)
    for _ in range(2):
        logprobs(policy, pack(merge_steps(trajectories("qwen3_vl")), 10_000, pictures=form)).sum().backward()
    assert all(p.grad is None for p in model.model.visual.parameters())
    eyes = policy._eyes
    assert eyes is not None
    assert eyes.looked == 3


def engine(kind: str, *, device: str = "cpu", **settings: Any) -> LocalEngine:
    model, form = make_model(kind, make_tokenizer(kind))
    sizes = {"max_running": 8, "max_batch_tokens": 16, "max_cached_tokens": 2048, "burst": 1, "block_size": 4}
    return LocalEngine(model.to(device), seed=0, pictures=form, **(sizes | settings))


@both
@pytest.mark.parametrize("kind", KINDS)
def test_what_the_engine_samples_has_the_log_probs_of_the_model(kind: str, side: dict[str, Any]) -> None:
    """Text and pictures in one batch, chunks that end inside pictures, and a second turn in the session's cache."""

    async def sample() -> list[tuple[Prompt, Completion]]:
        running = engine(kind, **side)
        prompts = [Prompt(step.prompt_ids, step.pictures) for each in trajectories(kind) for step in each.steps]
        asked = [
            (prompt, running.generate(prompt, Sampling(max_tokens=6), session=f"s{index}"))
            for index, prompt in enumerate(prompts)
        ]
        answers = await asyncio.gather(*(answer for _, answer in asked))
        longer = Prompt(prompts[0].ids + answers[0].token_ids + prompts[0].ids[-3:], prompts[0].media)
        again = await running.generate(longer, Sampling(max_tokens=6), session="s0")
        assert running.stats.reused_tokens + running.stats.shared_tokens > len(prompts[0].ids)
        assert running._runner.eyes is not None
        assert running._runner.eyes.looked == 3  # each picture once, though five prompts show them
        await running.close()
        return [*zip(prompts, answers, strict=True), (longer, again)]

    model, form = make_model(kind, make_tokenizer(kind))
    for prompt, answer in asyncio.run(sample()):
        ids = prompt.ids + answer.token_ids
        shown = [p for _, p in form.spans(np.array(ids), by_key(prompt.media))]
        expected = own_logits(model, form, ids, shown)[len(prompt.ids) - 1 : -1].log_softmax(-1)
        got = expected.gather(-1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(answer.logprobs), got, rtol=0, atol=1e-4)


def test_only_the_decoder_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled tower would be compiled again for every number of pictures, which takes minutes."""
    compiled: list[Any] = []
    monkeypatch.setattr("agent_r1.engines.local.local_engine.compile_each", compiled.extend)
    running = engine("qwen3_vl", compile_layers=True)
    assert running._runner.eyes is not None
    tower = {id(module) for part in running._runner.eyes.tower for module in part.modules()}
    assert len(compiled) == 3
    assert tower.isdisjoint(map(id, compiled))
    asyncio.run(running.close())


@both
def test_the_engine_looks_again_with_new_weights(side: dict[str, Any]) -> None:
    async def run() -> None:
        running = engine("qwen3_vl", **side)
        step = trajectories("qwen3_vl")[0].steps[0]
        other, _ = make_model("qwen3_vl", make_tokenizer("qwen3_vl"), seed=1)
        await running.generate(Prompt(step.prompt_ids, step.pictures), Sampling(max_tokens=2), session="a")
        await running.load_weights(other.state_dict().items(), 1)
        await running.generate(Prompt(step.prompt_ids, step.pictures), Sampling(max_tokens=2), session="b")
        assert running._runner.eyes is not None
        assert running._runner.eyes.looked == 4
        await running.close()

    asyncio.run(run())


def test_a_prompt_without_its_picture_or_with_half_of_one_is_refused() -> None:
    async def run() -> None:
        running = engine("qwen3_vl")
        step = trajectories("qwen3_vl")[0].steps[0]
        with pytest.raises(DataError, match="not given"):
            await running.generate(Prompt(step.prompt_ids, (SMALL,)), Sampling(max_tokens=2), session="a")
        with pytest.raises(DataError, match="token ids are integers"):
            await running.generate(Prompt(step.prompt_ids), Sampling(max_tokens=2), session="a")
        first = next(place for place, token in enumerate(step.prompt_ids) if token < 0)
        with pytest.raises(DataError, match="is cut"):
            await running.generate(
                Prompt(step.prompt_ids[: first + 2], step.pictures), Sampling(max_tokens=2), session="a"
            )
        await running.close()

    asyncio.run(run())


@both
def test_a_prompt_may_end_with_a_picture(side: dict[str, Any]) -> None:
    """Its last token is then a chunk of one token that samples, and not a sampled one."""

    async def run(prompt: Prompt) -> Completion:
        running = engine("qwen3_vl", max_batch_tokens=len(prompt.ids) - 1, **side)
        answer = await running.generate(prompt, Sampling(max_tokens=3), session="a")
        await running.close()
        return answer

    model, form = make_model("qwen3_vl", make_tokenizer("qwen3_vl"))
    prompt = Prompt([5, 6, *form.ids(SMALL)], (SMALL,))
    answer = asyncio.run(run(prompt))
    expected = own_logits(model, form, prompt.ids + answer.token_ids, [SMALL])[len(prompt.ids) - 1 : -1].log_softmax(-1)
    got = expected.gather(-1, torch.tensor(answer.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(answer.logprobs), got, rtol=0, atol=1e-4)
