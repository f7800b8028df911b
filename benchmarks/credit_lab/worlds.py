"""The worlds: small step-level MDPs, as tables.

Every world has four rows (tasks) of different difficulty with separate states, so only attempts at the same row are
comparable. The right actions differ between rows.

Shape suffixes: S = states of all rows, A = actions; s = states of one row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

ACTIONS = 3
HEAD_STARTS = (0.8, 0.0, -0.4, -0.8)  # added to the logit of the right action, per row: easy to hard
# What the policy sees. "history": everything so far, as for agents; "state": only the state, so that attempts meet;
# "stamped": the state and a unique number, so that they never meet.
Prompts = Literal["history", "state", "stamped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    name: str
    horizon: int  # steps after which an episode is truncated
    prompts: Prompts
    starts: tuple[int, ...]  # first state of each row
    next_SAS: Array  # probabilities; the rest to 1 ends the episode
    process_SA: Array  # reward of a step
    outcome_SA: Array  # reward of the episode, if it ends there
    outcome_noise: float  # standard deviation of noise on the outcome
    head_start_SA: Array  # logits of the initial policy

    @property
    def num_states(self) -> int:
        return len(self.process_SA)

    @property
    def truncates(self) -> bool:
        """Whether an episode can reach the horizon."""
        alive_S = np.isin(np.arange(self.num_states), self.starts).astype(float)
        for _ in range(self.horizon):
            alive_S = alive_S @ self.next_SAS.mean(axis=1)
        return bool(alive_S.sum() > 1e-9)


@dataclass(slots=True)
class Task:
    """One row's part of a world, to be filled in. Action 0 is right in states with `has_right`."""

    next_sas: Array
    process_sa: Array
    outcome_sa: Array
    has_right: list[bool]

    @classmethod
    def empty(cls, states: int) -> Task:
        pair = (states, ACTIONS)
        return cls(np.zeros((*pair, states)), np.zeros(pair), np.zeros(pair), [True] * states)


def _world(name: str, task: Task, *, horizon: int, prompts: Prompts = "history", noise: float = 0.0) -> World:
    """The task once per row, with different difficulties. Actions are permuted in every state, so that the right action
    in one says nothing about the next."""
    size, rows = len(task.process_sa), len(HEAD_STARTS)
    right_sa = np.zeros((size, ACTIONS))
    right_sa[:, 0] = task.has_right
    next_SAS = np.zeros((rows * size, ACTIONS, rows * size))
    for row in range(rows):
        block = slice(row * size, (row + 1) * size)
        next_SAS[block, :, block] = _renamed(task.next_sas, row)
    return World(
        name=name,
        horizon=horizon,
        prompts=prompts,
        starts=tuple(row * size for row in range(rows)),
        next_SAS=next_SAS,
        process_SA=np.concatenate([_renamed(task.process_sa, row) for row in range(rows)]),
        outcome_SA=np.concatenate([_renamed(task.outcome_sa, row) for row in range(rows)]),
        outcome_noise=noise,
        head_start_SA=np.concatenate([_renamed(start * right_sa, row) for row, start in enumerate(HEAD_STARTS)]),
    )


def _renamed(table: Array, row: int) -> Array:
    """[state, action, ...] with the actions of each state rotated by one more."""
    return np.stack([np.roll(entry, row + state, axis=0) for state, entry in enumerate(table)])


def decisive_step() -> World:
    """Twelve steps, of which only the fifth matters; the tool shows whether it was right, the reward comes last."""
    horizon, decisive = 12, 4

    def state(step: int, right: int) -> int:
        return step if step <= decisive else decisive + 1 + 2 * (step - decisive - 1) + right

    task = Task.empty(state(horizon - 1, 1) + 1)
    task.has_right = [s == decisive for s in range(len(task.has_right))]
    for step in range(horizon):
        for right in (0, 1):
            for action in range(ACTIONS):
                passed = int(action == 0) if step == decisive else right
                if step + 1 < horizon:
                    task.next_sas[state(step, right), action, state(step + 1, passed)] = 1
                else:
                    task.outcome_sa[state(step, right), action] = right
    return _world("decisive_step", task, horizon=horizon)


def dense_rewards() -> World:
    """Five steps that each pay 1/5 if right, and a final 1 if all were, which is almost never found by chance."""
    horizon = 5

    def state(step: int, clean: int) -> int:
        return 2 * step + clean

    task = Task.empty(2 * horizon)
    for step in range(horizon):
        for clean in (0, 1):
            for action in range(ACTIONS):
                task.process_sa[state(step, clean), action] = (action == 0) / horizon
                still = int(clean and action == 0)
                if step + 1 < horizon:
                    task.next_sas[state(step, clean), action, state(step + 1, still)] = 1
                else:
                    task.outcome_sa[state(step, clean), action] = still
    return _starting_at(_world("dense_rewards", task, horizon=horizon), 1)


def misleading_reward() -> World:
    """The first step can take 0.3 at once, or lead to 1 after two more right steps."""
    patient, dead = (0, 1, 2), (3, 4)
    task = Task.empty(5)
    task.has_right = [False, True, True, False, False]  # only experience speaks against the lure
    task.process_sa[0, 1] = 0.3
    task.next_sas[0, :, dead[0]] = 1
    task.next_sas[0, 0] = np.eye(5)[patient[1]]
    task.next_sas[1, :, dead[1]] = 1
    task.next_sas[1, 0] = np.eye(5)[patient[2]]
    task.outcome_sa[2, 0] = 1
    task.next_sas[dead[0], :, dead[1]] = 1
    return _world("misleading_reward", task, horizon=3)


def noisy_tools() -> World:
    """Five tool calls; a right one works in 80 % of cases, a wrong one in 20 %. The outcome, the share that worked,
    is graded with noise (standard deviation 0.25)."""
    horizon, works = 5, np.where(np.arange(ACTIONS) == 0, 0.8, 0.2)

    def state(step: int, done: int) -> int:
        return step * (step + 1) // 2 + done

    task = Task.empty(state(horizon, 0))
    for step in range(horizon):
        for done in range(step + 1):
            if step + 1 < horizon:
                task.next_sas[state(step, done), :, state(step + 1, done + 1)] = works
                task.next_sas[state(step, done), :, state(step + 1, done)] = 1 - works
            else:
                task.outcome_sa[state(step, done)] = (done + works) / horizon
    return _world("noisy_tools", task, horizon=horizon, noise=0.25)


def stop_or_dither() -> World:
    """Work (70 % success) twice, then stop: 1. Stopping earlier pays 0.1 or 0.3; truncated after eight steps."""
    work, stop = 0, 1
    pays = (0.1, 0.3, 1.0)
    task = Task.empty(3)
    for progress in range(3):
        task.next_sas[progress, :, progress] = 1  # dithering
        task.next_sas[progress, stop] = 0
        task.outcome_sa[progress, stop] = pays[progress]
        if progress < 2:
            task.next_sas[progress, work] = 0.7 * np.eye(3)[progress + 1] + 0.3 * np.eye(3)[progress]
    task.next_sas[2] = np.roll(task.next_sas[2], -1, axis=0)  # there, the right action 0 is to stop
    task.outcome_sa[2] = np.roll(task.outcome_sa[2], -1)
    return _world("stop_or_dither", task, horizon=8)


def _corridor(name: str, prompts: Prompts) -> World:
    cells = 5
    task = Task.empty(cells)
    moves = (1, -1, 0)  # right, left, stay; one step in ten slips the other way
    for cell in range(cells):
        for action, move in enumerate(moves):
            for delta, chance in ((move, 0.9), (-move, 0.1)):
                place = max(0, cell + delta)
                if place < cells:
                    task.next_sas[cell, action, place] += chance
        task.outcome_sa[cell] = cell == cells - 1
    return _starting_at(_world(name, task, horizon=10, prompts=prompts), 1)


def revisited_states() -> World:
    """A corridor of five cells with an exit at one end, ten steps: attempts go back and forth and meet."""
    return _corridor("revisited_states", "state")


def unique_states() -> World:
    """The same corridor, but each prompt has a unique number, so no two states are equal."""
    return _corridor("unique_states", "stamped")


def _starting_at(world: World, offset: int) -> World:
    return replace(world, starts=tuple(start + offset for start in world.starts))


_MAKERS: tuple[Callable[[], World], ...] = (
    decisive_step,
    dense_rewards,
    misleading_reward,
    noisy_tools,
    stop_or_dither,
    revisited_states,
    unique_states,
)
WORLDS: dict[str, World] = {make.__name__: make() for make in _MAKERS}
SUMMARIES: dict[str, str] = {make.__name__: " ".join((make.__doc__ or "").split()) for make in _MAKERS}
