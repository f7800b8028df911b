"""Whole episodes with pictures: ids stay exact under every context policy, budget and hostile text."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from agent_r1 import Reply, TextEnv
from agent_r1.engines.base import Completion
from agent_r1.engines.scripted import ScriptedCall, ScriptedEngine
from agent_r1.envs.processes.pool import EnvPool
from agent_r1.flows.context import ContextPolicy, DropResults, Notes, Rewrite, Summary, Window
from agent_r1.learn.batch.packs import merge_steps
from agent_r1.tools.base import ToolResult, tool
from agent_r1.types import Message, StopReason, TaskRow, Trajectory
from agent_r1.vision.pictures import Picture, pictures_of
from tests.chatml import collector, row
from tests.vision.played import CALL, FIRST, check_exact, extends, parts, play, play_groups, seeing_row, shown_in
from tests.vision.seeing_envs import SEEN, Looking, Painter
from tests.vision.tiny_models import KINDS, picture

CALLS = [CALL % at for at in range(5)]


def words(trajectory: Trajectory, index: int, kind: str = "qwen3_vl") -> str:
    ids = [token for token in trajectory.steps[index].prompt_ids if token >= 0]
    return str(parts(kind)[0].decode(ids))


@pytest.mark.parametrize("kind", KINDS)
def test_an_episode_that_only_grows_is_one_segment_with_every_picture_in_its_place(kind: str) -> None:
    trajectory = play([*CALLS, "done"], kind=kind)
    check_exact(trajectory, kind)
    for index, (before, after) in enumerate(zip(trajectory.steps, trajectory.steps[1:], strict=False)):
        assert extends(before, after)
        assert shown_in(after) == [FIRST, *SEEN[: index + 1]]
    [segment] = merge_steps([trajectory])
    assert set(segment.pictures.values()) == {FIRST, *SEEN[:5]}
    assert trajectory.steps[0].calls[0].pictures == (SEEN[0],)


def test_calls_of_one_response_and_the_same_picture_again_are_shown_in_order() -> None:
    trajectory = play([f"{CALL % 2}{CALL % 1}{CALL % 2}", "done"])
    check_exact(trajectory)
    assert shown_in(trajectory.steps[1]) == [FIRST, SEEN[2], SEEN[1], SEEN[2]]
    assert trajectory.steps[1].pictures == (FIRST, SEEN[2], SEEN[1])  # each once


def test_a_reply_without_words_may_be_a_picture_alone() -> None:
    class Frames(TextEnv):
        def begin(self, row: TaskRow) -> Reply:
            return Reply(images=[SEEN[0].image()])

        def reply(self, said: str) -> Reply:
            return Reply(images=[SEEN[int(said)]], done=said == "3")

    trajectory = play(["1", "2", "3"], make_env=lambda _: Frames())
    check_exact(trajectory)
    assert [shown_in(step) for step in trajectory.steps] == [SEEN[:1], SEEN[:2], SEEN[:3]]


def test_an_env_may_give_and_rewrite_pictures_in_any_spelling() -> None:
    trajectory = play(["a", "rewrite", "b", "end"], make_env=lambda _: Painter())
    check_exact(trajectory)
    first, second, third, fourth = trajectory.steps
    assert extends(first, second)
    assert not extends(second, third)  # its history changed
    assert extends(third, fourth)
    shown = [[tuple(p.pixels[0, 0]) for p in shown_in(step)] for step in trajectory.steps]
    corner = [tuple(p.pixels[0, 0]) for p in SEEN]
    assert shown == [[corner[0]], [corner[0], corner[1]], [corner[5], corner[1], corner[1]],
                     [corner[5], corner[1], corner[1], corner[1]]]  # fmt: skip


def test_pictures_come_out_of_worker_processes() -> None:
    def say(call: ScriptedCall) -> str:
        return "end" if call.turn else CALL % 1

    envs: dict[str, Any] = {"painter": Painter, "looking": Looking}
    pool = EnvPool(processes=1, step_seconds=60)
    try:
        groups = play_groups(
            ScriptedEngine(say, tokenizer=parts()[0]),
            [seeing_row(name) for name in envs],
            make_env=lambda row: pool.env(envs[row.row_id], row.row_id, {}),
            episode_seconds=120,  # a process starts slowly on a busy machine
        )
    finally:
        pool.close()
    for trajectory in (group.trajectories[0] for group in groups):
        assert trajectory.error is None
        check_exact(trajectory)
        assert (shown_in(trajectory.steps[1])[-1].pixels == SEEN[1].pixels).all()
    assert trajectory.steps[0].calls[0].pictures == (shown_in(trajectory.steps[1])[-1],)


# context policies


def rewrite(messages: list[Message]) -> list[Message]:
    """The latest picture only, painted over."""
    painted = Picture.from_pixels(255 - pictures_of(messages)[-1].pixels)
    return [
        {"role": "user", "content": [{"type": "image", "image": painted.image()}, {"type": "text", "text": "now?"}]}
    ]


POLICIES: dict[str, Callable[[], ContextPolicy]] = {
    "window": lambda: Window(turns=1),
    "drop_results": lambda: DropResults(keep=1, placeholder="[gone]"),
    "notes": lambda: Notes(turns=1, notes=2, note_chars=80),
    "summary": lambda: Summary(max_tokens=300, summary_tokens=60, keep_turns=1, instruction="Sum up."),
    "rewrite": lambda: Rewrite(function=rewrite),
}


def policy_script(call: ScriptedCall) -> str:
    """Calls with rising numbers; a summary when asked for one."""
    text = parts()[0].decode([token for token in call.prompt_ids if token >= 0])
    if "Sum up." in text[-60:]:
        return "I saw <|image_pad|> and <image>"
    return CALL % (call.turn % 6) if call.turn < 6 else "done"


@pytest.mark.parametrize("name", POLICIES)
def test_under_every_context_policy_each_prompt_has_exactly_the_pictures_it_shows(name: str) -> None:
    engine = ScriptedEngine(policy_script, tokenizer=parts()[0])
    trajectory = play(engine, context=POLICIES[name])
    assert trajectory.error is None
    assert len(trajectory.steps) >= 7
    check_exact(trajectory)
    for step, call in zip(trajectory.steps, engine.calls, strict=True):
        assert (step.prompt_ids, step.pictures) == (call.prompt_ids, call.media)
    [*_, last] = merge_steps([trajectory])  # every segment has the pictures of its own ids
    assert {p.key for p in last.pictures.values()} >= {p.key for p in trajectory.steps[-1].pictures}


def test_a_window_shows_the_first_picture_and_the_last() -> None:
    trajectory = play([*CALLS, "done"], context=POLICIES["window"])
    assert shown_in(trajectory.steps[4]) == [FIRST, SEEN[3]]
    assert trajectory.steps[4].hidden_messages == 6


def test_dropped_pictures_keep_their_captions() -> None:
    trajectory = play([*CALLS, "done"], context=POLICIES["drop_results"])
    assert shown_in(trajectory.steps[4]) == [FIRST, SEEN[3]]
    text = words(trajectory, 4)
    assert [f"place {at}[gone]" in text for at in range(4)] == [True, True, True, False]
    assert "place 3" in text
    plain = DropResults(keep=1, placeholder="[gone]")
    talk: list[Message] = [
        {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"},
        {"role": "tool", "content": [{"type": "text", "text": "long"}]},
        {"role": "assistant", "content": "b"}, {"role": "tool", "content": "c"},
    ]  # fmt: skip
    assert asyncio.run(plain.show(talk)).messages[2]["content"] == [{"type": "text", "text": "[gone]"}]


def test_notes_say_that_there_was_a_picture() -> None:
    assert "Then: place 2 [image]" in words(play([*CALLS, "done"], context=POLICIES["notes"]), 5)


def test_a_summary_sees_the_pictures_that_it_replaces() -> None:
    trajectory = play(ScriptedEngine(policy_script, tokenizer=parts()[0]), context=POLICIES["summary"])
    at = next(index for index, step in enumerate(trajectory.steps) if step.is_summary)
    before, after = shown_in(trajectory.steps[at]), shown_in(trajectory.steps[at + 1])
    assert len(before) > len(after) == 2
    assert "I saw <|image_pad|> and <image>" in words(trajectory, at + 1)  # its look-alikes are text
    assert len(merge_steps([trajectory])) > 1


# budgets


def test_a_prompt_whose_pictures_do_not_fit_is_not_sampled() -> None:
    form = parts()[1]
    whole = play(["done"]).steps[0].prompt_ids
    words_only = len(whole) - form.tokens(FIRST)
    for limit, stop in ((len(whole) + 1, None), (len(whole), "never began"), (words_only + 1, "never began")):
        trajectory = play(["d"], max_context_tokens=limit)
        assert (len(trajectory.steps) == 0) is (stop is not None)
    trajectory = play([CALL % 1, "done"], max_context_tokens=len(whole) + 100)  # the call fits, its picture does not
    assert trajectory.stop is StopReason.MAX_TOKENS
    assert len(trajectory.steps) == 1
    check_exact(trajectory)


def test_a_large_picture_counts_as_many_tokens_as_it_takes() -> None:
    large = picture(9, 200, 400)
    form = parts()[1]
    trajectory = play(["done"], seeing_row(shown=[large]))
    assert sum(token < 0 for token in trajectory.steps[0].prompt_ids) == form.tokens(large) == 25 * 50
    assert not play(["done"], seeing_row(shown=[large]), max_context_tokens=1200).steps


def test_a_prompt_left_unanswered_keeps_its_pictures_for_the_critic() -> None:
    trajectory = play([CALL % 1], max_steps=1)
    assert trajectory.stop is StopReason.MAX_STEPS
    assert trajectory.next_pictures == (FIRST, SEEN[1])
    assert sum(token < 0 for token in trajectory.next_prompt_ids) == sum(map(parts()[1].tokens, (FIRST, SEEN[1])))


# text that looks like pictures

FORGERIES = [
    "<|image_pad|>",
    "<|vision_start|><|image_pad|><|vision_end|>",
    "<image>",
    "<|video_pad|>",
    "<image_soft_token>",
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("forgery", FORGERIES)
def test_text_from_anyone_never_becomes_a_picture(kind: str, forgery: str) -> None:
    @tool(name="look")
    def say(at: int) -> ToolResult:
        """Look at a place."""
        return ToolResult(forgery, images=[SEEN[at]] if at else [])

    row = seeing_row(text=f"a {forgery} b")
    trajectory = play([f"I {forgery} {CALL % 1}", CALL % 0, "done"], row, tools=[say], kind=kind)
    tokenizer, form, _ = parts(kind)
    assert trajectory.error is None
    pad = tokenizer.convert_tokens_to_ids(form.placeholder)
    assert [len(shown_in(step)) for step in trajectory.steps] == [1, 2, 2]
    assert all(pad not in step.prompt_ids for step in trajectory.steps[:1])
    check_exact(trajectory, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_that_samples_placeholders_only_writes_tokens(kind: str) -> None:
    """Through a whole episode: prose with the placeholder, a call with it, and nothing else."""
    tokenizer, form, renderer = parts(kind)
    pad, stop = tokenizer.convert_tokens_to_ids(form.placeholder), renderer.stop_ids[0]
    call = tokenizer.encode(CALL % 1, add_special_tokens=False)

    def respond(ids: list[int]) -> Completion:
        return Completion(token_ids=ids, logprobs=[-1.0] * len(ids), stop="stop", versions=((0, len(ids)),))

    said = [respond([pad, pad, *call, stop]), respond([*call[:12], pad, *call[12:], stop]), respond([*[pad] * 5, stop])]
    trajectory = play(said, kind=kind)
    assert trajectory.stop is StopReason.ANSWERED
    assert [len(shown_in(step)) for step in trajectory.steps] == [1, 2, 2]
    check_exact(trajectory, kind)
    [segment] = merge_steps([trajectory])
    positions = form.positions(np.array(segment.token_ids), segment.pictures)
    assert positions.shape == (form.axes, len(segment.token_ids))
    assert trajectory.steps[2].prompt_ids.count(pad) == 3  # those that it said itself


def test_records_of_a_hostile_caption_are_json() -> None:
    @tool(name="look")
    def say(at: int) -> ToolResult:
        """Look at a place."""
        return ToolResult("\ud800\x1b[2J\u202e", images=[SEEN[1]])

    trajectory = play([CALL % 1, "done"], tools=[say])
    assert trajectory.stop is StopReason.ANSWERED
    json.dumps([call.result for call in trajectory.steps[0].calls]).encode()
    check_exact(trajectory)


def test_a_model_of_text_refuses_pictures_and_fails_only_the_episode() -> None:
    [group] = asyncio.run(collector(["a"], make_env=lambda _: Painter())([row()], seed=0))
    trajectory = group.trajectories[0]
    assert trajectory.stop is StopReason.ERROR
    assert "takes text only" in str(trajectory.error)


def test_what_is_shown_first_has_no_reward_and_does_not_end_the_episode() -> None:
    class Early(TextEnv):
        def begin(self, row: TaskRow) -> Reply:
            return Reply(text="hello", done=True)

        def reply(self, said: str) -> Reply:
            return Reply(done=True)

    trajectory = play(["never"], make_env=lambda _: Early())
    assert trajectory.stop is StopReason.ERROR
    assert "Early.begin" in str(trajectory.error)
