"""What learns: rewards become advantages, advantages become gradients. Never sees an environment or a tool."""

from agent_r1.learn.algorithms import (
    ALGORITHMS,
    Algorithm,
    as_demonstrations,
    assign_credit,
    get_algorithm,
    supervised_loss,
)
from agent_r1.learn.learner import Learner
from agent_r1.learn.model.policy import PolicyModel

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Learner",
    "PolicyModel",
    "as_demonstrations",
    "assign_credit",
    "get_algorithm",
    "supervised_loss",
]
