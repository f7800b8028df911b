"""The world of one episode: the policy says a command, the game answers. The rules are `engine.py`'s.

The command is the first line of what was said, without regard to case; anything that the game does not take gets its
own "Nothing happens.". The episode ends when the task is done. It pays nothing: `task.reward` reads off the last step
whether it was won.
"""

from __future__ import annotations

from typing import ClassVar

from agent_r1.envs.text_env import Reply, TextEnv
from agent_r1.errors import DataError
from agent_r1.recipes.alfworld.data import load_game
from agent_r1.recipes.alfworld.engine import NOTHING_HAPPENS, World
from agent_r1.recipes.alfworld.game import Game
from agent_r1.types import TaskRow


class AlfWorld(TextEnv):
    """`hints` shows the admissible commands after every answer."""

    deterministic: ClassVar[bool] = True

    def __init__(self, *, game: str, world: str, hints: bool = False) -> None:
        self._name = game
        self._world_hash = world
        self._hints = hints

    def game(self, row: TaskRow) -> Game:
        """Where the games are kept is no part of what a row asks, so it is not among the settings of the env."""
        if "games" not in row.extra_info:
            raise DataError(f"row {row.row_id!r} does not say where its game is: make rows with alfworld's task.rows")
        return load_game(row.extra_info["games"], self._name, self._world_hash)

    def begin(self, row: TaskRow) -> str:
        self._world = World(self.game(row))
        return self._shown(shortened(self._world.intro))

    def reply(self, said: str) -> Reply:
        # The state that the command was given in: what GiGPO compares attempts by.
        anchor = self._world.scene()
        answer = self._world.step(command_in(said))
        won = self._world.won
        return Reply(
            text=answer if won else self._shown(answer),
            done=won,
            info={"won": won, "refused": answer == NOTHING_HAPPENS, "anchor": anchor},
        )

    def _shown(self, answer: str) -> str:
        return f"{answer}\nCommands: {', '.join(self._world.admissible())}" if self._hints else answer


def shortened(intro: str) -> str:
    """The intro without its greeting, which is the same in every game."""
    return intro.partition("\n\n")[2]


def command_in(said: str) -> str:
    return said.strip().partition("\n")[0].strip().lower()
