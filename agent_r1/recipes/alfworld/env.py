"""The environment of one episode: the policy gives a command, the game answers. `engine.py` has the rules.

The command is the first line of the response; case does not matter. An invalid command is answered with "Nothing
happens.". The episode ends when the task is done. The environment pays no reward: `task.reward` reads from the last
step whether the game was won.
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
        """Load the row's game. `extra_info` says where the games are, because that depends on the machine."""
        if "games" not in row.extra_info:
            raise DataError(f"row {row.row_id!r} does not say where its game is: make rows with alfworld's task.rows")
        return load_game(row.extra_info["games"], self._name, self._world_hash)

    def begin(self, row: TaskRow) -> str:
        self._world = World(self.game(row))
        return self._shown(shortened(self._world.intro))

    def reply(self, said: str) -> Reply:
        # The state in which the command was given, by which GiGPO compares attempts.
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
    """Return the intro without its greeting, which is the same in every game."""
    return intro.partition("\n\n")[2]


def command_in(said: str) -> str:
    return said.strip().partition("\n")[0].strip().lower()
