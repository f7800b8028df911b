"""What learns: rewards become advantages, advantages become gradients. Never sees an environment or a tool.

The public names are imported on first use: the algorithm table loads no transformers, `learn.rewards` no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agent_r1.learn.algorithms import ALGORITHMS, Algorithm, get_algorithm
    from agent_r1.learn.credit import as_demonstrations, assign_credit, attempts_of, trainable
    from agent_r1.learn.learner import Learner
    from agent_r1.learn.losses import supervised_loss
    from agent_r1.learn.model.policy import PolicyModel

_HOME = {
    "algorithms": ["ALGORITHMS", "Algorithm", "get_algorithm"],
    "credit": ["as_demonstrations", "assign_credit", "attempts_of", "trainable"],
    "learner": ["Learner"],
    "losses": ["supervised_loss"],
    "model.policy": ["PolicyModel"],
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Learner",
    "PolicyModel",
    "as_demonstrations",
    "assign_credit",
    "attempts_of",
    "get_algorithm",
    "supervised_loss",
    "trainable",
]


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'agent_r1.learn' has no attribute {name!r}")
    return getattr(import_module(f"agent_r1.learn.{_MODULE_OF[name]}"), name)
