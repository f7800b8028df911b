"""The algorithms, as rows of one table: how rewards become advantages, and which loss trains on them.

Learner, trainer and rollout never ask which one runs. To add one: a pure function in `advantages.py` or `losses.py`,
a small reader in `credit.py` or here that feeds it, a row, a test. Nothing here knows models.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, repeat
from typing import Annotated, Any, TypeVar, get_type_hints

import torch
from pydantic import Field, TypeAdapter, ValidationError

from agent_r1.errors import ConfigError, DataError, did_you_mean
from agent_r1.learn import credit, losses
from agent_r1.learn.advantages import all_equal
from agent_r1.learn.credit import CreditFunction, NotNegative, Scored, Share, Values
from agent_r1.learn.losses import Aggregation, LossInputs, LossOutput
from agent_r1.learn.rewards import RewardShaper, total, zeros
from agent_r1.types import CreditedTrajectory, Group, PerToken, Trajectory

LossFunction = Callable[..., LossOutput]
Result = TypeVar("Result")
Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
AboveOne = Annotated[float, Field(gt=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One row. Its settings: the keyword arguments of the two functions, and the fields below the line."""

    name: str
    paper: str
    credit: CreditFunction  # (groups of scored trajectories) -> credit
    loss: LossFunction  # (LossInputs) -> LossOutput
    needs_critic: bool = False
    needs_greedy: bool = False  # one greedy attempt per row, to compare with
    min_group_size: int = 1  # below it there is nothing to learn from
    # A ratio clipped this near to 1 must not see that sampler and learner compute log-probs differently.
    own_old_logprobs: bool = False
    on_policy_only: bool = False  # its loss has no ratio: wrong from the second optimizer step of a batch on
    # ---- settings
    sampling_rounds: Count = 1  # times rows are sampled until enough groups have attempts of different return (DAPO)
    overlong_buffer: Share = 0.2  # share of the response limit in which the overlong penalty grows (DAPO)
    overlong_penalty: NotNegative = 0.0  # what a response at its limit loses

    def __post_init__(self) -> None:
        """Refuse different defaults for a setting that credit, loss and the row share."""
        parts = [(credit.function_name(each), _settings_of(each)) for each in (self.credit, self.loss)]
        parts.append(("Algorithm", {name: getattr(self, name) for name in _OWN_SETTINGS}))
        for (one, first), (other, second) in combinations(parts, 2):
            for name in sorted(first.keys() & second.keys()):
                if first[name] != second[name]:
                    raise ConfigError(
                        f"algorithm {self.name!r}: the setting {name!r} is {first[name]!r} in {one} and "
                        f"{second[name]!r} in {other}. Give both the same default, or rename one"
                    )

    @property
    def settings(self) -> dict[str, object]:
        """Every setting with its value."""
        own = {name: getattr(self, name) for name in _OWN_SETTINGS}
        return _settings_of(self.credit) | _settings_of(self.loss) | own

    def with_settings(self, **settings: object) -> Algorithm:
        unknown = sorted(settings.keys() - self.settings.keys())
        if unknown:
            raise ConfigError(
                f"algorithm {self.name!r} has no setting {unknown[0]!r}.{did_you_mean(unknown[0], self.settings)}"
            )
        hints = _hints_of(self.credit) | _hints_of(self.loss) | _OWN_SETTINGS
        checked = {name: self._checked(name, value, hints[name]) for name, value in settings.items()}
        self._refuse_idle(checked)
        own = {name: value for name, value in checked.items() if name in _OWN_SETTINGS}
        return replace(self, credit=_bind(self.credit, checked), loss=_bind(self.loss, checked), **own)

    def _refuse_idle(self, settings: Mapping[str, Any]) -> None:
        """Settings that do nothing beside the others."""
        before, after = self.settings, {**self.settings, **settings}
        changed = {name for name, value in settings.items() if value != before[name]}
        if "horizon" in changed and after["aggregation"] != "constant":
            raise ConfigError(
                f"horizon does nothing with aggregation={after['aggregation']}; it belongs to aggregation=constant"
            )
        if "overlong_buffer" in changed and not after["overlong_penalty"]:
            raise ConfigError("overlong_buffer does nothing without overlong_penalty; set that too")

    def require_updates(self, *, num_epochs: int, num_minibatches: int) -> None:
        """Check the numbers of updates per batch before anything is sampled."""
        if self.on_policy_only and num_epochs * num_minibatches > 1:
            given = {"num_epochs": num_epochs, "num_minibatches": num_minibatches}
            needed = " and ".join(f"learner.{name}=1" for name, value in given.items() if value > 1)
            raise ConfigError(
                f"{self.name} has no importance ratio, so only the first of {num_epochs * num_minibatches} updates of "
                f"a batch would be right. Set {needed}, or use rloo or cispo."
            )

    def require_group_size(self, group_size: int) -> None:
        """Called with the configured size, before anything is sampled."""
        if group_size < self.min_group_size:
            raise ConfigError(
                f"{self.name} needs at least {self.min_group_size} trajectories per row, got {group_size}. "
                f"Set group_size >= {self.min_group_size}."
            )
        if self.sampling_rounds > 1 and group_size < 2:
            raise ConfigError(
                f"sampling_rounds={self.sampling_rounds} keeps rows whose attempts differ, and one attempt never does. "
                "Set group_size >= 2 or sampling_rounds=1."
            )

    def _checked(self, name: str, value: object, hint: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"algorithm {self.name!r}: setting {name}={value!r} is not a finite number")
        try:
            return TypeAdapter(hint).validate_python(value, strict=True)  # strict takes 1 for 1.0, but no True or "1"
        except ValidationError as error:
            message = error.errors()[0]["msg"]
            raise ConfigError(f"algorithm {self.name!r}: setting {name}={value!r}: {message}") from None


_OWN_SETTINGS: dict[str, Any] = {
    name: hint
    for name, hint in get_type_hints(Algorithm, include_extras=True).items()
    if name in ("sampling_rounds", "overlong_buffer", "overlong_penalty")
}


def _settings_of(function: Callable[..., object]) -> dict[str, object]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is not p.empty}


def _hints_of(function: Callable[..., object]) -> dict[str, Any]:
    while isinstance(function, partial):
        function = function.func
    return get_type_hints(function, include_extras=True)


def _bind(function: Callable[..., Result], settings: Mapping[str, object]) -> Callable[..., Result]:
    own = {name: value for name, value in settings.items() if name in _settings_of(function)}
    return partial(function, **own) if own else function


# Losses: which of a pack's tensors each one reads.


def token_clip(
    inputs: LossInputs,
    *,
    clip_low: Share,
    clip_high: NotNegative,
    dual_clip: AboveOne | None,
    aggregation: Aggregation,
    horizon: Count,
) -> LossOutput:
    """PPO-clip with a ratio per token."""
    return losses.clipped_surrogate(
        inputs.logprobs_T - inputs.old_logprobs_T,
        inputs.advantages_T,
        losses.token_weights(inputs, aggregation=aggregation, horizon=horizon),
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )


def step_clip(
    inputs: LossInputs, *, clip_low: Share, clip_high: NotNegative, aggregation: Aggregation, horizon: Count
) -> LossOutput:
    """PPO-clip with one length-normalised ratio per step, shared by its tokens."""
    log_ratio_T = inputs.logprobs_T - inputs.old_logprobs_T
    output = losses.clipped_surrogate(
        losses.step_log_ratio(log_ratio_T, inputs.step_ids_T, inputs.step_sizes_T),
        inputs.advantages_T,
        losses.token_weights(inputs, aggregation=aggregation, horizon=horizon),
        clip_low=clip_low,
        clip_high=clip_high,
    )
    sums, maxima = losses.ratio_report(log_ratio_T)  # of tokens: comparable between algorithms
    return LossOutput(loss=output.loss, sums=output.sums | sums, maxima=maxima)


def reinforce(inputs: LossInputs, *, aggregation: Aggregation, horizon: Count) -> LossOutput:
    """No ratio and no clip: right for the policy that sampled, so for the first mini-batch of the first epoch."""
    weights_T = losses.token_weights(inputs, aggregation=aggregation, horizon=horizon)
    loss = losses.weighted_likelihood(inputs.logprobs_T, inputs.advantages_T, weights_T)
    sums, maxima = losses.ratio_report(inputs.logprobs_T - inputs.old_logprobs_T)
    return LossOutput(loss=loss, sums=sums, maxima=maxima)


def capped_weight(inputs: LossInputs, *, weight_cap: Positive, aggregation: Aggregation, horizon: Count) -> LossOutput:
    """CISPO."""
    weights_T = losses.token_weights(inputs, aggregation=aggregation, horizon=horizon)
    loss = losses.cispo(inputs.logprobs_T, inputs.old_logprobs_T, inputs.advantages_T, weights_T, cap=weight_cap)
    log_ratio_T = (inputs.logprobs_T - inputs.old_logprobs_T).detach()
    sums, maxima = losses.ratio_report(log_ratio_T)
    capped = (log_ratio_T > math.log(weight_cap)).sum()
    return LossOutput(loss=loss, sums=sums | {"clip_fraction": capped}, maxima=maxima)


def supervised_loss(inputs: LossInputs) -> LossOutput:
    """Cross-entropy, for supervised fine-tuning; the trajectories come from `as_demonstrations`."""
    weights_T = losses.token_weights(inputs, aggregation="token", horizon=1)
    loss = losses.weighted_likelihood(inputs.logprobs_T, inputs.advantages_T, weights_T)
    return LossOutput(loss=loss, sums={"nll": -inputs.logprobs_T.detach().sum()})


# `horizon` is read by the aggregation "constant" alone: the tokens an episode may be expected to have.
_WEIGHTING: dict[str, Any] = {"aggregation": "token", "horizon": 256}
_CLIP = partial(token_clip, clip_low=0.2, clip_high=0.2, dual_clip=None, **_WEIGHTING)
# A hundred times the paper's range, which was tuned for responses of thousands of tokens: see docs/algorithms/gspo.md.
_STEP_CLIP = partial(step_clip, clip_low=0.03, clip_high=0.04, **{**_WEIGHTING, "aggregation": "step"})
_GROUP = partial(credit.group_return, scale="group")
# The step budget is part of the task: evaluation counts success within it, so an episode that runs out of steps keeps
# what it earned. All algorithms share one discount, so that comparisons do not compare discounts.
_GAMMA = 1.0
_GAE: dict[str, Any] = {"gamma": _GAMMA, "lam": 1.0, "whiten_batch": True, "bootstrap_truncated": False}

_ROWS = [
    Algorithm(name="grpo", paper="arXiv:2402.03300", credit=_GROUP, loss=_CLIP, min_group_size=2),
    Algorithm(
        name="dr_grpo",
        paper="arXiv:2503.20783",
        credit=partial(credit.group_return, scale="none"),
        loss=partial(_CLIP, aggregation="constant"),
        min_group_size=2,
    ),
    Algorithm(
        name="dapo",
        paper="arXiv:2503.14476",
        credit=_GROUP,
        loss=partial(_CLIP, clip_high=0.28),
        min_group_size=2,
        sampling_rounds=3,
        overlong_penalty=1.0,
    ),
    Algorithm(
        name="gspo",
        paper="arXiv:2507.18071",
        credit=_GROUP,
        loss=_STEP_CLIP,
        min_group_size=2,
        own_old_logprobs=True,
    ),
    Algorithm(
        name="cispo",
        paper="arXiv:2506.13585",
        credit=_GROUP,
        loss=partial(capped_weight, weight_cap=5.0, **_WEIGHTING),
        min_group_size=2,
    ),
    Algorithm(name="rloo", paper="arXiv:2402.14740", credit=credit.leave_one_out_return, loss=_CLIP, min_group_size=2),
    Algorithm(
        name="remax",
        paper="arXiv:2310.10505",
        credit=credit.greedy_difference,
        loss=partial(reinforce, **_WEIGHTING),
        needs_greedy=True,
        on_policy_only=True,
    ),
    Algorithm(
        name="reinforce",
        paper="10.1007/BF00992696",
        credit=partial(credit.step_return, gamma=_GAMMA, whiten_batch=True),
        loss=partial(reinforce, **_WEIGHTING),
        on_policy_only=True,
    ),
    Algorithm(
        name="reinforce++", paper="arXiv:2501.03262", credit=partial(credit.token_return, gamma=_GAMMA), loss=_CLIP
    ),
    Algorithm(
        name="reinforce++_baseline",
        paper="arXiv:2501.03262",
        credit=credit.whitened_group_return,
        loss=_CLIP,
        min_group_size=2,
    ),
    Algorithm(
        name="ppo",
        paper="arXiv:1707.06347",
        credit=partial(credit.token_gae, **_GAE),
        loss=_CLIP,
        needs_critic=True,
    ),
    Algorithm(
        name="steppo",
        paper="arXiv:2604.18401",
        credit=partial(credit.step_gae, **_GAE),
        loss=_STEP_CLIP,
        needs_critic=True,
        own_old_logprobs=True,
    ),
    Algorithm(
        name="gigpo",
        paper="arXiv:2505.10978",
        credit=partial(
            credit.anchored_return,
            scale="group",
            step_weight=1.0,
            gamma=_GAMMA,
            anchor="observation",
            similarity=None,
        ),
        loss=_CLIP,
        min_group_size=2,
    ),
]
ALGORITHMS: dict[str, Algorithm] = {row.name: row for row in _ROWS}


def get_algorithm(name: str, **settings: object) -> Algorithm:
    """A name alone is the vetted algorithm; settings change its row and must be ones it has."""
    if name not in ALGORITHMS:
        raise ConfigError(f"unknown algorithm {name!r}.{did_you_mean(name, ALGORITHMS)}")
    return ALGORITHMS[name].with_settings(**settings)


def trainable(groups: Iterable[Group], *, varied_by: RewardShaper | None = None) -> list[Group]:
    """The groups with only those trajectories that can be trained on.

    Left out: trajectories whose machinery failed (their reward says nothing about the policy), those in which nothing
    was sampled, and with `varied_by` (dynamic sampling) groups that are uniform to it.
    """
    kept = [replace(group, trajectories=[t for t in group.trajectories if _is_trainable(t)]) for group in groups]
    return [g for g in kept if g.trajectories and not (varied_by is not None and is_uniform(g, varied_by))]


def is_uniform(group: Group, shaper: RewardShaper | None = None) -> bool:
    """No two attempts that count earned a different return, so comparing them teaches nothing.

    Returns are what `shaper` makes of the rewards, or as paid.
    """
    shaper = shaper or RewardShaper()
    earned = [shaper.earned(trajectory) for trajectory in group.trajectories if _counts(trajectory)]
    return all(all_equal(torch.tensor(part, dtype=torch.float64)) for part in zip(*earned, strict=True))


def assign_credit(
    groups: Iterable[Group],
    algorithm: Algorithm,
    *,
    shaper: RewardShaper | None = None,
    values: Callable[[Sequence[Trajectory]], Sequence[Values]] | None = None,
    kl: Callable[[Sequence[Trajectory]], Sequence[PerToken]] | None = None,
) -> list[CreditedTrajectory]:
    """Advantages for every trajectory that can be trained on; the others enter no statistic either.

    `shaper` puts rewards on tokens (default: as they are). `values` is a critic, `kl` the log-ratio to a reference:
    both are asked for exactly the trajectories that count.
    """
    if algorithm.needs_critic != (values is not None):
        raise ConfigError(
            f"algorithm {algorithm.name!r} {'needs' if algorithm.needs_critic else 'does not use'} a critic, "
            f"but values are {'given' if values is not None else 'missing'}"
        )
    shaper = shaper or RewardShaper()
    kept = trainable(groups, varied_by=shaper if algorithm.sampling_rounds > 1 else None)
    attempts = [trajectory for group in kept for trajectory in group.trajectories]
    greedy = _greedy_attempts(kept) if algorithm.needs_greedy else []
    ratios = [*kl(attempts), *repeat(None, len(greedy))] if kl else None
    before_kl = shaper.place([*attempts, *greedy])
    rewards = shaper.penalize(before_kl, ratios)
    # A group's greedy attempt is found by identity: two groups may well have equal ones.
    totals = {id(t): total(placed) for t, placed in zip(greedy, rewards[len(attempts) :], strict=True)}
    baselines = [totals.get(id(group.greedy)) for group in kept for _ in group.trajectories]
    valued = values(attempts) if values else [None] * len(attempts)
    count = len(attempts)
    columns = zip(attempts, rewards[:count], before_kl[:count], valued, baselines, strict=True)
    scored = [
        Scored(trajectory=one, rewards=placed, before_kl=without if kl else None, values=said, baseline=baseline)
        for one, placed, without, said, baseline in columns
    ]
    in_order = iter(scored)
    grouped = [[next(in_order) for _ in group.trajectories] for group in kept]
    return [
        CreditedTrajectory(
            trajectory=item.trajectory,
            advantages=made.advantages,
            values=None if item.values is None else item.values.per_token,
            value_targets=made.value_targets,
        )
        for item, made in zip(scored, credit.credit_of(algorithm.credit, grouped), strict=True)
    ]


def _greedy_attempts(groups: Sequence[Group]) -> list[Trajectory]:
    """Those that say something. One that failed is no baseline; that none was played at all would train nothing."""
    attempts = [group.greedy for group in groups if group.greedy is not None]
    if len(attempts) < len(groups):
        raise ConfigError(
            f"{len(groups) - len(attempts)} of {len(groups)} groups have no greedy attempt to compare with. "
            "Play one per row and set Group.greedy."
        )
    return [trajectory for trajectory in attempts if _is_trainable(trajectory)]


def as_demonstrations(trajectories: Iterable[Trajectory]) -> list[CreditedTrajectory]:
    """Credit for imitation: advantage 1 on every response token.

    How they were sampled (temperature, top-p, top-k) is dropped: imitation trains the plain distribution.
    """
    return [
        CreditedTrajectory(
            trajectory=replace(trajectory, steps=[step.without_sampling() for step in trajectory.steps]),
            advantages=[[1.0 for _ in step] for step in zeros(trajectory)],
        )
        for trajectory in trajectories
        if _is_trainable(trajectory)
    ]


def _counts(trajectory: Trajectory) -> bool:
    return not trajectory.stop.is_failure and trajectory.num_response_tokens > 0


def _is_trainable(trajectory: Trajectory) -> bool:
    if _counts(trajectory) and not math.isfinite(trajectory.total_reward):
        raise DataError(
            f"trajectory {trajectory.trajectory_id!r} of row {trajectory.row_id!r} has reward "
            f"{trajectory.total_reward}, which would poison its whole group. Scoring must fail such a trajectory."
        )
    return _counts(trajectory)
