"""Environments behind OpenEnv servers: `task: {rows: openenv, env: openenv, reward: openenv}` with a `url`.

Each episode has a session of its own with the server, over the package's client. The model's text becomes one field of
the action; the model reads one field of the observation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from agent_r1.adapters.require import find_function, require
from agent_r1.adapters.seeded import reward as reward
from agent_r1.adapters.seeded import rows as rows
from agent_r1.envs.text_env import Reply, TextEnv
from agent_r1.errors import ConfigError
from agent_r1.types import TaskRow


class OpenEnvEnv(TextEnv):
    """One episode on a server."""

    def __init__(  # noqa: PLR0913 (all settings of an environment)
        self,
        *,
        url: str,  # address of a running server
        seed: int,  # passed to `reset`; set by the row
        action: str,  # the field of an action that holds what the model said, or module:function (text) -> dict
        observation: str
        | None = None,  # the field that the model reads, or module:function (dict) -> text; None: as JSON
        rules: str = "",  # first text
        reset: Mapping[str, Any] | None = None,  # further arguments of reset
        step_seconds: float = 60.0,  # time limit of one reset or step
        step_rewards: bool = False,  # pay rewards where they are earned instead of at the end
    ) -> None:
        package = require("openenv.core", "agent-r1[openenv]")
        if not url.startswith(("http://", "https://", "ws://", "wss://")):
            raise ConfigError(f"env_kwargs.url={url!r} must start with http:// or ws://")
        self._client = package.GenericEnvClient(base_url=url, message_timeout_s=step_seconds)
        self._url, self._rules = url, rules
        self._write = find_function("action", action) if ":" in action else lambda said: {action: said}
        self._read = self._reader(observation)
        self._reset = {"seed": seed, **(reset or {})}
        self._step_rewards = step_rewards

    async def begin(self, row: TaskRow) -> str:
        try:
            await self._client.connect()
        except ConnectionError as error:
            raise ConnectionError(f"the OpenEnv server {self._url} cannot be reached: {error}") from error
        started = await self._client.reset(**self._reset)
        return "\n\n".join(filter(None, [self._rules, self._read(started.observation)]))

    async def reply(self, said: str) -> Reply:
        result = await self._client.step(self._write(said))
        earned = float(result.reward or 0.0)
        return Reply(
            text=self._read(result.observation),
            done=bool(result.done),
            reward=earned if self._step_rewards else 0.0,
            info={"reward": earned},
        )

    async def close(self) -> None:
        await self._client.close()

    def _reader(self, name: str | None) -> Any:
        if name is not None and ":" in name:
            return find_function("observation", name)

        def read(observation: Mapping[str, Any]) -> str:
            if name is None:
                return json.dumps(observation, ensure_ascii=False)
            if name not in observation:
                raise KeyError(f"env_kwargs.observation={name!r}: the observation has {sorted(observation)}")
            return str(observation[name])

        return read


env = OpenEnvEnv
