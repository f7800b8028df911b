"""An agent over HTTP: its tools run on the server, the client sees what they do."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, ClassVar

import httpx
import pytest

from agent_r1.engines.scripted import ScriptedEngine
from agent_r1.flows.episode import Episode
from agent_r1.flows.flow import AgentFlowBase
from agent_r1.serve.api.agent_mode import AgentMode
from agent_r1.serve.api.app import Server
from agent_r1.serve.api.limits import ServeLimits
from agent_r1.types import Observation, StopReason, TaskRow
from tests.chatml import collector, row, tokenizer
from tests.serve.api_server import CALL, ECHO, HI, ask, scripted_model, serving, serving_agent


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = answer.text.split("\n\n")
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def test_the_agent_runs_its_tools_and_the_answer_tells_what_happened() -> None:
    with serving_agent([f"I ask.\n{CALL % 'a'}", "it is aaa"]) as (url, engine):
        answer = ask(url).json()
    choice = answer["choices"][0]
    assert choice["message"]["content"] == "I ask.\n\nit is aaa"
    assert choice["finish_reason"] == "stop"
    told = answer["agent_r1"]
    assert (told["stop"], told["steps"], told["answer"]) == ("answered", 2, "it is aaa")
    call, result = told["events"]
    assert call == {"type": "tool_call", "step": 0, "name": "echo", "arguments": '{"text": "a"}'}
    assert {key: result[key] for key in ("type", "step", "name", "result", "failed")} == {
        "type": "tool_result",
        "step": 0,
        "name": "echo",
        "result": "aaa",
        "failed": False,
    }
    assert answer["usage"]["prompt_tokens"] == sum(len(call.prompt_ids) for call in engine.calls)
    assert len(engine.released) == 1


def test_a_stream_interleaves_text_and_tool_events() -> None:
    with serving_agent([f"I ask.\n{CALL % 'a'}", "it is aaa"]) as (url, _):
        chunks = events(ask(url, stream=True))
    story: list[str] = []
    for chunk in chunks:
        text = chunk["choices"][0]["delta"].get("content") if chunk["choices"] else ""
        if "agent_r1" in chunk:
            story.append(chunk["agent_r1"]["type"])
        elif text and story and story[-1].startswith("text"):
            story[-1] += text
        elif text:
            story.append(f"text {text}")
    assert story == ["text I ask.", "tool_call", "tool_result", "text \n\nit is aaa", "end"]


def test_the_conversation_goes_to_the_agent_with_the_systems_own_message_unless_the_client_has_one() -> None:
    system = {"role": "system", "content": "Be brief."}
    rows = [TaskRow(prompt=[system, {"role": "user", "content": f"row {i}"}], row_id=str(i)) for i in range(2)]
    history = [*HI, {"role": "assistant", "content": "hello"}, {"role": "user", "content": "more"}]
    with serving_agent(["a", "b"], rows=rows) as (url, engine):
        ask(url, messages=history, row=1)
        ask(url, messages=[{"role": "system", "content": "Sing."}, *history])
    from tests.chatml import tokenizer

    own, given = (tokenizer().decode(call.prompt_ids) for call in engine.calls)
    assert own.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>")
    assert given.startswith("<|im_start|>system\nSing.<|im_end|>\n<|im_start|>user\nhi<|im_end|>")
    assert "row 1" not in own


def test_a_budget_that_ends_the_agent_is_a_length() -> None:
    with serving_agent([CALL % "a"] * 3, max_steps=2) as (url, _):
        answer = ask(url).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["agent_r1"]["stop"] == "max_steps"


def test_a_tool_that_breaks_is_an_error_of_the_server() -> None:
    with serving_agent([CALL % "fail"] * 2) as (url, _):
        answer = ask(url)
        last = events(ask(url, stream=True))[-1]
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "agent_error")
    assert "broken" in answer.json()["error"]["message"]
    assert last["error"]["code"] == "agent_error"


def test_a_conversation_that_does_not_fit_is_the_apis_own_error() -> None:
    with serving_agent(["a"], max_context_tokens=50) as (url, _):
        answer = ask(url, messages=[{"role": "user", "content": "x" * 60}])
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [ECHO]}, "tools"),
        ({"n": 2}, "n"),
        ({"stop": "x"}, "stop"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"logprobs": True}, "logprobs"),
        ({"row": 1}, "row"),
        ({"row": "0"}, "row"),
        ({"messages": [*HI, {"role": "assistant", "content": "x"}]}, "messages[1].role"),
        ({"messages": [{"role": "tool", "tool_call_id": "1", "content": "x"}, *HI]}, "messages[0]"),
    ],
)
def test_what_an_agent_cannot_do_is_refused(fields: dict[str, Any], param: str) -> None:
    with serving_agent([]) as (url, _):
        answer = ask(url, **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


class Review(AgentFlowBase):
    roles: ClassVar[tuple[str, ...]] = ("writer", "reviewer")

    async def run(self, row: TaskRow, episode: Episode) -> StopReason:
        for role in self.roles:
            await episode.act(Observation(messages=row.prompt), role=role)
        return StopReason.ANSWERED


def test_what_a_request_asks_for_holds_for_roles_with_settings_of_their_own() -> None:
    engine = ScriptedEngine(["a", "b"], tokenizer=tokenizer())
    played = collector(engine, make_flow=lambda _: Review(lambda _: NotImplemented))
    played = replace(played, role_sampling={"reviewer": replace(played.sampling, max_tokens=7, temperature=0.5)})
    served = scripted_model(engine)
    with serving(Server(AgentMode(served, played, [row()]), served, limits=ServeLimits())) as url:
        assert ask(url, temperature=0.0, top_p=0.25).status_code == 200
    asked = [(call.sampling.temperature, call.sampling.top_p, call.sampling.max_tokens) for call in engine.calls]
    assert asked == [(0.0, 0.25, 64), (0.0, 0.25, 7)]


def test_text_completions_belong_to_the_bare_model() -> None:
    with serving_agent([]) as (url, _):
        assert ask(url, "/v1/completions", prompt="x").status_code == 400
