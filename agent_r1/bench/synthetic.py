"""Trajectories of given lengths with random token ids and advantages, for measuring the learner."""

from __future__ import annotations

import math

import numpy as np

from agent_r1.types import CreditedTrajectory, Step, StopReason, Trajectory


class SyntheticTrajectories:
    def __init__(self, vocabulary: int, seed: int = 0) -> None:
        self._vocabulary = vocabulary
        self._rng = np.random.default_rng(seed)

    def ids(self, count: int) -> list[int]:
        drawn: list[int] = self._rng.integers(self._vocabulary, size=count).tolist()
        return drawn

    def spread(self, mean: int, count: int) -> list[int]:
        """Lengths with this mean, evenly spread from 0.4 to 1.6 times the mean."""
        lengths = self._rng.permutation(np.linspace(0.4 * mean, 1.6 * mean, count)).round()
        return [int(length) for length in lengths]

    def single(self, prompt: list[int], response_tokens: int) -> CreditedTrajectory:
        """An episode of one step."""
        return self._credit([self._step(prompt, response_tokens)])

    def growing(self, *, steps: int, prompt: int, response: int, observation: int) -> CreditedTrajectory:
        """An episode that only appends to its context."""
        context, taken = self.ids(prompt), []
        for _ in range(steps):
            taken.append(self._step(context, response))
            context = context + taken[-1].response_ids + self.ids(observation)
        return self._credit(taken)

    def _step(self, prompt: list[int], response_tokens: int) -> Step:
        logprobs = [-math.log(self._vocabulary)] * response_tokens
        return Step(prompt_ids=prompt, response_ids=self.ids(response_tokens), response_logprobs=logprobs)

    def _credit(self, steps: list[Step]) -> CreditedTrajectory:
        advantages = [self._rng.normal(size=len(step.response_ids)).tolist() for step in steps]
        trajectory = Trajectory(row_id="bench", trajectory_id="bench", steps=steps, stop=StopReason.ANSWERED)
        return CreditedTrajectory(trajectory=trajectory, advantages=advantages)
