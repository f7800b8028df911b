"""What an agent's calls become: exact steps, whose sampled ids survive every way in which clients write histories."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from agent_r1.engines.base import Completion
from agent_r1.learn.batch.packs import merge_steps
from agent_r1.serve.gateway.client import ClientSettings
from agent_r1.tokens.formats.infer import template_format
from agent_r1.types import StopReason, TaskRow, Trajectory
from tests.serve.gateway.agent_runs import (
    ASK,
    SEARCH,
    chat,
    echo,
    encode,
    openai_client,
    play,
    renderer,
    result,
    search,
)
from tests.tokens.small_tokenizers import FAMILIES, renderer_of

NOBODY = {"role": "assistant", "content": "Nobody."}


def extends(trajectory: Trajectory, later: int, earlier: int) -> bool:
    """Whether the prompt of one step begins with exactly the prompt and the response of another."""
    first, second = trajectory.steps[earlier], trajectory.steps[later]
    known = first.prompt_ids + first.response_ids
    return second.prompt_ids[: len(known)] == known


def segments(trajectory: Trajectory) -> list[list[int]]:
    """The steps of each segment that is trained."""
    return [sorted(set(segment.step_indices)) for segment in merge_steps([trajectory])]


async def look_up(row: TaskRow, client: ClientSettings) -> str:
    """The usual loop: call, run, call."""
    messages: list[Any] = list(row.prompt)
    while True:
        said = await chat(client, messages, tools=[SEARCH])
        messages.append(echo(said))
        if not said.tool_calls:
            return str(said.content)
        messages += [result(call, f"{json.loads(call.function.arguments)['query']}: yes") for call in said.tool_calls]


def test_an_agents_calls_are_the_steps_that_were_sampled_id_by_id() -> None:
    [trajectory] = play(look_up, [search("A"), "#### 7"])
    first, second = trajectory.steps
    assert trajectory.stop is StopReason.ANSWERED
    assert first.response_ids == encode(f"{search('A')}<|im_end|>")
    added = encode("\n<|im_start|>user\n<tool_response>\nA: yes\n</tool_response><|im_end|>\n<|im_start|>assistant\n")
    assert second.prompt_ids == first.prompt_ids + first.response_ids + added
    assert trajectory.final_text == "#### 7"
    [call] = first.calls
    assert (call.name, call.arguments, call.result) == ("search", {"query": "A", "top": 3}, "A: yes")
    assert call.token_span == (0, len(first.response_ids) - 1)
    assert second.info["agent_result"] == "#### 7"
    assert trajectory.counts["gateway/calls"] == 2
    assert trajectory.counts["gateway/conversations"] == 1


def test_a_model_may_call_several_tools_at_once_and_again() -> None:
    [trajectory] = play(look_up, [search("A") + "\n" + search("B"), search("A"), "done"])
    assert [[call.result for call in step.calls] for step in trajectory.steps] == [["A: yes", "B: yes"], ["A: yes"], []]
    assert segments(trajectory) == [[0, 1, 2]]


def test_results_are_kept_with_their_calls_in_whatever_order_they_come() -> None:
    async def agent(row: TaskRow, client: ClientSettings) -> None:
        said = await chat(client, [ASK], tools=[SEARCH])
        one, two = said.tool_calls
        await chat(client, [ASK, echo(said), result(two, "second"), result(one, "first")], tools=[SEARCH])

    [trajectory] = play(agent, [search("A") + "\n" + search("B"), "done"])
    assert [call.result for call in trajectory.steps[0].calls] == ["first", "second"]
    shown = renderer().decode(trajectory.steps[1].prompt_ids)
    assert shown.index("second") < shown.index("first")  # the model sees what the client sent


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_known_template_plays_calls_with_exact_ids_or_says_that_it_cannot(family: str) -> None:
    """With calls as each family writes them, ids of calls included; the second prompt shows the result."""
    model = renderer_of(family)
    tool_format = template_format(model).choose("auto")
    call = tool_format.write_call("search", {"query": "A"})

    async def agent(row: TaskRow, client: ClientSettings) -> None:
        said = await chat(client, [ASK], tools=[SEARCH])
        assert [each.function.name for each in said.tool_calls] == ["search"]
        await chat(client, [ASK, echo(said), result(said.tool_calls[0], "yes, A")], tools=[SEARCH])

    def sampled(text: str) -> Completion:
        ids = model.encode_response(text)
        return Completion(token_ids=ids, logprobs=[0.0] * len(ids), stop="stop")

    [trajectory] = play(agent, [sampled(call), sampled("done")], model=model)
    assert trajectory.stop is StopReason.ANSWERED, trajectory.error
    assert "yes, A" in model.decode(trajectory.steps[1].prompt_ids)
    kind = trajectory.steps[1].info["history"]
    assert (kind, extends(trajectory, 1, 0)) in (("continued", True), ("rerendered", False))


@pytest.mark.parametrize(
    "rewrite",
    [
        lambda m: {**m, "content": ""},
        lambda m: {**m, "content": []},
        lambda m: {**m, "content": [{"type": "text", "text": ""}]},
        lambda m: {**m, "tool_calls": [spaced(call) for call in m["tool_calls"]]},
        lambda m: {**m, "refusal": None, "annotations": [], "name": None},
    ],
    ids=["empty text", "no parts", "an empty part", "arguments in another order", "more keys"],
)
def test_other_ways_to_write_a_history_keep_the_sampled_ids(rewrite: Any) -> None:
    async def agent(row: TaskRow, client: ClientSettings) -> None:
        said = await chat(client, [ASK], tools=[SEARCH])
        await chat(client, [ASK, rewrite(echo(said)), result(said.tool_calls[0], "yes")], tools=[SEARCH])

    [trajectory] = play(agent, [search("A"), "done"])
    assert extends(trajectory, 1, 0)
    assert trajectory.steps[1].info["history"] == "continued"


def spaced(call: dict[str, Any]) -> dict[str, Any]:
    arguments = dict(reversed(json.loads(call["function"]["arguments"]).items()))
    return {**call, "function": {**call["function"], "arguments": json.dumps(arguments, indent=2)}}


def test_new_call_ids_keep_the_sampled_ids() -> None:
    async def agent(row: TaskRow, client: ClientSettings) -> None:
        said = echo(await chat(client, [ASK], tools=[SEARCH]))
        said["tool_calls"][0]["id"] = "mine"
        answer = {"role": "tool", "tool_call_id": "mine", "content": [{"type": "text", "text": "yes"}]}
        await chat(client, [ASK, said, answer], tools=[SEARCH])

    [trajectory] = play(agent, [search("A"), "done"])
    assert extends(trajectory, 1, 0)


def test_an_answer_that_the_client_changed_starts_a_segment_after_the_exact_beginning() -> None:
    async def agent(row: TaskRow, client: ClientSettings) -> None:
        messages: list[Any] = [ASK]
        for _ in range(2):
            said = await chat(client, messages, tools=[SEARCH])
            messages += [echo(said), result(said.tool_calls[0], "yes")]
        messages[3]["tool_calls"][0]["function"]["arguments"] = '{"query": "another"}'
        await chat(client, messages, tools=[SEARCH])

    [trajectory] = play(agent, [search("A"), search("B"), "done"])
    assert [step.info["history"] for step in trajectory.steps] == ["new", "continued", "rewritten_answer"]
    assert segments(trajectory) == [[0, 1], [2]]
    assert extends(trajectory, 2, 0)  # what was known is not tokenised again
    assert not extends(trajectory, 2, 1)
    assert "another" in renderer().decode(trajectory.steps[2].prompt_ids)
    assert trajectory.counts["gateway/rewritten_answers"] == 1


@pytest.mark.parametrize(
    ("rewrite", "kind"),
    [
        (lambda m: [{"role": "user", "content": "A summary of all that."}], "new"),
        (lambda m: [m[0], *m[3:]], "rewritten_context"),
        (lambda m: [{"role": "user", "content": "Who else?"}, *m[1:]], "rewritten_context"),
        (
            lambda m: [ASK, {"role": "assistant", "content": "Nobody."}, {"role": "user", "content": "?"}],
            "rewritten_answer",
        ),
        (lambda m: [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}, ASK], "foreign"),
    ],
    ids=["summary", "dropped turn", "edited question", "answer replaced", "examples"],
)
def test_a_rewritten_history_is_typed_and_starts_a_segment(rewrite: Any, kind: str) -> None:
    async def agent(row: TaskRow, client: ClientSettings) -> None:
        messages: list[Any] = [ASK]
        for _ in range(2):
            said = await chat(client, messages, tools=[SEARCH])
            messages += [echo(said), result(said.tool_calls[0], "yes")]
        await chat(client, rewrite(messages), tools=[SEARCH])

    [trajectory] = play(agent, [search("A"), search("B"), "done"])
    assert trajectory.steps[2].info["history"] == kind
    assert segments(trajectory) == [[0, 1], [2]]


def test_reasoning_that_a_client_drops_stays_in_the_prompt_and_edited_reasoning_is_a_rewrite() -> None:
    async def agent(row: TaskRow, client: ClientSettings) -> None:
        said = await chat(client, [ASK])
        assert (said.content, said.reasoning_content) == ("Seven.", "hard")
        plain = {"role": "assistant", "content": said.content}
        more = {"role": "user", "content": "Sure?"}
        await chat(client, [ASK, plain, more])
        await chat(client, [ASK, {**plain, "reasoning_content": "hard"}, more])
        await chat(client, [ASK, {**plain, "reasoning_content": "easy"}, more])

    [trajectory] = play(agent, ["<think>hard</think>Seven.", "Yes.", "Yes!", "No."])
    kinds = [step.info["history"] for step in trajectory.steps]
    assert kinds == ["new", "continued", "branched", "rewritten_answer"]
    assert extends(trajectory, 1, 0)
    assert extends(trajectory, 2, 0)


def test_other_tools_start_a_segment() -> None:
    """The tools are at the beginning of the prompt, so nothing after them can be continued."""

    async def agent(row: TaskRow, client: ClientSettings) -> None:
        said = await chat(client, [ASK], tools=[SEARCH])
        more = {**SEARCH, "function": {**SEARCH["function"], "name": "buy"}}
        await chat(client, [ASK, echo(said), result(said.tool_calls[0], "yes")], tools=[SEARCH, more])

    [trajectory] = play(agent, [search("A"), "done"])
    assert trajectory.steps[1].info["history"] == "rerendered"
    assert segments(trajectory) == [[0], [1]]
    assert trajectory.counts["gateway/rerendered"] == 1


def test_sub_agents_are_branches_of_one_trajectory_and_one_segment_each() -> None:
    """Main asks, two sub-agents run at once with conversations of their own, main goes on."""

    async def worker(client: ClientSettings, name: str) -> str:
        system = {"role": "system", "content": f"You are {name}."}
        first = await chat(client, [system, ASK])
        await chat(client, [system, ASK, echo(first), {"role": "user", "content": "More."}])
        return name

    async def agent(row: TaskRow, client: ClientSettings) -> None:
        plan = await chat(client, [ASK])
        await asyncio.gather(worker(client, "left"), worker(client, "right"))
        await chat(client, [ASK, echo(plan), {"role": "user", "content": "Both are done."}])

    [trajectory] = play(agent, lambda call: f"answer {call.turn}", delay=0.02)
    assert len(trajectory.steps) == 6
    found = segments(trajectory)
    assert sorted(map(len, found)) == [2, 2, 2]
    assert [0, 5] in found
    assert trajectory.counts["gateway/conversations"] == 3
    # Every response token is trained in exactly one place.
    columns = [column for segment in merge_steps([trajectory]) for column in segment.columns]
    assert sorted(columns) == list(range(trajectory.num_response_tokens))


def test_steps_are_in_the_order_in_which_calls_began() -> None:
    class Slow:
        """Answers the first call last."""

        def __init__(self) -> None:
            self.later = asyncio.Event()

        async def generate(self, prompt: Any, sampling: Any, *, session: str) -> Any:
            text = "slow" if "slow" in renderer().decode(prompt.ids) else "quick"
            if text == "slow":
                await self.later.wait()
            self.later.set()
            ids = encode(f"{text}<|im_end|>")
            return Completion(token_ids=ids, logprobs=[0.0] * len(ids), stop="stop")

        def release(self, session: str) -> None: ...

    async def agent(row: TaskRow, client: ClientSettings) -> None:
        first = asyncio.create_task(chat(client, [{"role": "user", "content": "slow"}]))
        await asyncio.sleep(0.3)
        await chat(client, [{"role": "user", "content": "fast"}])
        await first

    [trajectory] = play(agent, [], engine=Slow())
    assert [step.action_text for step in trajectory.steps] == ["slow", "quick"]


def test_two_equal_answers_to_one_prompt_are_told_apart_by_their_call_ids() -> None:
    async def agent(row: TaskRow, client: ClientSettings) -> None:
        one, two = [await chat(client, [ASK], tools=[SEARCH]) for _ in range(2)]
        for said in (one, two):
            await chat(client, [ASK, echo(said), result(said.tool_calls[0], "yes")], tools=[SEARCH])

    # The same call, with thinking that no client sends back.
    [trajectory] = play(agent, [f"<think>a</think>{search('A')}", f"<think>b</think>{search('A')}", "x", "y"])
    assert extends(trajectory, 2, 0)
    assert extends(trajectory, 3, 1)


def test_a_stop_text_ends_the_response_as_if_sampling_had_ended_there() -> None:
    async def agent(row: TaskRow, client: ClientSettings) -> None:
        said = await chat(client, [ASK], stop=["\nObservation:"])
        assert said.content == "Action: go"
        await chat(client, [ASK, echo(said), {"role": "user", "content": "Observation: a door"}])

    [trajectory] = play(agent, ["Action: go\nObservation: a window, I guess", "done"])
    sampled = renderer().decode(trajectory.steps[0].response_ids)
    assert sampled.startswith("Action: go\nObservation:")
    assert "window" not in sampled
    assert extends(trajectory, 1, 0)


def test_a_stream_has_the_same_content_as_a_whole_answer() -> None:
    async def agent(row: TaskRow, client: ClientSettings) -> dict[str, Any]:
        async with openai_client(client) as api:
            options: Any = {"model": "m", "messages": [ASK], "tools": [SEARCH]}
            stream = await api.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
            calls: list[Any] = []
            usage: Any = None
            text, finish = "", None
            async for chunk in stream:
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    text += choice.delta.content or ""
                    calls += [[call.function.name, call.function.arguments] for call in choice.delta.tool_calls or ()]
                    finish = choice.finish_reason or finish
        return {"text": text, "calls": calls, "finish": finish, "completion": usage.completion_tokens}

    [trajectory] = play(agent, [f"Let me see.\n{search('A')}"])
    told = trajectory.steps[0].info["agent_result"]
    assert told["text"] == "Let me see."
    assert [(name, json.loads(text)) for name, text in told["calls"]] == [("search", {"query": "A", "top": 3})]
    assert told["finish"] == "tool_calls"
    assert told["completion"] == len(trajectory.steps[0].response_ids)
