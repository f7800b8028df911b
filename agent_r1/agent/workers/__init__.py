"""Environments in worker processes: `EnvPool` on this side, `inside.py` on the other."""

from agent_r1.agent.workers.front import WorkerEnv
from agent_r1.agent.workers.pool import EnvPool
from agent_r1.agent.workers.values import EnvFault, EnvLost, EnvRaised
from agent_r1.agent.workers.wire import EnvCrashed, EnvHung, EnvOutOfMemory, EnvStartError

__all__ = [
    "EnvCrashed",
    "EnvFault",
    "EnvHung",
    "EnvLost",
    "EnvOutOfMemory",
    "EnvPool",
    "EnvRaised",
    "EnvStartError",
    "WorkerEnv",
]
