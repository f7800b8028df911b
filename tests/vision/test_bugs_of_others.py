"""Bugs that other libraries had with pictures, each as a test of what happens here instead."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from agent_r1.envs.tool_env import ToolEnv
from agent_r1.errors import DataError
from agent_r1.learn.batch.packs import merge_steps, pack
from agent_r1.learn.model.policy import PolicyModel
from agent_r1.tokens.rendering import Renderer
from agent_r1.tokens.template_check import verify_template
from agent_r1.types import Observation, StopReason, Trajectory
from agent_r1.vision.picture_format import QwenPictures
from agent_r1.vision.pictures import by_key
from tests.vision.played import CALL, FIRST, check_exact, collector, look, parts, play, seeing_row, shown_in
from tests.vision.tiny_models import make_model, make_tokenizer, picture

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


def test_a_picture_whose_result_did_not_fit_is_not_in_what_is_trained() -> None:
    # verl #4050: the tool's result was cut off, and its picture stayed in the batch.
    room = len(play(["a"]).steps[0].prompt_ids) + 100
    trajectory = play([CALL % 1, "never"], max_context_tokens=room)
    assert trajectory.stop is StopReason.MAX_TOKENS
    assert [step.pictures for step in trajectory.steps] == [(FIRST,)]
    [segment] = merge_steps([trajectory])
    assert list(segment.pictures.values()) == [FIRST]


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
