# mypy: ignore-errors
# openenv is not installed where types are checked
"""A server of OpenEnv's own package: guess a number that the seed decides. `python openenv_server.py PORT`."""

from __future__ import annotations

import random
import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    text: str


class Hint(Observation):
    hint: str


class Number(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **settings) -> Hint:
        self.number = random.Random(seed).randint(1, settings.get("highest", 9))
        return Hint(hint="Guess my number.")

    def step(self, action: Guess, timeout_s: float | None = None, **kwargs) -> Hint:
        right = action.text.strip() == str(self.number)
        return Hint(hint=f"It is {self.number}." if right else "No.", done=right, reward=float(right))

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    app = create_fastapi_app(Number, Guess, Hint, max_concurrent_envs=64)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
