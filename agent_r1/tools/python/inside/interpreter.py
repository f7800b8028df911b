"""Inside a run: receive code, execute it like a notebook cell, report its error.

Output goes straight to descriptors 1 and 2. The code runs in this process and can forge its reports, so the host uses
only the error message; the host and the kernel enforce time and limits and see how the run ends.
"""

from __future__ import annotations

import ast
import json
import linecache
import random
import socket
import struct
import sys
import traceback
import types
from contextlib import suppress
from typing import Any

FILE = "<python>"
MAX_FRAMES = 3  # innermost frames of a traceback
MAX_ERROR_CHARS = 2000
HEADER = struct.Struct("!I")


def serve(channel: socket.socket) -> None:
    """Run the code that arrives, always with the same variables, until the host closes the channel."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")  # where pickle and dataclasses look up definitions
    variables: dict[str, Any] = main.__dict__
    variables |= {"exit": sys.exit, "quit": sys.exit}  # as in an interactive interpreter
    # The same random numbers in every run make episodes reproducible.
    random.seed(0)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed(0)
    send(channel, {"ready": True})
    number = 0
    while (code := receive(channel)) is not None:
        number += 1
        error = execute(code, variables, FILE if number == 1 else f"<python {number}>")
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # the code may have closed or replaced it
                stream.flush()
        send(channel, {"error": error})


def execute(code: str, variables: dict[str, Any], name: str) -> str | None:
    """Run `code`, print the value of a last line that is an expression, and return the error message, if any."""
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    try:
        tree = ast.parse(code, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        body = compile(tree, name, "exec")
        expression = compile(ast.Expression(last.value), name, "eval") if isinstance(last, ast.Expr) else None
        exec(body, variables)
        if expression is not None:
            value = eval(expression, variables)
            if value is not None:
                sys.stdout.write(f"{value!r}\n")
    except SystemExit as stop:
        return None if stop.code in (None, 0) else f"SystemExit: {stop.code}"[:MAX_ERROR_CHARS]
    except BaseException as error:  # noqa: BLE001 (whatever the code raised is its result)
        return _explain(error)
    return None


def _explain(error: BaseException) -> str:
    """Return the error with the last frames of the code itself, without the frames of libraries that it called."""
    try:
        summary = traceback.TracebackException.from_exception(error, limit=-100, compact=True)
        summary.__cause__ = summary.__context__ = None
        own = [frame for frame in summary.stack if frame.filename.startswith("<python")][-MAX_FRAMES:]
        summary.stack = traceback.StackSummary.from_list([(f.filename, f.lineno or 0, f.name, f.line) for f in own])
        text = "".join(summary.format(chain=False)).strip()
    except BaseException:  # noqa: BLE001 (an exception may misbehave while it is printed)
        text = type(error).__name__
    half = MAX_ERROR_CHARS // 2
    return text if len(text) <= MAX_ERROR_CHARS else f"{text[:half]} ... {text[-half:]}"


def send(channel: socket.socket, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode()
    channel.sendall(HEADER.pack(len(data)) + data)


def receive(channel: socket.socket) -> str | None:
    header = _read_exactly(channel, HEADER.size)
    body = None if header is None else _read_exactly(channel, HEADER.unpack(header)[0])
    return None if body is None else body.decode("utf-8", errors="replace")


def _read_exactly(channel: socket.socket, count: int) -> bytes | None:
    data = b""
    while len(data) < count:
        piece = channel.recv(count - len(data))
        if not piece:
            return None
        data += piece
    return data
