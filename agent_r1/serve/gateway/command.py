"""An agent that is a program: started for one episode, watched, and ended with all its children."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from agent_r1.errors import ConfigError, DataError, did_you_mean
from agent_r1.rollout.scoring import named_components
from agent_r1.serve.gateway.agents import AgentFailed, Ended, KeepLog
from agent_r1.serve.gateway.client import ClientSettings
from agent_r1.text import sanitize
from agent_r1.types import TaskRow

Stdin = Literal["none", "row", "prompt"]

MAX_REWARD_BYTES = 100_000
SHOWN_CHARS = 500  # characters of the output in a failure
DRAIN_SECONDS = 0.01
_PLACEHOLDER = re.compile(r"\{\{|\}\}|\{([A-Za-z_][\w.]*)\}")
_ROW_FIELDS = ("extra_info", "env_kwargs")  # {extra_info.level}
# Clients would send these instead of our key, or with it.
_DROPPED = ("ANTHROPIC_AUTH_TOKEN", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID")
_LOOPBACK = "127.0.0.1,localhost"


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandAgent:
    """Runs a command in a folder of its own, which is removed afterwards."""

    command: tuple[str, ...]  # arguments with {placeholders}
    recipe: Path
    stdin: Stdin = "none"
    env: Mapping[str, str] = field(default_factory=dict)  # environment variables; values may have placeholders
    output_chars: int = 10_000  # characters kept of stdout, and of stderr

    def __post_init__(self) -> None:
        nobody = ClientSettings(base_url="", anthropic_base_url="", api_key="")
        known = tuple(_values(TaskRow(prompt=[]), nobody, self.recipe))
        for text in (*self.command, *self.env.values()):
            for name in filter(None, _PLACEHOLDER.findall(text)):
                if name not in known and name.partition(".")[0] not in _ROW_FIELDS:
                    raise ConfigError(f"gateway.command: unknown placeholder {{{name}}}.{did_you_mean(name, known)}")

    async def play(self, row: TaskRow, client: ClientSettings, keep_log: KeepLog) -> Ended:
        with TemporaryDirectory(prefix="agent-r1-", ignore_cleanup_errors=True) as folder:
            written = json.dumps(row_as_json(row), ensure_ascii=False, default=str)
            client = replace(client, row_file=str(Path(folder, "row.json")))
            Path(client.row_file).write_text(written, encoding="utf-8", errors="backslashreplace")
            values = _values(row, client, self.recipe)
            command = [_fill(argument, values, row) for argument in self.command]
            given = {"none": None, "row": written, "prompt": values["prompt"]}[self.stdin]
            env = self._environment(client) | {key: _fill(text, values, row) for key, text in self.env.items()}
            out, err = _Output(self.output_chars), _Output(self.output_chars)
            try:
                code = await _run(command, Path(folder), env, given, {1: out, 2: err})
            finally:
                keep_log(f"{out.text}\n--- stderr ---\n{err.text}" if err.text else out.text)
            if code != 0:
                last = (err.text or out.text).strip()[-SHOWN_CHARS:]
                return Ended(
                    failure=AgentFailed(f"the agent ended with {_describe(code)}; it wrote: {last or 'nothing'}")
                )
            return Ended(result=out.text, reward=_read_reward(Path(folder)))

    @staticmethod
    def _environment(client: ClientSettings) -> dict[str, str]:
        own = {key: value for key, value in os.environ.items() if key not in _DROPPED}
        proxies = {key: ",".join(filter(None, (own.get(key), _LOOPBACK))) for key in ("NO_PROXY", "no_proxy")}
        return own | client.environment | proxies


def split_command(command: str | Sequence[str]) -> tuple[str, ...]:
    """A command as its arguments. No shell is involved, so values of rows cannot become commands."""
    try:
        parts = shlex.split(command) if isinstance(command, str) else list(command)
    except ValueError as error:
        raise ConfigError(f"gateway.command={command!r} cannot be split into arguments: {error}") from error
    if not parts:
        raise ConfigError("gateway.command is empty: name a program and its arguments")
    return tuple(parts)


def row_as_json(row: TaskRow) -> dict[str, Any]:
    """The row for an agent."""
    shown = {
        "row_id": row.row_id,
        "prompt": row.prompt,
        "data_source": row.data_source,
        "extra_info": dict(row.extra_info),
        "env_kwargs": dict(row.env_kwargs),
    }
    return shown | ({"ground_truth": row.ground_truth} if row.reward_model else {})


def prompt_text(row: TaskRow) -> str:
    """The text of the row's last user message."""
    said = [message.get("content") for message in row.prompt if message.get("role") == "user"]
    content = said[-1] if said else ""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content or () if isinstance(part.get("text"), str))


def _values(row: TaskRow, client: ClientSettings, recipe: Path) -> dict[str, str]:
    return {
        "python": sys.executable,
        "recipe": str(recipe),
        "row": client.row_file,
        "row_id": row.row_id,
        "prompt": prompt_text(row),
        "base_url": client.base_url,
        "anthropic_base_url": client.anthropic_base_url,
        "api_key": client.api_key,
        "model": client.model,
    }


def _fill(text: str, values: Mapping[str, str], row: TaskRow) -> str:
    def value(match: re.Match[str]) -> str:
        if match[1] is None:
            return match[0][0]  # {{ or }}
        if match[1] in values:
            return values[match[1]]
        found: Any = {"extra_info": row.extra_info, "env_kwargs": row.env_kwargs}
        for key in match[1].split("."):
            if not isinstance(found, Mapping) or key not in found:
                raise DataError(f"row {row.row_id!r} has no {match[1]!r}, which gateway.command names")
            found = found[key]
        return found if isinstance(found, str) else json.dumps(found, default=str)

    return _PLACEHOLDER.sub(value, text).replace("\0", "")


# the process


class _Output:
    """The beginning and the end of the output."""

    def __init__(self, max_chars: int) -> None:
        self._half = max(1, max_chars // 2)
        self._first, self._last, self._size = b"", b"", 0

    def add(self, data: bytes) -> None:
        self._size += len(data)
        room = self._half - len(self._first)
        self._first, rest = self._first + data[:room], data[room:] if room > 0 else data
        self._last = (self._last + rest)[-self._half :]

    @property
    def text(self) -> str:
        dropped = self._size - len(self._first) - len(self._last)
        between = f"\n[{dropped} bytes cut]\n".encode() if dropped else b""
        return sanitize((self._first + between + self._last).decode("utf-8", "replace"))


class _Watcher(asyncio.SubprocessProtocol):
    """Collects output. A child of the agent may hold its pipes open, so only the exit counts."""

    def __init__(self, outputs: Mapping[int, _Output]) -> None:
        self.exited = asyncio.get_running_loop().create_future()
        self._outputs = outputs

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self._outputs[fd].add(data)

    def process_exited(self) -> None:
        if not self.exited.done():
            self.exited.set_result(None)


async def _run(
    command: Sequence[str], folder: Path, env: Mapping[str, str], stdin: str | None, outputs: Mapping[int, _Output]
) -> int:
    """Run a program and return its exit code. At its end, or when we are cancelled, its process group is killed."""
    pipe = asyncio.subprocess.PIPE
    try:
        transport, watcher = await asyncio.get_running_loop().subprocess_exec(
            lambda: _Watcher(outputs),
            *command,
            cwd=folder,
            env=env,
            stdin=asyncio.subprocess.DEVNULL if stdin is None else pipe,
            stdout=pipe,
            stderr=pipe,
            start_new_session=True,
        )
    except OSError as error:
        raise AgentFailed(f"gateway.command cannot be started: {error}") from error
    try:
        if stdin is not None and isinstance(given := transport.get_pipe_transport(0), asyncio.WriteTransport):
            given.write(stdin.encode("utf-8", "replace"))
            given.close()  # when it is written
        await watcher.exited
        await asyncio.sleep(DRAIN_SECONDS)  # time to read what is left in the pipes
    finally:
        with suppress(ProcessLookupError, PermissionError):  # also children that outlived a normal end
            os.killpg(transport.get_pid(), signal.SIGKILL)
        transport.close()
    code = transport.get_returncode()
    return 0 if code is None else code


def _describe(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with suppress(ValueError):
        return f"signal {signal.Signals(-code).name}"
    return f"signal {-code}"


def _read_reward(folder: Path) -> dict[str, float] | None:
    """The reward that an agent or its grader left in its folder. One that cannot be read is a failure, never 0."""
    for name in ("reward.json", "reward.txt"):
        path = folder / name
        if not path.is_file():
            continue
        try:
            if path.stat().st_size > MAX_REWARD_BYTES:
                raise ValueError(f"it has more than {MAX_REWARD_BYTES:,} bytes")
            text = path.read_text(encoding="utf-8")
            return named_components(json.loads(text) if name.endswith(".json") else float(text))
        except (OSError, ValueError, RecursionError) as error:
            raise AgentFailed(f"the agent's {name} cannot be read: {error}") from error
    return None
