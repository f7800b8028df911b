"""What every algorithm's credit is, spelled out in plain loops over numbers.

Written from the definitions in the papers and in the published Agent-R1; where this project departs from them, it says
DEVIATION. Slow on purpose, and shares nothing with `agent_r1.learn` but the types: the fast code is compared with it.
Positions count the response tokens of an episode, over all its steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from typing import Any

from agent_r1.types import Group, Trajectory

Settings = Mapping[str, Any]


@dataclass
class Episode:
    name: str
    step_of: list[int]  # per token
    rewards: list[float]  # per token
    before_kl: list[float]  # per token: the same without a KL penalty
    earned: float  # process rewards by their scale, and the outcome; no penalties
    prompts: list[tuple[int, ...]]  # per step
    shown: list[str]  # per step: what the env had said before it
    wrote: list[bool]  # per step: whether it was a summary, which the env does not answer
    values: list[float] = field(default_factory=list)  # per token
    bootstrap: float = 0.0
    greedy_return: float | None = None
    advantages: list[float] = field(default_factory=list)  # the result, per token
    targets: list[float | None] = field(default_factory=list)

    @property
    def total(self) -> float:
        result = 0.0
        for reward in self.rewards:
            result += reward
        return result

    @property
    def acted(self) -> list[int]:
        """Steps in which the policy said something, in order."""
        return sorted(set(self.step_of))

    def elapsed(self, k: int, later: int) -> int:
        """How often the env answered from step k on, until step `later` was taken."""
        return sum(1 for number in self.acted if k <= number < later and not self.wrote[number])

    def without_kl(self) -> Episode:
        return replace(self, rewards=self.before_kl)

    def step_reward(self, k: int) -> float:
        return sum(r for r, step in zip(self.rewards, self.step_of, strict=True) if step == k)

    def spread(self, per_step: Mapping[int, float]) -> None:
        self.advantages = [per_step[k] for k in self.step_of]


@dataclass(frozen=True)
class Shaping:
    """How rewards are put together; the defaults leave them as they are."""

    process_scale: Callable[[list[list[float]]], float] = lambda per_token: 1.0
    overlong: tuple[int, float, float] | None = None  # limit, buffer, penalty
    kl: Mapping[str, list[float]] = field(default_factory=dict)  # by name of the episode, per token
    kl_coef: float = 0.0


def published_scale(per_token: list[list[float]]) -> float:
    """One over the largest absolute sum of process rewards from a token to the end, over the batch (plus 1e-6)."""
    largest = 0.0
    for row in per_token:
        for start in range(len(row)):
            largest = max(largest, abs(sum(row[start:])))
    return 1 / (largest + 1e-6)


def counts(one: Trajectory) -> bool:
    return one.stop.value not in ("timeout", "error") and any(s.response_ids for s in one.steps)


def step_of_token(one: Trajectory) -> list[int]:
    return [k for k, step in enumerate(one.steps) for _ in step.response_ids]


def process_per_token(one: Trajectory) -> list[float]:
    """A call's reward on its last token, the rest of the step's on the step's last token.

    DEVIATION from the published code, which loses it: a step without tokens pays the last token before it. What came
    before the first token of all is paid to nobody: no decision had been taken.
    """
    step_of = step_of_token(one)
    placed = [0.0] * len(step_of)
    for k, step in enumerate(one.steps):
        so_far = sum(1 for number in step_of if number <= k)  # tokens up to the end of this step
        first = so_far - len(step.response_ids)
        rest = step.reward
        for call in step.calls:
            rest -= call.reward
            position = so_far - 1
            if call.token_span is not None and 1 <= call.token_span[1] <= len(step.response_ids):
                position = first + call.token_span[1] - 1
            if position >= 0:
                placed[position] += call.reward
        if so_far > 0:
            placed[so_far - 1] += rest
    return placed


def overlong_per_token(one: Trajectory, limit: int, buffer: float, penalty: float) -> list[float]:
    """DEVIATION: an episode pays once, for its first response that costs the most."""
    losses = []
    for step in one.steps:
        size = len(step.response_ids)
        free = limit * (1 - buffer)
        if step.summary is not None or size == 0:
            losses.append(0.0)  # the limit is of actions
        elif size >= limit or step.is_cut:
            losses.append(penalty)
        elif size <= free:
            losses.append(0.0)
        else:
            losses.append(penalty * (size - free) / (limit - free))
    placed = []
    for k, step in enumerate(one.steps):
        pays = losses[k] == max(losses) and losses[k] not in losses[:k]
        size = len(step.response_ids)
        placed += [-losses[k] if pays and i == size - 1 else 0.0 for i in range(size)]
    return placed


def read(groups: Sequence[Group], shaping: Shaping, *, with_greedy: bool) -> list[list[Episode]]:
    """The trajectories that count, with all their rewards on tokens."""
    groups = [group for group in groups if any(map(counts, group.trajectories))]
    kept = [[one for one in group.trajectories if counts(one)] for group in groups]
    baselines = [group.greedy for group in groups if with_greedy and group.greedy is not None and counts(group.greedy)]
    scale = shaping.process_scale([process_per_token(one) for one in [*(t for g in kept for t in g), *baselines]])

    def before_kl(one: Trajectory) -> list[float]:
        result = [scale * reward for reward in process_per_token(one)]
        result[-1] += one.outcome_reward
        if shaping.overlong is not None:
            for position, loss in enumerate(overlong_per_token(one, *shaping.overlong)):
                result[position] += loss
        return result

    def rewards(one: Trajectory) -> list[float]:
        result = before_kl(one)
        for position, ratio in enumerate(shaping.kl.get(one.trajectory_id, [])):
            result[position] -= shaping.kl_coef * ratio
        return result

    result: list[list[Episode]] = []
    for group, attempts in zip(groups, kept, strict=True):
        greedy_return = None
        if with_greedy and group.greedy is not None and counts(group.greedy):
            greedy_return = sum(rewards(group.greedy))
        result.append(
            [
                Episode(
                    name=one.trajectory_id,
                    step_of=step_of_token(one),
                    rewards=rewards(one),
                    before_kl=before_kl(one),
                    earned=scale * sum(process_per_token(one)) + one.outcome_reward,
                    prompts=[tuple(step.prompt_ids) for step in one.steps],
                    shown=[seen_before(one, k) for k in range(len(one.steps))],
                    wrote=[step.summary is not None for step in one.steps],
                    greedy_return=greedy_return,
                )
                for one in attempts
            ]
        )
    return result


def seen_before(one: Trajectory, k: int) -> str:
    """What the env named or said; nothing where a summary was asked for."""
    if one.steps[k].summary is not None:
        return ""
    said = ""
    for step in one.steps[:k]:
        if step.summary is None:
            said = step.feedback
    return str(one.steps[k].info.get("anchor", said))


# Normalisations. DEVIATION: numbers that do not differ (rounding apart) become 0; published: a single one keeps its
# raw reward in a group, and is NaN when whitened. DEVIATION: so do numbers of which only a critic's baseline or a KL
# penalty differs, where they would be divided by a deviation; and no deviation below 1e-4 is divided by.


def mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def std(numbers: Sequence[float]) -> float:
    middle = mean(numbers)
    return float((sum((x - middle) ** 2 for x in numbers) / (len(numbers) - 1)) ** 0.5)


def same(numbers: Sequence[float]) -> bool:
    return not numbers or max(numbers) - min(numbers) <= 1e-12 * max(1.0, *(abs(x) for x in numbers))


def compared(sets: Sequence[tuple[list[float], list[float]]], scale: str) -> list[list[float]]:
    """Each set of numbers (the second list: as they are without the KL) against its own mean. With `batch`, as TRL's
    scale_rewards="batch": in units of the deviation of all numbers of the batch."""
    if scale != "batch":
        return [normalised(numbers, divide=scale == "group", returns=pure) for numbers, pure in sets]
    everything, without = ([x for each in sets for x in each[i]] for i in (0, 1))
    if same(everything) or same(without):
        return [[0.0 for _ in numbers] for numbers, _ in sets]
    unit = max(std(everything), 1e-4)
    return [[a / unit for a in normalised(numbers, divide=False, returns=pure)] for numbers, pure in sets]


def normalised(numbers: Sequence[float], *, divide: bool, returns: Sequence[float]) -> list[float]:
    if same(numbers) or (divide and same(returns)):
        return [0.0 for _ in numbers]
    return [(x - mean(numbers)) / (max(std(numbers), 1e-4) if divide else 1.0) for x in numbers]


def whiten_tokens(groups: list[list[Episode]], returns: list[float]) -> None:
    everyone = [episode for group in groups for episode in group]
    whitened = iter(normalised([a for e in everyone for a in e.advantages], divide=True, returns=returns))
    for episode in everyone:
        episode.advantages = [next(whitened) for _ in episode.advantages]


def whiten_steps(groups: list[list[Episode]], returns: list[float]) -> None:
    """Each step once, however many tokens it has."""
    everyone = [episode for group in groups for episode in group]
    per_step = [{k: e.advantages[e.step_of.index(k)] for k in e.acted} for e in everyone]
    whitened = iter(normalised([a for steps in per_step for a in steps.values()], divide=True, returns=returns))
    for episode, steps in zip(everyone, per_step, strict=True):
        episode.spread({k: next(whitened) for k in steps})


# The rows.


def group_relative(groups: list[list[Episode]], settings: Settings) -> None:
    sets = [([e.total for e in group], [e.without_kl().total for e in group]) for group in groups]
    for group, parts in zip(groups, compared(sets, settings["scale"]), strict=True):
        for episode, a in zip(group, parts, strict=True):
            episode.advantages = [a for _ in episode.rewards]


def dynamic(groups: list[list[Episode]], settings: Settings) -> None:
    """DAPO leaves groups out whose attempts all earned alike, whatever they lose to penalties."""
    groups[:] = [group for group in groups if not same([episode.earned for episode in group])]
    group_relative(groups, settings)


def rloo(groups: list[list[Episode]], settings: Settings) -> None:
    for group in groups:
        for i, episode in enumerate(group):
            others = [other.total for j, other in enumerate(group) if j != i]
            a = episode.total - mean(others) if others else 0.0
            episode.advantages = [a for _ in episode.rewards]


def remax(groups: list[list[Episode]], settings: Settings) -> None:
    for group in groups:
        for episode in group:
            known = episode.greedy_return is not None
            a = episode.total - (episode.greedy_return or 0.0) if known else 0.0
            episode.advantages = [a for _ in episode.rewards]


def reinforce(groups: list[list[Episode]], settings: Settings) -> None:
    for group in groups:
        for episode in group:
            episode.spread(step_returns(episode, settings["gamma"]))
    if settings["whiten_batch"]:
        pure = [step_returns(e.without_kl(), settings["gamma"]) for group in groups for e in group]
        whiten_steps(groups, [value for steps in pure for value in steps.values()])


def step_returns(episode: Episode, gamma: float) -> dict[int, float]:
    acted = episode.acted
    return {k: sum(gamma ** episode.elapsed(k, j) * episode.step_reward(j) for j in acted if j >= k) for k in acted}


def reinforce_plus_plus(groups: list[list[Episode]], settings: Settings) -> None:
    gamma = settings["gamma"]

    def returns(e: Episode) -> list[float]:
        # DEVIATION: gamma is per answer of the env, so it counts the actions that end in between.
        return [
            sum(gamma ** e.elapsed(e.step_of[t], e.step_of[u]) * e.rewards[u] for u in range(t, len(e.rewards)))
            for t in range(len(e.rewards))
        ]

    for group in groups:
        for e in group:
            e.advantages = returns(e)
    whiten_tokens(groups, [value for group in groups for e in group for value in returns(e.without_kl())])


def reinforce_plus_plus_baseline(groups: list[list[Episode]], settings: Settings) -> None:
    pure = [[e.without_kl() for e in group] for group in groups]
    for some in (groups, pure):
        group_relative(some, {"scale": "none"})
    whiten_tokens(groups, [value for group in pure for e in group for value in e.advantages])


def gae(
    e: Episode, steps: list[int], rewards: list[float], values: list[float], after: float, gamma: float, lam: float
) -> list[float]:
    """A_t = sum over u >= t of lam^(u-t) d(t, u) (r_u + d(u, u+1) V_{u+1} - V_u), d the discount between decisions.
    `steps`: the step each decision is of. What would have followed the last is one answer of the env away, always."""
    size, known = len(steps), [*values, after]

    def d(t: int, u: int) -> float:
        return float(gamma ** (e.elapsed(steps[t], steps[u]) if u < size else 1))

    errors = [rewards[u] + d(u, u + 1) * known[u + 1] - known[u] for u in range(size)]
    return [sum(lam ** (u - t) * d(t, u) * errors[u] for u in range(t, size)) for t in range(size)]


def ppo(groups: list[list[Episode]], settings: Settings) -> None:
    pure = []
    for group in groups:
        for e in group:
            after = e.bootstrap if settings["bootstrap_truncated"] else 0.0
            e.advantages = gae(e, e.step_of, e.rewards, e.values, after, settings["gamma"], settings["lam"])
            e.targets = [a + v for a, v in zip(e.advantages, e.values, strict=True)]
            without = gae(e, e.step_of, e.before_kl, e.values, after, settings["gamma"], settings["lam"])
            pure += [a + v for a, v in zip(without, e.values, strict=True)]
    if settings["whiten_batch"]:
        whiten_tokens(groups, pure)


def steppo(groups: list[list[Episode]], settings: Settings) -> None:
    pure = []
    for group in groups:
        for e in group:
            after = e.bootstrap if settings["bootstrap_truncated"] else 0.0
            firsts = [e.step_of.index(k) for k in e.acted]
            values = [e.values[first] for first in firsts]
            rewards = [e.step_reward(k) for k in e.acted]
            advantages = gae(e, e.acted, rewards, values, after, settings["gamma"], settings["lam"])
            e.spread(dict(zip(e.acted, advantages, strict=True)))
            e.targets = [None for _ in e.rewards]
            for first, advantage, value in zip(firsts, advantages, values, strict=True):
                e.targets[first] = advantage + value
            rewards = [e.without_kl().step_reward(k) for k in e.acted]
            without = gae(e, e.acted, rewards, values, after, settings["gamma"], settings["lam"])
            pure += [a + v for a, v in zip(without, values, strict=True)]
    if settings["whiten_batch"]:
        whiten_steps(groups, pure)


def gigpo(groups: list[list[Episode]], settings: Settings) -> None:
    group_relative(groups, settings)
    states: list[list[tuple[Episode, int]]] = []  # episodes and steps of one group that were in the same state
    for group in groups:
        own: list[list[tuple[Episode, int]]] = []
        for episode in group:
            for k in episode.acted:
                home = next((s for s in own if equal_state(s[0], (episode, k), settings)), None)
                if home is None:
                    own.append([(episode, k)])
                else:
                    home.append((episode, k))
        states += own
    sets = [
        (
            [step_returns(episode, settings["gamma"])[k] for episode, k in state],
            [step_returns(episode.without_kl(), settings["gamma"])[k] for episode, k in state],
        )
        for state in states
    ]
    bonus: dict[tuple[str, int], float] = {}
    for state, parts in zip(states, compared(sets, settings["scale"]), strict=True):
        bonus |= {(episode.name, k): part for (episode, k), part in zip(state, parts, strict=True)}
    for group in groups:
        for e in group:
            e.advantages = [
                a + settings["step_weight"] * bonus[e.name, k] for a, k in zip(e.advantages, e.step_of, strict=True)
            ]


def equal_state(a: tuple[Episode, int], b: tuple[Episode, int], settings: Settings) -> bool:
    if a[0].wrote[a[1]] != b[0].wrote[b[1]]:
        return False  # a summary is no action
    first, second = state_of(*a, settings["anchor"]), state_of(*b, settings["anchor"])
    if settings["similarity"] is None or first == second:
        return bool(first == second)
    return bool(SequenceMatcher(None, first, second, autojunk=False).ratio() >= settings["similarity"])


def state_of(episode: Episode, k: int, anchor: str) -> Any:
    """DEVIATION: where the env showed nothing, the prompt; else all silent states would be one."""
    if anchor == "observation" and episode.shown[k]:
        return episode.shown[k]
    return episode.prompts[k]


REFERENCES: dict[str, Callable[[list[list[Episode]], Settings], None]] = {
    "grpo": group_relative,
    "dr_grpo": group_relative,
    "dapo": dynamic,
    "gspo": group_relative,
    "cispo": group_relative,
    "rloo": rloo,
    "remax": remax,
    "reinforce": reinforce,
    "reinforce++": reinforce_plus_plus,
    "reinforce++_baseline": reinforce_plus_plus_baseline,
    "ppo": ppo,
    "steppo": steppo,
    "gigpo": gigpo,
}
