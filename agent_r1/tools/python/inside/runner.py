"""One run from within: read code, execute it as a notebook cell would, say how it ended.

Output goes straight to descriptors 1 and 2, whoever writes it. What is said here about a run, the run may forge: it is
the same process. So nothing but its own error message is taken from here; time, limits and how it ended are the host's
and the kernel's to tell.
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
from collections.abc import Callable
from contextlib import suppress
from typing import Any

FILE = "<python>"
MAX_FRAMES = 3  # of a traceback, the innermost
MAX_ERROR_CHARS = 2000
HEADER = struct.Struct("!I")


def serve(talk: socket.socket) -> None:
    """Run what arrives, block after block in the same variables, until nobody asks any more."""
    main = sys.modules["__main__"] = types.ModuleType(
        "__main__"
    )  # where pickle and dataclasses look for what it defines
    variables: dict[str, Any] = main.__dict__
    variables |= {"exit": sys.exit, "quit": sys.exit}  # as in every interpreter that people type into
    _seed()
    send(talk, {"ready": True})
    number = 0
    while (code := receive(talk)) is not None:
        number += 1
        error = execute(code, variables, FILE if number == 1 else f"<python {number}>")
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # the code may have closed it, or put anything in its place
                stream.flush()
        send(talk, {"error": error})


def execute(code: str, variables: dict[str, Any], name: str) -> str | None:
    """Run `code`; the value of a last line that is an expression is printed. Returns what went wrong, for the model."""
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    try:
        body, last = _compiled(code, name)
        exec(body, variables)
        if last is not None:
            value = eval(last, variables)
            if value is not None:
                sys.stdout.write(f"{value!r}\n")
    except SystemExit as stop:
        return None if stop.code in (None, 0) else f"SystemExit: {stop.code}"[:MAX_ERROR_CHARS]
    except BaseException as error:  # noqa: BLE001 (whatever the code raised is its result)
        return _explained(error)
    return None


def _compiled(code: str, name: str) -> tuple[Any, Any]:
    tree = ast.parse(code, name)
    if not tree.body or not isinstance(tree.body[-1], ast.Expr):
        return compile(tree, name, "exec"), None
    last = ast.Expression(tree.body.pop().value)  # type: ignore[attr-defined]
    return compile(tree, name, "exec"), compile(last, name, "eval")


def _explained(error: BaseException) -> str:
    """The last frames of the code itself, not of what it called, and the error."""
    try:
        told = traceback.TracebackException.from_exception(error, limit=-100, compact=True)
        told.__cause__ = told.__context__ = None
        own = [frame for frame in told.stack if frame.filename.startswith("<python")][-MAX_FRAMES:]
        told.stack = traceback.StackSummary.from_list([(f.filename, f.lineno or 0, f.name, f.line) for f in own])
        text = "".join(told.format(chain=False)).strip()
    except BaseException:  # noqa: BLE001 (an exception may misbehave while it is printed)
        text = type(error).__name__
    return (
        text if len(text) <= MAX_ERROR_CHARS else f"{text[: MAX_ERROR_CHARS // 2]} ... {text[-MAX_ERROR_CHARS // 2 :]}"
    )


def _seed() -> None:
    """Chance is the same in every run: an episode played again is the same episode."""
    random.seed(0)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed(0)


def send(talk: socket.socket, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode()
    talk.sendall(HEADER.pack(len(data)) + data)


def receive(talk: socket.socket) -> str | None:
    head = _exactly(talk.recv, HEADER.size)
    body = None if head is None else _exactly(talk.recv, HEADER.unpack(head)[0])
    return None if body is None else body.decode("utf-8", errors="replace")


def _exactly(read: Callable[[int], bytes], count: int) -> bytes | None:
    data = b""
    while len(data) < count:
        piece = read(count - len(data))
        if not piece:
            return None
        data += piece
    return data
