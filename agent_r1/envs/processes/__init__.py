"""Environments in worker processes: `EnvPool` on this side, `inside.py` on the other."""

from agent_r1.envs.processes.channel import EnvCrashed, EnvHung, EnvOutOfMemory, EnvStartError
from agent_r1.envs.processes.front import WorkerEnv
from agent_r1.envs.processes.pool import EnvPool
from agent_r1.envs.processes.values import EnvFault, EnvLost, EnvRaised

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
