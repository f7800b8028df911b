"""An agent that knows nothing of agent-r1: a loop around the chat-completions API. For the preset `gateway.yaml`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx

from agent_r1.recipes.quickstart.task import calculate, evaluate, lookup
from agent_r1.types import TaskRow

if TYPE_CHECKING:
    from agent_r1.serve.gateway.client import ClientSettings

TOOLS = [lookup.schema, calculate.schema]


async def solve(row: TaskRow, client: ClientSettings) -> str:
    """Let the model call tools until it answers without a call."""
    table = row.env_kwargs["tools_kwargs"]["lookup"]["table"]
    messages: list[dict[str, Any]] = list(row.prompt)
    headers = {"Authorization": f"Bearer {client.api_key}"}
    # Without certificates, which take long to load: the address is on this machine.
    local: Any = {"timeout": None, "trust_env": False, "verify": False}
    async with httpx.AsyncClient(base_url=client.base_url, headers=headers, **local) as api:
        while True:
            body = {"model": client.model, "messages": messages, "tools": TOOLS}
            answer = (await api.post("/chat/completions", json=body)).raise_for_status().json()
            said = answer["choices"][0]["message"]
            messages.append(said)
            if not said.get("tool_calls"):
                return str(said["content"])
            for call in said["tool_calls"]:
                result = run_tool(call["function"]["name"], call["function"]["arguments"], table)
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})


def run_tool(name: str, arguments: str, table: dict[str, int]) -> str:
    """The text that the model reads. The model is told about its mistakes, so that it can correct them."""
    try:
        given = json.loads(arguments)
        if name == "lookup":
            return str(table[given["name"]])
        if name == "calculate":
            return str(evaluate(given["expression"]))
        return f"there is no tool {name!r}"
    except (KeyError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
