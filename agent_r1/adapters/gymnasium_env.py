"""Gymnasium environments that are read and answered as text: `task: {rows: gymnasium, env: gymnasium, ...}`.

A row is a seed, so all attempts at it start in the same state. `gymnasium_text.py` renders observations and names
actions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from agent_r1.adapters.gymnasium_text import WORDS, Words, check_names, plain, read_action
from agent_r1.adapters.require import find_function, require
from agent_r1.adapters.seeded import reward as reward
from agent_r1.adapters.seeded import rows as rows
from agent_r1.envs.text_env import Reply, TextEnv
from agent_r1.errors import ConfigError
from agent_r1.types import Action, StopReason, TaskRow, Transition


class GymnasiumEnv(TextEnv):
    """One episode of a Gymnasium environment with discrete or text actions."""

    deterministic: ClassVar[bool] = True

    def __init__(  # noqa: PLR0913 (all settings of an environment)
        self,
        *,
        id: str,  # id of a registered environment; `module:Name-v0` imports a module first
        seed: int,  # set by the row
        make: Mapping[str, Any] | None = None,  # further arguments of gymnasium.make
        render: str
        | None = None,  # module:function (env, observation, info) -> text; None: our own, or str(observation)
        rules: str | None = None,  # first text; None: our own for environments that we know
        actions: Sequence[str] | None = None,  # names of the actions; None: our own, or numbers
        max_invalid: int = 3,  # actions in a row that cannot be understood, before the episode ends
        step_rewards: bool = False,  # pay rewards where they are earned instead of at the end
    ) -> None:
        gymnasium = require("gymnasium", "agent-r1[gym]")
        try:
            self._env = gymnasium.make(id, **(make or {}))
        except (gymnasium.error.Error, ImportError, TypeError) as error:
            raise ConfigError(f"env_kwargs: gymnasium.make({id!r}, **{dict(make or {})}) failed: {error}") from error
        words = WORDS.get(self._env.spec.name, Words(rules="", render=plain, actions=()))
        self._rules = words.rules if rules is None else rules
        self._render = words.render if render is None else find_function("render", render)
        self._actions = _action_names(gymnasium, self._env.action_space, actions or words.actions)
        self._seed, self._max_invalid, self._step_rewards = seed, max_invalid, step_rewards
        self._invalid = 0  # invalid actions in a row
        self._stop = StopReason.ANSWERED

    def begin(self, row: TaskRow) -> str:
        observation, info = self._env.reset(seed=self._seed)
        how = f"Answer with one of: {', '.join(self._actions)}." if self._actions else ""
        shown = self._render(self._env, observation, info)
        self._anchor = shown
        return "\n\n".join(filter(None, [self._rules, how, shown]))

    def reply(self, said: str) -> Reply:
        action: Any = read_action(said, self._actions) if self._actions else said
        before = self._anchor
        if action is None:
            self._invalid += 1
            gives_up = self._invalid >= self._max_invalid
            self._stop = StopReason.PARSE_LIMIT
            text = f"That is not one action. Answer with one of: {', '.join(self._actions)}."
            return Reply(text=text, done=gives_up, info={"reward": 0.0, "invalid": True, "anchor": before})
        self._invalid = 0
        observation, earned, terminated, truncated, info = self._env.step(action)
        self._stop = StopReason.ANSWERED if terminated else StopReason.MAX_STEPS
        self._anchor = self._render(self._env, observation, info)
        return Reply(
            text=self._anchor,
            done=bool(terminated or truncated),
            reward=float(earned) if self._step_rewards else 0.0,
            info={"reward": float(earned), "invalid": False, "anchor": before},
        )

    async def step(self, action: Action) -> Transition:
        transition = await super().step(action)
        return replace(transition, stop=self._stop) if transition.terminated else transition

    async def close(self) -> None:
        self._env.close()


def _action_names(gymnasium: Any, space: Any, names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of discrete actions; empty if actions are texts."""
    if isinstance(space, gymnasium.spaces.Text):
        return ()
    if not isinstance(space, gymnasium.spaces.Discrete) or space.start != 0:
        raise ConfigError(f"a policy that writes text needs discrete or text actions, but this environment has {space}")
    return check_names(names or [str(number) for number in range(int(space.n))], int(space.n))


env = GymnasiumEnv
