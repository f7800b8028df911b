"""An agent as a program: asks, runs the calls, asks again. Only the standard library."""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from typing import Any

DOUBLE = {
    "name": "double",
    "description": "Twice a number.",
    "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}},
}


def ask(messages: list[Any]) -> dict[str, Any]:
    body = {"model": "any", "messages": messages, "tools": [{"type": "function", "function": DOUBLE}]}
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    with urllib.request.urlopen(request) as answer:
        said: dict[str, Any] = json.load(answer)["choices"][0]["message"]
    return said


def main() -> None:
    messages: list[Any] = [{"role": "user", "content": sys.argv[1]}]
    for _ in range(2):
        said = ask(messages)
        messages.append(said)
        for call in said.get("tool_calls") or ():
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "12"})
        if not said.get("tool_calls"):
            messages.append({"role": "user", "content": "Sure?"})


if __name__ == "__main__":
    main()
