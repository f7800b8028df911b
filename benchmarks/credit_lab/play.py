"""A tabular policy plays a world and produces the `Group`s that a trainer would get.

A response is one decision token and one or two style tokens: the first may end the response (choice 0), the second
always does. The distribution of each token depends on the state and, for style, on the decision, so lengths vary and
correlate with decisions, and wrong credit for style tokens becomes visible. Only the decision affects the world.
Token contexts: first all states (decisions), then all (state, decision) for the first style token, then the same for
the second.

The policy is a table with one row of logits per token context and one more per task row, which is added to all
decisions there. Without it, no step would affect the logits of another, unlike in models, which share weights.

Shape suffixes: N = episodes played at once, X = token contexts, P = X and the shared rows, A = choices of a token (as
many as actions).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agent_r1.learn.algorithms import Algorithm
from agent_r1.learn.rewards import is_uniform
from agent_r1.types import Group, Step, StopReason, TaskRow, Trajectory
from benchmarks.credit_lab.exact import token_logits
from benchmarks.credit_lab.worlds import ACTIONS, Array, World

FIRST_STATE = 1_000  # token id of state 0; lower ids are the choices of response tokens
FIRST_STAMP = 1_000_000
MAX_RESPONSE = 3
ROWS_PER_BATCH = 4  # every row of the world once
EPISODES_PER_ROW = 8  # attempts; one less with a greedy attempt, so that all have the same budget


def initial_policy(world: World) -> Tensor:
    """[P, A]: uniform decisions except for the head starts; random style, the same in every run."""
    style = np.random.default_rng(0).normal(0, 0.7, size=(2 * world.num_states * ACTIONS, ACTIONS))
    shared = np.zeros((len(world.starts), ACTIONS))
    return torch.from_numpy(np.concatenate([world.head_start_SA, style, shared]))


def num_contexts(world: World) -> int:
    return world.num_states * (1 + 2 * ACTIONS)


def token_contexts(world: World, step: Step) -> list[int]:
    """Derived from tokens: the last one of the prompt is the state, the first one of the response the decision."""
    state, decision = step.prompt_ids[-1] - FIRST_STATE, step.response_ids[0]
    pair = world.num_states + state * ACTIONS + decision
    return [state, pair, pair + world.num_states * ACTIONS][: len(step.response_ids)]


@dataclass(kw_only=True)
class Player:
    """Plays batches with the noise of one seed."""

    world: World
    seed: int
    episodes: int = 0  # played so far
    _stamps: count[int] = field(default_factory=lambda: count(FIRST_STAMP))

    def __post_init__(self) -> None:
        self._noise = np.random.default_rng(self.seed)

    def batch(self, policy_PA: Tensor, algorithm: Algorithm) -> list[Group]:
        """As in the trainer: rounds of rows until enough groups have attempts with different returns."""
        tables = _Tables.of(self.world, policy_PA)
        groups: list[Group] = []
        for number in range(algorithm.sampling_rounds):
            missing = ROWS_PER_BATCH - sum(not is_uniform(group) for group in groups)
            if missing <= 0:
                break
            rows = [index % len(self.world.starts) for index in range(missing)]
            if number:  # drawn at random: repeating the missing rows would favour hopeless ones
                rows = self._noise.integers(len(self.world.starts), size=missing).tolist()
            groups += self._groups(rows, tables, with_greedy=algorithm.needs_greedy)
        return groups

    def _groups(self, rows: Sequence[int], tables: _Tables, *, with_greedy: bool) -> list[Group]:
        attempts = EPISODES_PER_ROW - with_greedy
        played = self._play([row for row in rows for _ in range(attempts)], tables)
        greedy = self._play(rows, tables.greedy()) if with_greedy else [None] * len(rows)
        return [
            Group(
                row=TaskRow(prompt=[], row_id=str(row)),
                trajectories=played[index * attempts : (index + 1) * attempts],
                greedy=greedy[index],
            )
            for index, row in enumerate(rows)
        ]

    def _play(self, rows: Sequence[int], tables: _Tables) -> list[Trajectory]:
        """Play all episodes in lockstep, then convert the arrays to trajectories."""
        world, number = self.world, len(rows)
        state_N = np.array([world.starts[row] for row in rows])
        alive_N = np.ones(number, dtype=bool)
        outcome_N = np.zeros(number)
        unfinished = [_Unfinished(row=row) for row in rows]
        for _ in range(world.horizon):
            choice_NL, logprob_NL = self._respond(state_N, tables)
            decision_N = choice_NL[:, 0]
            arrived_N = _draw(world.next_SAS[state_N, decision_N].cumsum(-1), self._noise.random(number))
            ends_N = arrived_N == world.num_states
            noise_N = world.outcome_noise * self._noise.standard_normal(number)
            self._record(unfinished, alive_N, state_N, choice_NL, logprob_NL)
            paid_N = world.outcome_SA[state_N, decision_N] + noise_N
            outcome_N = np.where(alive_N & ends_N, paid_N, outcome_N)
            alive_N = alive_N & ~ends_N
            state_N = np.where(ends_N, state_N, arrived_N)
            if not alive_N.any():
                break
        self.episodes += number
        return [
            self._finish(one, self.episodes - number + i, bool(alive), float(outcome), int(state))
            for i, (one, alive, outcome, state) in enumerate(zip(unfinished, alive_N, outcome_N, state_N, strict=True))
        ]

    def _respond(self, state_N: NDArray[np.int64], tables: _Tables) -> tuple[NDArray[np.int64], Array]:
        """Three tokens for each episode; some end after the second."""
        uniform_LN = self._noise.random((MAX_RESPONSE, len(state_N)))
        context_N, choices, logprobs = state_N, [], []
        for position in range(MAX_RESPONSE):
            choice_N = _draw(tables.cumulative_XA[context_N], uniform_LN[position]).clip(max=ACTIONS - 1)
            choices.append(choice_N)
            logprobs.append(tables.logprobs_XA[context_N, choice_N])
            if position == 0:
                context_N = self.world.num_states + state_N * ACTIONS + choice_N
            else:
                context_N = context_N + self.world.num_states * ACTIONS
                context_N = context_N.clip(max=len(tables.logprobs_XA) - 1)  # there is no fourth token
        return np.stack(choices, axis=1), np.stack(logprobs, axis=1)

    def _record(
        self,
        unfinished: list[_Unfinished],
        alive_N: NDArray[np.bool_],
        state_N: NDArray[np.int64],
        choice_NL: NDArray[np.int64],
        logprob_NL: Array,
    ) -> None:
        reward_N = self.world.process_SA[state_N, choice_NL[:, 0]].tolist()
        states, choices, logprobs = state_N.tolist(), choice_NL.tolist(), logprob_NL.tolist()
        for i in np.flatnonzero(alive_N).tolist():
            length = 2 if choices[i][1] == 0 else MAX_RESPONSE
            unfinished[i].see(self._shown(states[i]), self.world.prompts == "history")
            unfinished[i].say(choices[i][:length], logprobs[i][:length], reward_N[i])

    def _shown(self, state: int) -> list[int]:
        stamp = [next(self._stamps)] if self.world.prompts == "stamped" else []
        return [*stamp, FIRST_STATE + state]

    def _finish(self, one: _Unfinished, number: int, alive: bool, outcome: float, state: int) -> Trajectory:
        if alive:
            one.see(self._shown(state), self.world.prompts == "history")
        one.close_step()
        return Trajectory(
            row_id=str(one.row),
            trajectory_id=str(number),
            steps=one.steps,
            stop=StopReason.MAX_STEPS if alive else StopReason.ANSWERED,
            outcome_reward=outcome,
            next_prompt_ids=one.prompt_ids if alive else [],
        )


@dataclass(slots=True, kw_only=True)
class _Unfinished:
    """An episode so far."""

    row: int
    steps: list[Step] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=list)
    _said: tuple[list[int], list[float], float] | None = None  # response, its log-probs, what it earned

    def see(self, shown: list[int], with_history: bool) -> None:
        """The tool's answer is part of the next prompt, and the reply to the previous step."""
        before = self.prompt_ids + self._said[0] if self._said and with_history else []
        self.close_step(feedback=" ".join(map(str, shown)))
        self.prompt_ids = before + shown

    def say(self, response_ids: list[int], logprobs: list[float], reward: float) -> None:
        self._said = response_ids, logprobs, reward

    def close_step(self, *, feedback: str = "") -> None:
        if self._said is None:
            return
        response_ids, logprobs, reward = self._said
        self._said = None
        self.steps.append(
            Step(
                prompt_ids=self.prompt_ids,
                response_ids=response_ids,
                response_logprobs=logprobs,
                reward=reward,
                feedback=feedback,
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tables:
    logprobs_XA: Array
    cumulative_XA: Array

    @classmethod
    def of(cls, world: World, policy_PA: Tensor) -> _Tables:
        logprobs_XA = token_logits(world, policy_PA.detach()).log_softmax(-1).numpy()
        return cls(logprobs_XA=logprobs_XA, cumulative_XA=np.exp(logprobs_XA).cumsum(-1))

    def greedy(self) -> _Tables:
        best_X = self.logprobs_XA.argmax(-1)
        return replace(self, cumulative_XA=np.eye(ACTIONS)[best_X].cumsum(-1))


def _draw(cumulative_NK: Array, uniform_N: Array) -> NDArray[np.int64]:
    """Index of the first entry above the draw; K if there is none."""
    index_N: NDArray[np.int64] = (cumulative_NK <= uniform_N[:, None]).sum(-1)
    return index_N
