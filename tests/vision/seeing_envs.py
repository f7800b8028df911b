"""Envs that show pictures. Without torch, so that a worker process starts quickly."""

from __future__ import annotations

from base64 import b64encode

import numpy as np

from agent_r1.envs.base import AgentEnv
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.tools.base import ToolResult, tool
from agent_r1.types import Action, Message, Observation, TaskRow, Transition
from agent_r1.vision.pictures import Picture


def picture(seed: int, height: int = 48, width: int = 80) -> Picture:
    """Noise; not square, as most pictures are."""
    rng = np.random.default_rng(seed)
    return Picture.from_pixels(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))


SEEN = [picture(at, 16, 24) for at in range(6)]


@tool
def look(at: int) -> ToolResult:
    """Look at a place."""
    return ToolResult(f"place {at}", images=[picture(at, 16, 24)])


class Painter(AgentEnv):
    """Returns pictures in observations, in other spellings, and rewrites its first one."""

    deterministic = True

    async def reset(self, row: TaskRow) -> Observation:
        self.messages: list[Message] = [{"role": "user", "content": [{"type": "image", "image": SEEN[0].encoded}]}]
        return Observation(messages=list(self.messages))

    async def step(self, action: Action) -> Transition:
        if action.text == "rewrite":
            self.messages[0] = {"role": "user", "content": [{"type": "image", "image": SEEN[5].pixels}]}
        url = {"url": f"data:image/png;base64,{b64encode(SEEN[1].encoded).decode()}"}
        self.messages += [
            {"role": "assistant", "content": action.text},
            {"role": "user", "content": [{"type": "image_url", "image_url": url}, {"type": "text", "text": "go on"}]},
        ]
        return Transition(observation=Observation(messages=list(self.messages)), terminated=action.text == "end")


class Looking(ToolEnv):
    def __init__(self) -> None:
        super().__init__(tools=[look])
