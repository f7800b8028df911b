"""Bugs that other libraries had with pictures, each as a test of what happens here instead."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from agent_r1.engines.base import Completion, Prompt, Sampling
from agent_r1.engines.local.local_engine import LocalEngine
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.errors import DataError
from agent_r1.learn.batch.packs import merge_steps, pack
from agent_r1.learn.model.policy import PolicyModel
from agent_r1.tokens.rendering import Renderer
from agent_r1.tokens.template_check import verify_template
from agent_r1.types import Observation, StopReason, Trajectory
from agent_r1.vision.picture_format import QwenPictures
from agent_r1.vision.pictures import by_key
from tests.vision.played import CALL, FIRST, check_exact, collector, extends, look, parts, play, seeing_row, shown_in
from tests.vision.tiny_models import KINDS, make_model, make_tokenizer, own_logits, picture

SEEN = [picture(at, 16, 24) for at in range(6)]
# As published templates that show pictures of users only, and text of tools.
USERS_ONLY = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}{% if part.type == 'image' and m.role == 'user' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def users_only() -> Renderer:
    tokenizer = make_tokenizer("qwen3_vl")
    return Renderer(tokenizer, chat_template=USERS_ONLY, pictures=parts()[1])


def test_a_template_that_drops_pictures_of_tools_is_reported_before_and_fails_the_episode() -> None:
    # TRL #5663: the template dropped the picture of a tool's result, its features stayed, and training crashed.
    renderer = users_only()
    report = verify_template(renderer)
    assert not report.tool_pictures
    assert any("tool_role=user" in problem for problem in report.problems)
    assert verify_template(parts()[2]).tool_pictures
    [group] = asyncio.run(replace(collector([CALL % 1, "never"]), renderer=renderer)([seeing_row()], seed=0))
    trajectory = group.trajectories[0]
    assert trajectory.stop is StopReason.ERROR
    assert "tool_role=user" in str(trajectory.error)


def test_results_in_user_messages_show_their_pictures_under_such_a_template() -> None:
    # TRL #5663, #6906: the way out that the error names.
    make_env = lambda _: ToolEnv(tools=[look], tool_role="user")  # noqa: E731
    played = collector([CALL % 1, "done"], make_env=make_env)
    [group] = asyncio.run(replace(played, renderer=users_only())([seeing_row()], seed=0))
    trajectory = group.trajectories[0]
    assert trajectory.stop is StopReason.ANSWERED
    check_exact(trajectory)
    assert shown_in(trajectory.steps[1]) == [FIRST, SEEN[1]]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_as_many_placeholders_as_features_after_a_tool_returned_pictures(kind: str) -> None:
    # TRL #6286, #6906: tokens and features disagreed after tools returned pictures, for families other than Qwen.
    _, form, _ = parts(kind)
    trajectory = play([CALL % 1, CALL % 2, "done"], kind=kind)
    [segment] = merge_steps([trajectory])
    [one] = pack([segment], 10_000, pictures=form)
    assert one.sight is not None
    features = sum(form.tokens(each) for each in one.sight.pictures)
    assert len(one.sight.rows_P) == len(set(one.sight.slots_P.tolist())) == features


def test_a_picture_is_expanded_once_however_many_turns_follow() -> None:
    # TRL #6294, prime-rl #1739: placeholders that were already expanded were expanded again, from turn to turn.
    form = parts()[1]
    trajectory = play([*(CALL % at for at in range(5)), "done"])
    for turn, step in enumerate(trajectory.steps):
        count = sum(token < 0 for token in step.prompt_ids)
        assert count == form.tokens(FIRST) + turn * form.tokens(SEEN[0])


def test_a_picture_whose_result_did_not_fit_is_not_in_what_is_trained() -> None:
    # verl #4050: the tool's result was cut off, and its picture stayed in the batch.
    room = len(play(["a"]).steps[0].prompt_ids) + 100
    trajectory = play([CALL % 1, "never"], max_context_tokens=room)
    assert trajectory.stop is StopReason.MAX_TOKENS
    assert [step.pictures for step in trajectory.steps] == [(FIRST,)]
    [segment] = merge_steps([trajectory])
    assert list(segment.pictures.values()) == [FIRST]


@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_that_samples_placeholders_breaks_neither_positions_nor_the_learner(kind: str) -> None:
    # verl #7038, #5817: a sampled placeholder was taken for a picture, and a run crashed after hours.
    tokenizer, form, renderer = parts(kind)
    pad = tokenizer.convert_tokens_to_ids(form.placeholder)
    call = [pad, pad, *tokenizer.encode(CALL % 1, add_special_tokens=False), renderer.stop_ids[0]]
    said = [[*call], [pad, renderer.stop_ids[0]]]
    trajectory = play(
        [Completion(token_ids=ids, logprobs=[-1.0] * len(ids), stop="stop", versions=((0, len(ids)),)) for ids in said],
        kind=kind,
    )
    assert trajectory.stop is StopReason.ANSWERED
    model, _ = make_model(kind, tokenizer)
    ids = trajectory.steps[-1].prompt_ids + trajectory.steps[-1].response_ids
    shown = [each for _, each in form.spans(np.array(ids), by_key(trajectory.steps[-1].pictures))]
    policy = PolicyModel(model, pictures=form)
    with torch.no_grad():
        packs = pack(merge_steps([trajectory]), 10_000, pictures=form)
        got = torch.cat([policy.logprobs(each, temperature=1.0)[0] for each in packs])[-1]
    expected = own_logits(make_model(kind, tokenizer)[0], form, ids, shown)[-2].log_softmax(-1)[ids[-1]]
    assert got.item() == pytest.approx(expected.item(), abs=1e-5)


def test_the_engine_computes_the_very_ids_of_the_prompt() -> None:
    # sglang #26555: ids were decoded and encoded again, so that the model read others than those that were trained.
    tokenizer, form, _ = parts()
    odd = [*tokenizer.encode("a", add_special_tokens=False), *tokenizer.encode("b", add_special_tokens=False)]
    prompt = Prompt([*odd, *form.ids(FIRST), tokenizer.convert_tokens_to_ids("<|image_pad|>"), *odd], (FIRST,))
    model, _ = make_model("qwen3_vl", tokenizer)

    async def sample() -> Completion:
        sizes = {"max_running": 2, "max_batch_tokens": 16, "max_cached_tokens": 512, "burst": 1, "block_size": 4}
        engine = LocalEngine(model, seed=0, pictures=form, **sizes)  # type: ignore[arg-type]
        answer = await engine.generate(prompt, Sampling(max_tokens=4), session="a")
        await engine.close()
        return answer

    answer = asyncio.run(sample())
    whole = own_logits(make_model("qwen3_vl", tokenizer)[0], form, prompt.ids + answer.token_ids, [FIRST])
    expected = whole[len(prompt.ids) - 1 : -1].log_softmax(-1).gather(-1, torch.tensor(answer.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(answer.logprobs), expected, rtol=0, atol=1e-4)


def test_no_limit_cuts_a_picture() -> None:
    # agent-lightning #441, prime-rl #2064: prompts were truncated inside a picture, whose grid stayed.
    form = parts()[1]
    for room in range(60, 200, 7):
        trajectory = play([CALL % 1, CALL % 2, "done"], max_context_tokens=room, max_response_tokens=70)
        check_exact(trajectory)
    whole = play(["a"]).steps[0]
    cut = next(place for place, token in enumerate(whole.prompt_ids) if token < 0) + 2
    with pytest.raises(DataError, match="is cut"):
        form.positions(np.array(whole.prompt_ids[:cut]), by_key([FIRST]))


def blind(trajectory: Trajectory) -> Trajectory:
    return replace(trajectory, steps=[replace(step, pictures=()) for step in trajectory.steps])


def test_training_without_the_pictures_is_an_error_and_other_pixels_give_another_result() -> None:
    # agent-lightning #559, #560: the learner never got the pixels, and nothing said so.
    form = parts()[1]
    trajectory = play([CALL % 1, "done"])
    with pytest.raises(DataError, match="not given"):
        pack(merge_steps([blind(trajectory)]), 10_000, pictures=form)
    with pytest.raises(DataError, match="takes text only"):
        pack(merge_steps([trajectory]), 10_000)
    model, _ = make_model("qwen3_vl", parts()[0])
    policy = PolicyModel(model, pictures=form)
    numbers = []
    for shown in (FIRST, picture(101, 24, 40)):
        played = play(["done"], seeing_row(shown=[shown]))
        with torch.no_grad():
            [one] = pack(merge_steps([played]), 10_000, pictures=form)
            numbers.append(policy.logprobs(one, temperature=1.0)[0])
    assert (numbers[0] - numbers[1]).abs().max() > 1e-3


def test_sampler_and_learner_resize_pictures_alike_near_every_limit() -> None:
    # NeMo-RL #3940: the engine made pictures smaller when the prompt was long, and the learner did not.
    form = parts()[1]
    assert isinstance(form, QwenPictures)
    large = picture(9, 120, 200)
    for limit in (None, 40 * 64, 10 * 64):
        small: Any = form if limit is None else replace(form, max_pixels=limit, min_pixels=64)
        renderer = Renderer(parts()[0], pictures=small)
        rows = [seeing_row(text=text, shown=[large]) for text in ("", "x" * 3000)]  # whatever stands beside it
        rendered = [renderer.render(Observation(messages=row.prompt)) for row in rows]
        counts = {sum(token < 0 for token in ids) for ids in rendered}
        assert counts == {small.tokens(large)} == {len(small.values(large)) // small.merge**2}


def test_steps_that_only_grow_are_trained_as_one_segment_with_pictures() -> None:
    # SkyRL and others train every step of a model that sees apart, unpacked.
    trajectory = play([*(CALL % at for at in range(4)), "done"])
    assert all(map(extends, trajectory.steps, trajectory.steps[1:]))
    assert len(merge_steps([trajectory])) == 1
