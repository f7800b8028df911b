"""Run by an interpreter that has LangChain or LiteLLM: asks the server at URL and prints what came back as JSON.

python foreign_clients.py langchain|litellm URL
"""

from __future__ import annotations

import json
import sys
from typing import Any

TOOL = {
    "type": "function",
    "function": {
        "name": "echo",
        "description": "The same text.",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    },
}
SAY, CALL, LONG = "say: it is 4", "say: CALL", "x" * 5000


def langchain(url: str) -> dict[str, Any]:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(base_url=f"{url}/v1", api_key="secret-key", model="scripted", max_retries=0, temperature=0)
    whole = model.invoke(SAY)
    streamed = "".join(str(chunk.content) for chunk in model.stream(SAY))
    calls = model.bind_tools([TOOL]).invoke(CALL).tool_calls
    merged: Any = None
    for chunk in model.bind_tools([TOOL]).stream(CALL):
        merged = chunk if merged is None else merged + chunk
    try:
        model.invoke(LONG)
        error = ""
    except Exception as caught:  # noqa: BLE001 (what it is called is the question)
        error = f"{type(caught).__mro__} {caught}"
    return {
        "whole": whole.content,
        "tokens": whole.usage_metadata["output_tokens"],
        "streamed": streamed,
        "calls": [[call["name"], call["args"]] for call in calls],
        "streamed_calls": [[call["name"], call["args"]] for call in merged.tool_calls],
        "error": error,
    }


def litellm(url: str) -> dict[str, Any]:
    import litellm as library

    library.telemetry = False
    common = {"model": "openai/scripted", "api_base": f"{url}/v1", "api_key": "secret-key", "max_retries": 0}

    def ask(text: str, **more: Any) -> Any:
        return library.completion(messages=[{"role": "user", "content": text}], **common, **more)

    whole = ask(SAY)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in ask(SAY, stream=True))
    calls = ask(CALL, tools=[TOOL]).choices[0].message.tool_calls
    rebuilt = library.stream_chunk_builder(list(ask(CALL, tools=[TOOL], stream=True)))
    try:
        ask(LONG)
        error = ""
    except Exception as caught:  # noqa: BLE001 (what it is called is the question)
        error = f"{type(caught).__mro__} {caught}"

    def shown(calls: Any) -> list[Any]:
        return [[call.function.name, json.loads(call.function.arguments)] for call in calls]

    return {
        "whole": whole.choices[0].message.content,
        "tokens": whole.usage.completion_tokens,
        "streamed": streamed,
        "calls": shown(calls),
        "streamed_calls": shown(rebuilt.choices[0].message.tool_calls),
        "error": error,
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps({"langchain": langchain, "litellm": litellm}[sys.argv[1]](sys.argv[2])))
