"""Task folders of Harbor: `task: {rows: harbor, env: harbor, reward: harbor}` with `data.path`, a folder of tasks.

A task is a folder with `instruction.md`, `task.toml`, `environment/` and `tests/test.sh`, which writes the reward. The
model gets a tool `bash`. There are no containers: commands run on this machine's programs in a private file system
(`harbor_box.py`), so tasks that ask for an image are refused unless `ignore_image` is set.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import stat
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agent_r1.adapters.harbor_box import MADE, SHARED, Box, Outcome, require_namespaces
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.errors import ConfigError, DataError
from agent_r1.tools.base import BaseTool, ToolResult, ToolSet
from agent_r1.types import Action, Observation, TaskRow, Trajectory, Transition

WORKDIR = "/app"
TEST_SECONDS = 600.0
REWARD_BYTES = 1_000_000
_CANARY = re.compile(r"\A(?:\s*(?:<!--[^\n]*canary[^\n]*-->|#[^\n]*canary[^\n]*)\n)+", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class HarborTask:
    """The parts of a task that are read."""

    folder: Path
    instruction: str
    image: str | None  # what its environment is made from
    workdir: str
    env: Mapping[str, str] = field(default_factory=dict)
    network: bool = True
    test_env: Mapping[str, str] = field(default_factory=dict)
    test_seconds: float = TEST_SECONDS


def rows(
    split: str, count: int | None = None, *, path: str | None = None, held_out: int | None = None
) -> list[TaskRow]:
    """Return the tasks in `path/SPLIT`, or in `path`. Without a folder per split, the first `held_out` (by default a
    tenth) are for other splits than train."""
    if path is None:
        raise ConfigError("data.path is missing: name the folder with the tasks")
    folder = Path(path) / split
    if folder.is_dir():
        found = find_tasks(folder)
    else:
        every = find_tasks(Path(path))
        first = max(1, len(every) // 10) if held_out is None else held_out
        found = every[first:] if split == "train" else every[:first]
    tasks = [read_task(each) for each in found[:count]]
    return [
        TaskRow(
            prompt=[{"role": "user", "content": task.instruction}],
            row_id=task.folder.name,
            env_kwargs={"task": str(task.folder)},
            data_source="harbor",
        )
        for task in tasks
    ]


def reward(row: TaskRow, trajectory: Trajectory) -> dict[str, float]:
    """The reward that the tests wrote, with their other values as components. 0 if the episode was cut off before its
    end."""
    scores: dict[str, float] = next((step.info["scores"] for step in trajectory.steps if "scores" in step.info), {})
    return {"reward": 0.0, **scores}


class HarborEnv(ToolEnv):
    """An episode in the file system of a task. A response without a call ends it and runs the tests."""

    def __init__(
        self,
        *,
        task: str,  # folder of the task, set by the row
        ignore_image: bool = False,  # play tasks that ask for a container image on this machine's programs
        network: bool = False,  # let commands use this machine's network, if the task allows it
        command_seconds: float = 60.0,
        memory_mb: int = 4096,  # memory limit per process
        tools: Sequence[str | BaseTool | ToolSet] = (),  # tools beside bash
        **settings: Any,
    ) -> None:
        require_namespaces()
        self._task = read_task(Path(task))
        if self._task.image is not None and not ignore_image:
            raise ConfigError(
                f"the task {self._task.folder.name!r} asks for a container ({self._task.image}), which is not "
                "supported. Set task.env_kwargs.ignore_image=true if this machine's programs will do"
            )
        self._network, self._memory_mb = network and self._task.network, memory_mb
        self._bash = Bash(self._task.env, command_seconds)
        self.box: Box | None = None
        super().__init__(tools=[self._bash, *tools], **settings)

    async def reset(self, row: TaskRow) -> Observation:
        self.box = Box(workdir=self._task.workdir, network=self._network, memory_mb=self._memory_mb)
        self._bash.box = self.box
        given = self._task.folder / "environment"
        if given.is_dir():
            ignore = shutil.ignore_patterns("Dockerfile", ".dockerignore")
            target = self.box.host(self._task.workdir)
            # Links stay links, or they could bring in any file of this machine.
            shutil.copytree(given, target, dirs_exist_ok=True, ignore=ignore, symlinks=True)
        return await super().reset(row)

    async def step(self, action: Action) -> Transition:
        transition = await super().step(action)
        if not transition.terminated:
            return transition
        return replace(transition, info={**transition.info, "scores": await self._grade()})

    async def _grade(self) -> dict[str, float]:
        """Run the tests, which the model never sees, and read what they wrote."""
        assert self.box is not None
        verdict = Path(tempfile.mkdtemp(prefix="agent-r1-verdict-"))
        try:
            outcome = await self.box.run(
                *("bash", "/tests/test.sh"),
                seconds=self._task.test_seconds,
                env={**self._task.env, **self._task.test_env},
                mounts={"/tests": (self._task.folder / "tests", "ro"), "/logs/verifier": (verdict, "rw")},
            )
            return read_scores(verdict, self._task.folder.name, outcome)
        finally:
            shutil.rmtree(verdict, ignore_errors=True)

    async def close(self) -> None:
        if self.box is not None:
            self.box.close()
        await super().close()


class Bash(BaseTool):
    """Runs commands in the box of its episode."""

    name = "bash"
    description = "Run a command with bash and return what it prints. Files stay, variables and processes do not."
    parameters = {  # noqa: RUF012 (as in BaseTool)
        "type": "object",
        "properties": {"command": {"type": "string"}},
        "required": ["command"],
    }

    def __init__(self, env: Mapping[str, str], seconds: float) -> None:
        self.box: Box | None = None  # created when the env is reset
        self._env, self._seconds = env, seconds
        self.timeout = seconds + 30.0  # a backstop; the box has its own limit

    async def execute(self, args: dict[str, Any]) -> ToolResult:  # type: ignore[override]
        assert self.box is not None
        outcome = await self.box.run("bash", "-c", args["command"], seconds=self._seconds, env=self._env)
        ended = f"[killed after {self._seconds:g} s]" if outcome.code is None else f"[exit code {outcome.code}]"
        text = outcome.output if outcome.code == 0 else f"{outcome.output}\n{ended}".strip()
        return ToolResult(text or "(no output)", info={"exit_code": outcome.code})


def find_tasks(folder: Path) -> list[Path]:
    found = sorted(each.parent for each in folder.rglob("task.toml") if not each.parent.name.startswith("."))
    if not found:
        raise DataError(f"{folder} holds no task folders: none of its folders has a task.toml")
    return found


def read_task(folder: Path) -> HarborTask:
    """Read a task. Raises DataError for a broken one, ConfigError for one that needs unsupported features."""
    try:
        settings = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
        text = (folder / "instruction.md").read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise DataError(f"the task {folder} cannot be read: {error}") from error
    environment, verifier = settings.get("environment", {}), settings.get("verifier", {})
    unsupported = {
        "steps/ (several steps)": (folder / "steps").is_dir(),
        "docker-compose.yaml (several containers)": (folder / "environment" / "docker-compose.yaml").is_file(),
        "verifier.environment_mode='separate'": verifier.get("environment_mode", "shared") != "shared",
        "environment.mcp_servers": bool(environment.get("mcp_servers")),
    }
    if needed := [name for name, needs in unsupported.items() if needs]:
        raise ConfigError(f"the task {folder.name!r} has {needed[0]}, which is not supported")
    if not (folder / "tests" / "test.sh").is_file():
        raise DataError(f"the task {folder} has no tests/test.sh")
    built = "environment/Dockerfile" if (folder / "environment" / "Dockerfile").is_file() else None
    return HarborTask(
        folder=folder.resolve(),
        instruction=_CANARY.sub("", text).strip(),
        image=environment.get("docker_image") or built,
        workdir=_check_workdir(environment.get("workdir") or WORKDIR, folder),
        env=_variables(environment.get("env", {})),
        network=environment.get("allow_internet", True),
        test_env=_variables(verifier.get("env", {})),
        test_seconds=float(verifier.get("timeout_sec", TEST_SECONDS)),
    )


def _check_workdir(path: Any, folder: Path) -> str:
    """Refuse a directory outside the task's own ones, because files are copied into it on this machine."""
    parts = str(path).split("/")
    if parts[0] or ".." in parts or next(filter(None, parts), "") in ("", *SHARED, *MADE):
        raise ConfigError(
            f"the task {folder.name!r} has environment.workdir={path!r}, which is not supported: it must be an "
            f"absolute path such as {WORKDIR}, not in a directory of this machine"
        )
    return str(path)


def _variables(given: Mapping[str, Any]) -> dict[str, str]:
    """Fill in `${NAME}` and `${NAME:-default}` from this process's environment."""

    def value(match: re.Match[str]) -> str:
        found = os.environ.get(match[1], match[2])
        if found is None:
            raise ConfigError(f"the environment variable {match[1]}, which a task of Harbor needs, is not set")
        return found

    return {key: re.sub(r"\$\{(\w+)(?::-([^}]*))?\}", value, str(text)) for key, text in given.items()}


def read_scores(folder: Path, task: str, outcome: Outcome) -> dict[str, float]:
    """Read `reward.json` (an object of numbers) or `reward.txt` (a number)."""
    try:
        if (text := _read(folder / "reward.json")) is not None:
            scores = {str(name): float(value) for name, value in json.loads(text).items()}
        elif (text := _read(folder / "reward.txt")) is not None:
            scores = {"reward": float(text)}
        else:
            raise ValueError("there is neither reward.json nor reward.txt")
        if "reward" not in scores or not all(map(math.isfinite, scores.values())):
            raise ValueError(f"expected finite numbers, one of them called reward, got {scores}")
    except (AttributeError, TypeError, ValueError) as error:
        ended = "were killed" if outcome.code is None else f"exited with code {outcome.code}"
        raise RuntimeError(
            f"the tests of {task!r} {ended} and wrote no reward to /logs/verifier ({error}); they last said: "
            f"{outcome.output[-500:]}"
        ) from error
    return scores


def _read(file: Path) -> str | None:
    """The content of a plain file, not of a link, which may lead anywhere on this machine."""
    if not os.path.lexists(file):
        return None
    if not stat.S_ISREG(file.lstat().st_mode) or file.stat().st_size > REWARD_BYTES:
        raise ValueError(f"{file.name} is not a plain small file")
    return file.read_text(encoding="utf-8", errors="replace")


env = HarborEnv
