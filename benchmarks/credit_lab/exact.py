"""The known answers: return, gradient and values of a tabular policy, by dynamic programming in float64.

The objective J is the mean over rows of the expected return within the horizon; an episode that is cut off earns what
its steps paid. Style tokens (see `play.py`) do not affect the world, so J depends only on the decision tokens.

Shape suffixes: S = states, A = actions, X = token contexts (the first S of them are the decisions), R = task rows, P =
rows of the policy's table: X, then R; T = steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.credit_lab.worlds import World


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactValues:
    """Values under one policy, `step` steps into the episode."""

    states_TS: Tensor
    actions_TSA: Tensor


def token_logits(world: World, policy_PA: Tensor) -> Tensor:
    """[X, A]: for every token context its row, plus the shared row of its task for decisions."""
    rows, states = len(world.starts), world.num_states
    own_XA, shared_RA = policy_PA.split([len(policy_PA) - rows, rows])
    shared_SA = shared_RA.repeat_interleave(states // rows, dim=0)
    return torch.cat([own_XA[:states] + shared_SA, own_XA[states:]])


def exact_values(world: World, policy_PA: Tensor) -> ExactValues:
    policy_SA = token_logits(world, policy_PA)[: world.num_states].softmax(-1)
    next_SAS, reward_SA = _tables(world)
    value_S = torch.zeros(world.num_states, dtype=torch.float64)
    states, actions = [], []
    for _ in range(world.horizon):
        action_SA = reward_SA + next_SAS @ value_S
        value_S = (policy_SA * action_SA).sum(-1)
        states.append(value_S)
        actions.append(action_SA)
    return ExactValues(states_TS=torch.stack(states[::-1]), actions_TSA=torch.stack(actions[::-1]))


def expected_return(world: World, policy_PA: Tensor) -> Tensor:
    """J."""
    return exact_values(world, policy_PA).states_TS[0, list(world.starts)].mean()


def expected_gradient(world: World, policy_PA: Tensor) -> Tensor:
    """[P, A]: the derivative of J with respect to the policy."""
    leaf_XA = policy_PA.detach().clone().requires_grad_()
    (gradient_XA,) = torch.autograd.grad(expected_return(world, leaf_XA), leaf_XA)
    return gradient_XA


def best_return(world: World) -> float:
    """The best return of any policy, even one that knows the time."""
    next_SAS, reward_SA = _tables(world)
    value_S = torch.zeros(world.num_states, dtype=torch.float64)
    for _ in range(world.horizon):
        value_S = (reward_SA + next_SAS @ value_S).amax(-1)
    return float(value_S[list(world.starts)].mean())


def half_trained(world: World, policy_PA: Tensor, *, step_size: float = 2.0) -> Tensor:
    """Gradient ascent until half of the possible gain: the same policy for every algorithm."""
    with torch.no_grad():
        target = (float(expected_return(world, policy_PA)) + best_return(world)) / 2
    for _ in range(10_000):
        if float(expected_return(world, policy_PA)) >= target:
            return policy_PA
        policy_PA = policy_PA + step_size * expected_gradient(world, policy_PA)
    raise RuntimeError(
        f"exact ascent does not reach half of the gain possible in world {world.name!r}: change the world"
    )


def _tables(world: World) -> tuple[Tensor, Tensor]:
    """Transitions, and the expected reward of each action, outcome included."""
    next_SAS = torch.from_numpy(world.next_SAS)
    ends_SA = 1 - next_SAS.sum(-1)
    return next_SAS, torch.from_numpy(world.process_SA) + ends_SA * torch.from_numpy(world.outcome_SA)
