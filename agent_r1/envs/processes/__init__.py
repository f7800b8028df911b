"""Environments in worker processes: `pool.py` in this process, `worker.py` in the others."""

from agent_r1.envs.processes.pool import EnvPool
from agent_r1.envs.processes.protocol import EnvCrashed, EnvFault, EnvHung, EnvLost, EnvOutOfMemory, EnvStartError
from agent_r1.envs.processes.values import EnvRaised
from agent_r1.envs.processes.worker_env import WorkerEnv

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
