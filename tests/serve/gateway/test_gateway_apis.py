"""Anthropic's messages and OpenAI's responses: the official clients, and request sequences in the shape of command-line
agents (Claude Code, Codex), written by hand from the public documentation of the APIs."""

from __future__ import annotations

import base64
import json
from typing import Any

import anthropic
import httpx
import openai
import pytest

from agent_r1.engines.base import Completion
from agent_r1.learn.batch.packs import merge_steps
from agent_r1.serve.gateway.client import ClientSettings
from agent_r1.tokens.rendering import Renderer
from agent_r1.types import StopReason, TaskRow, Trajectory
from tests.pictures import PICTURE
from tests.serve.gateway.agent_runs import ASK, SEARCH, encode, openai_client, play, renderer, search
from tests.vision.tiny_models import make_model, make_tokenizer

FUNCTION = SEARCH["function"]
TOOL = {"name": "search", "description": FUNCTION["description"], "input_schema": FUNCTION["parameters"]}
RESPONSES_TOOL = {"type": "function", **FUNCTION}


def anthropic_client(client: ClientSettings) -> Any:
    return anthropic.AsyncAnthropic(base_url=client.anthropic_base_url, api_key=client.api_key, max_retries=0)


def kinds(trajectory: Trajectory) -> list[str]:
    return [step.info["history"] for step in trajectory.steps]


def result(trajectory: Trajectory) -> Any:
    assert trajectory.stop is StopReason.ANSWERED, trajectory.error
    return trajectory.steps[-1].info["agent_result"]


# Anthropic


async def ask_twice(row: TaskRow, client: ClientSettings) -> list[Any]:
    """Call, send the content back as it came, and call again."""
    async with anthropic_client(client) as api:
        messages: list[Any] = [{"role": "user", "content": "Who?"}]
        options: Any = {"model": "m", "max_tokens": 200, "tools": [TOOL], "system": "Be brief."}
        first = await api.messages.create(messages=messages, **options)
        uses = [block for block in first.content if block.type == "tool_use"]
        answers = [
            {"type": "tool_result", "tool_use_id": use.id, "content": f"{use.input['query']}: yes"} for use in uses
        ]
        messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": answers}]
        last = await api.messages.create(messages=messages, **options)
    return [first.stop_reason, [block.type for block in first.content], last.stop_reason, last.content[0].text]


def test_the_official_anthropic_client_plays_with_exact_ids() -> None:
    [trajectory] = play(ask_twice, ["Well.\n" + search("A") + "\n" + search("B"), "done"])
    assert result(trajectory) == ["tool_use", ["text", "tool_use", "tool_use"], "end_turn", "done"]
    assert kinds(trajectory) == ["new", "continued"]
    assert [call.result for call in trajectory.steps[0].calls] == ["A: yes", "B: yes"]
    assert len(merge_steps([trajectory])) == 1


def test_both_apis_write_the_same_prompt() -> None:
    async def by_chat(row: TaskRow, client: ClientSettings) -> None:
        async with openai_client(client) as api:
            messages: list[Any] = [{"role": "system", "content": "Be brief."}, ASK]
            await api.chat.completions.create(model="m", messages=messages, tools=[SEARCH])

    async def by_responses(row: TaskRow, client: ClientSettings) -> None:
        async with openai_client(client) as api:
            await api.responses.create(model="m", instructions="Be brief.", input="Who?", tools=[RESPONSES_TOOL])

    script = [search("A"), "done"]
    prompts = [play(agent, script)[0].steps[0].prompt_ids for agent in (ask_twice, by_chat, by_responses)]
    assert prompts[0] == prompts[1] == prompts[2]


def test_an_anthropic_stream_adds_up_to_the_answer() -> None:
    async def agent(row: TaskRow, client: ClientSettings) -> list[Any]:
        options: Any = {"model": "m", "max_tokens": 100, "tools": [TOOL], "messages": [ASK]}
        async with anthropic_client(client) as api, api.messages.stream(**options) as stream:
            events = [event.type async for event in stream]
            message = await stream.get_final_message()
        assert events[0] == "message_start"
        assert events[-1] == "message_stop"
        text, use = message.content
        assert (text.type, use.type) == ("text", "tool_use")
        return [text.text, use.input, message.stop_reason, message.usage.output_tokens]

    [trajectory] = play(agent, ["Well.\n" + search("A")])
    size = len(trajectory.steps[0].response_ids)
    assert result(trajectory) == ["Well.", {"query": "A", "top": 3}, "tool_use", size]


def test_thinking_is_sent_as_a_block_if_asked_for_and_may_come_back() -> None:
    async def agent(row: TaskRow, client: ClientSettings) -> list[str]:
        thinks: Any = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "model": "m", "max_tokens": 100}
        messages: list[Any] = [{"role": "user", "content": "Who?"}]
        async with anthropic_client(client) as api:
            first = await api.messages.create(messages=messages, **thinks)
            messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": "Sure?"}]
            await api.messages.create(messages=messages, **thinks)
        return [block.type for block in first.content]

    [trajectory] = play(agent, ["<think>hm</think>Seven.", "Yes."])
    assert result(trajectory) == ["thinking", "text"]
    assert kinds(trajectory) == ["new", "continued"]


def test_a_stop_sequence_is_named() -> None:
    async def agent(row: TaskRow, client: ClientSettings) -> list[Any]:
        async with anthropic_client(client) as api:
            options: Any = {"model": "m", "max_tokens": 100, "stop_sequences": ["END", "STOP"]}
            said = await api.messages.create(messages=[{"role": "user", "content": "Who?"}], **options)
        return [said.stop_reason, said.stop_sequence, said.content[0].text]

    [trajectory] = play(agent, ["one STOP two"])
    assert result(trajectory) == ["stop_sequence", "STOP", "one "]


def test_anthropic_errors_have_their_own_form_and_the_words_that_clients_know() -> None:
    async def agent(row: TaskRow, client: ClientSettings) -> list[str]:
        async with anthropic_client(client) as api:
            ask: Any = {"model": "m", "max_tokens": 100}
            with pytest.raises(anthropic.BadRequestError) as long:
                await api.messages.create(messages=[{"role": "user", "content": "more " * 900}], **ask)
            tool: Any = {"type": "web_search_20250305", "name": "web_search"}
            with pytest.raises(anthropic.BadRequestError) as foreign:
                await api.messages.create(messages=[{"role": "user", "content": "?"}], tools=[tool], **ask)
            await api.messages.create(messages=[{"role": "user", "content": "?"}], **ask)
        async with anthropic.AsyncAnthropic(
            base_url=client.anthropic_base_url.partition("/s/")[0], api_key="guess", max_retries=0
        ) as stranger:
            with pytest.raises(anthropic.AuthenticationError):
                await stranger.messages.create(messages=[{"role": "user", "content": "?"}], **ask)
        return [each.value.body["error"]["message"] for each in (long, foreign)]  # type: ignore[index]

    [trajectory] = play(agent, ["one"], max_context_tokens=300)
    long, foreign = result(trajectory)
    assert long.startswith("prompt is too long")
    assert "web_search_20250305" in foreign


# In the shape of Claude Code: always streams, counts tokens, puts cache marks on its blocks, sends a first system block
# that differs in every request, uses parallel tools, and shortens its history with a summary.


def claude_code(number: int, messages: list[Any]) -> dict[str, Any]:
    billing = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.{number}; cch={number:05x};"}
    return {
        "model": "claude-sonnet-4-5",
        "max_tokens": 32000,
        "stream": True,
        "temperature": 1,
        "metadata": {"user_id": "user_1"},
        "system": [
            billing,
            {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "Environment: Linux", "cache_control": {"type": "ephemeral"}},
        ],
        "tools": [TOOL | {"cache_control": {"type": "ephemeral"}}],
        "messages": messages,
    }


def sse_blocks(text: str) -> list[dict[str, Any]]:
    """Put a stream of Anthropic's events together, as command-line agents do."""
    blocks: list[dict[str, Any]] = []
    for line in text.splitlines():
        event = json.loads(line.removeprefix("data: ")) if line.startswith("data: ") else {}
        if event.get("type") == "content_block_start":
            blocks.append({**event["content_block"], "json": ""})
        elif event.get("type") == "content_block_delta":
            delta = event["delta"]
            blocks[event["index"]]["json"] += delta.get("partial_json", "")
            if "text" in delta:
                blocks[event["index"]]["text"] += delta["text"]
    for block in blocks:
        if written := block.pop("json"):
            block["input"] = json.loads(written)
    return blocks


def test_a_session_in_the_shape_of_claude_code_is_exact_until_it_is_compacted() -> None:
    async def agent(row: TaskRow, client: ClientSettings) -> list[int]:
        headers = {"x-api-key": client.api_key, "anthropic-version": "2023-06-01", "anthropic-beta": "claude-code"}
        async with httpx.AsyncClient(base_url=client.anthropic_base_url, headers=headers, trust_env=False) as api:
            reminder = {"type": "text", "text": "<system-reminder>Today is Monday.</system-reminder>"}
            messages: list[Any] = [{"role": "user", "content": [reminder, {"type": "text", "text": "Who?"}]}]
            counted = await api.post("/v1/messages/count_tokens", json={"model": "m", "messages": messages})
            for number in range(2):
                messages[-1]["content"][-1]["cache_control"] = {"type": "ephemeral"}  # moves to the last message
                sent = await api.post("/v1/messages?beta=true", json=claude_code(number, messages))
                messages[-1]["content"][-1].pop("cache_control")
                blocks = sse_blocks(sent.text)
                uses = [block for block in blocks if block["type"] == "tool_use"]
                results = [
                    {"type": "tool_result", "tool_use_id": use["id"], "content": [{"type": "text", "text": "yes"}]}
                    for use in uses
                ]
                results[-1]["is_error"] = False
                messages += [{"role": "assistant", "content": blocks}, {"role": "user", "content": results}]
            summary = [{"role": "user", "content": "This session is continued from a summary: A and B: yes."}]
            await api.post("/v1/messages?beta=true", json=claude_code(2, summary))
            return [counted.status_code, counted.json()["input_tokens"]]

    [trajectory] = play(agent, ["I look.\n" + search("A") + "\n" + search("B"), search("C"), "done"])
    status, counted = result(trajectory)
    assert (status, counted) == (200, counted)
    assert counted > 10
    assert kinds(trajectory) == ["new", "continued", "new"]
    assert [sorted(set(segment.step_indices)) for segment in merge_steps([trajectory])] == [[0, 1], [2]]
    assert "billing" not in renderer().decode(trajectory.steps[0].prompt_ids)
    assert "<system-reminder>" in renderer().decode(trajectory.steps[0].prompt_ids)


# Responses


def test_the_official_client_plays_the_responses_api_with_exact_ids() -> None:
    async def agent(row: TaskRow, client: ClientSettings) -> str:
        items: list[Any] = [{"role": "user", "content": "Who?"}]
        async with openai_client(client) as api:
            while True:
                said = await api.responses.create(model="m", input=items, tools=[RESPONSES_TOOL])
                items += [item.model_dump(exclude_none=True) for item in said.output]
                calls = [item for item in said.output if item.type == "function_call"]
                if not calls:
                    return str(said.output_text)
                items += [{"type": "function_call_output", "call_id": call.call_id, "output": "yes"} for call in calls]

    [trajectory] = play(agent, ["<think>hm</think>Well.\n" + search("A") + search("B"), search("C"), "done"])
    assert result(trajectory) == "done"
    assert kinds(trajectory) == ["new", "continued", "continued"]
    assert len(merge_steps([trajectory])) == 1
    assert [call.result for call in trajectory.steps[0].calls] == ["yes", "yes"]


def test_a_response_is_continued_by_its_id() -> None:
    async def agent(row: TaskRow, client: ClientSettings) -> str:
        async with openai_client(client) as api:
            brief: Any = {"model": "m", "instructions": "Be brief."}
            first = await api.responses.create(input="Who?", tools=[RESPONSES_TOOL], **brief)
            [call] = first.output
            answer: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "yes"}]
            last = await api.responses.create(
                input=answer, previous_response_id=first.id, tools=[RESPONSES_TOOL], **brief
            )
            with pytest.raises(openai.NotFoundError):
                await api.responses.create(input="?", previous_response_id="resp_other", **brief)
        return str(last.output_text)

    [trajectory] = play(agent, [search("A"), "done"])
    assert result(trajectory) == "done"
    assert kinds(trajectory) == ["new", "continued"]


def test_a_responses_stream_adds_up_to_the_response() -> None:
    async def agent(row: TaskRow, client: ClientSettings) -> list[Any]:
        options: Any = {"model": "m", "input": "Who?", "tools": [RESPONSES_TOOL]}
        async with openai_client(client) as api, api.responses.stream(**options) as stream:
            text, arguments = "", ""
            async for event in stream:
                text += event.delta if event.type == "response.output_text.delta" else ""
                arguments += event.delta if event.type == "response.function_call_arguments.delta" else ""
            final = await stream.get_final_response()
        return [text, arguments, final.status, [item.type for item in final.output]]

    [trajectory] = play(agent, ["Well.\n" + search("A")])
    assert result(trajectory) == ["Well.", '{"query": "A", "top": 3}', "completed", ["message", "function_call"]]


def test_a_cut_response_is_incomplete() -> None:
    async def agent(row: TaskRow, client: ClientSettings) -> list[Any]:
        async with openai_client(client) as api:
            said = await api.responses.create(model="m", input="Who?", max_output_tokens=2)
        return [said.status, said.incomplete_details and said.incomplete_details.reason]

    [trajectory] = play(agent, ["one two three four"])
    assert trajectory.steps[0].info["agent_result"] == ["incomplete", "max_output_tokens"]


def test_a_session_in_the_shape_of_codex_is_exact() -> None:
    """Streams, sends everything with every request, and carries reasoning items along."""

    async def agent(row: TaskRow, client: ClientSettings) -> int:
        text = [{"type": "input_text", "text": "<environment_context>cwd: /tmp</environment_context>"}]
        items: list[Any] = [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be safe."}]},
            {"type": "message", "role": "user", "content": text},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Who?"}]},
        ]
        headers = {"Authorization": f"Bearer {client.api_key}", "originator": "codex_cli_rs"}
        async with httpx.AsyncClient(headers=headers, trust_env=False) as api:
            for _ in range(2):
                body = {
                    "model": "gpt-5-codex",
                    "instructions": "You are a coding agent.",
                    "input": items,
                    "tools": [RESPONSES_TOOL | {"strict": False}],
                    "tool_choice": "auto",
                    "parallel_tool_calls": False,
                    "reasoning": {"effort": "medium", "summary": "auto"},
                    "store": False,
                    "stream": True,
                    "include": ["reasoning.encrypted_content"],
                    "prompt_cache_key": "0199",
                }
                sent = await api.post(f"{client.base_url}/responses", json=body)
                lines = [line for line in sent.text.splitlines() if line.startswith("data: ")]
                events = [json.loads(line.removeprefix("data: ")) for line in lines]
                assert [event["sequence_number"] for event in events] == list(range(len(events)))
                done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
                items += done
                items += [
                    {"type": "function_call_output", "call_id": item["call_id"], "output": "exit code 0"}
                    for item in done
                    if item["type"] == "function_call"
                ]
        return sent.status_code

    # Without parallel calls, only the first of two counts.
    [trajectory] = play(agent, ["<think>hm</think>I look.\n" + search("A") + search("B"), "done"])
    assert result(trajectory) == 200
    assert kinds(trajectory) == ["new", "continued"]
    assert [call.result for call in trajectory.steps[0].calls] == ["exit code 0"]
    assert trajectory.steps[1].response_ids == encode("done<|im_end|>")


@pytest.mark.parametrize(
    ("option", "param"),
    [
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {}}}}, "response_format"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"wizardry": 1}, "wizardry"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_responses_api_cannot_do_here_is_named(option: dict[str, Any], param: str) -> None:
    async def agent(row: TaskRow, client: ClientSettings) -> Any:
        async with httpx.AsyncClient(trust_env=False) as api:
            refused = await api.post(f"{client.base_url}/responses", json={"model": "m", "input": "?"} | option)
            await api.post(f"{client.base_url}/responses", json={"model": "m", "input": "?"})
        return [refused.status_code, refused.json()["error"]["param"]]

    [trajectory] = play(agent, ["one"])
    assert result(trajectory) == [400, param]


# Pictures


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_pictures_are_shown_to_models_that_take_them_and_stay_exact(api: str) -> None:
    tokenizer = make_tokenizer("qwen2_5_vl")
    model = Renderer(tokenizer, pictures=make_model("qwen2_5_vl", tokenizer)[1])
    shown = base64.b64encode(PICTURE.encoded).decode()
    url = f"data:image/png;base64,{shown}"
    text = {"chat": "text", "responses": "input_text", "messages": "text"}[api]
    parts: dict[str, dict[str, Any]] = {
        "chat": {"type": "image_url", "image_url": {"url": url}},
        "responses": {"type": "input_image", "image_url": url},
        "messages": {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": shown}},
    }

    async def agent(row: TaskRow, client: ClientSettings) -> int:
        path, history = {"chat": ("chat/completions", "messages"), "responses": ("responses", "input")}.get(
            api, ("messages", "messages")
        )
        asked: list[Any] = [{"role": "user", "content": [parts[api], {"type": text, "text": "What is it?"}]}]
        async with httpx.AsyncClient(trust_env=False, headers={"x-api-key": client.api_key}) as http:
            for _ in range(2):
                body = {"model": "m", "max_output_tokens" if api == "responses" else "max_tokens": 50, history: asked}
                sent = await http.post(f"{client.base_url}/{path}", json=body)
                asked += [{"role": "assistant", "content": "Grey."}, {"role": "user", "content": "Sure?"}]
        return sent.status_code

    said = model.encode_response("Grey.")
    completion = Completion(token_ids=said, logprobs=[0.0] * len(said), stop="stop")
    [trajectory] = play(agent, [completion, completion], model=model)
    assert result(trajectory) == 200
    [picture] = trajectory.steps[0].pictures
    assert trajectory.steps[1].pictures == (picture,)
    assert picture.encoded == PICTURE.encoded
    assert kinds(trajectory) == ["new", "continued"]
    assert len(merge_steps([trajectory])) == 1


def test_a_picture_for_a_model_that_takes_text_only_is_refused() -> None:
    url = f"data:image/png;base64,{base64.b64encode(PICTURE.encoded).decode()}"

    async def agent(row: TaskRow, client: ClientSettings) -> int:
        content = [{"type": "image_url", "image_url": {"url": url}}]
        async with httpx.AsyncClient(trust_env=False) as http:
            seen = {"model": "m", "messages": [{"role": "user", "content": content}]}
            refused = await http.post(f"{client.base_url}/chat/completions", json=seen)
            await http.post(f"{client.base_url}/chat/completions", json={"model": "m", "messages": [ASK]})
        return refused.status_code

    [trajectory] = play(agent, ["one"])
    assert result(trajectory) == 400
