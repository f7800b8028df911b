"""The algorithms, as rows of one table: how rewards become advantages, and which loss trains on them.

Learner, trainer and rollout never ask which one runs. To add one: a pure function in `advantages.py` or `losses.py`, an
estimator in `estimators.py` that feeds it, a name in `algorithm_names.py`, a row, a test. Nothing here knows models.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Any, TypeVar, get_type_hints

from pydantic import NonNegativeFloat, PositiveInt, TypeAdapter, ValidationError

from agent_r1.algorithm_names import PAPERS, check_name
from agent_r1.errors import ConfigError, did_you_mean
from agent_r1.learn import estimators, losses
from agent_r1.learn.credit import CreditFunction
from agent_r1.learn.losses import LossOutput, Share

LossFunction = Callable[..., LossOutput]
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One row of the table. Its settings are the arguments of the two functions and the fields below the line."""

    name: str
    paper: str
    credit: CreditFunction  # (groups of scored trajectories) -> credit
    loss: LossFunction  # (LossInputs) -> LossOutput
    _: KW_ONLY
    needs_critic: bool = False
    needs_greedy: bool = False  # one greedy attempt per row, to compare with
    min_group_size: int = 1  # smaller groups teach nothing
    own_old_logprobs: bool = False  # ratios to the learner's log-probs, for clips narrower than the sampler's error
    on_policy_only: bool = False  # the loss has no ratio, so only the first optimizer step of a batch is right
    # ---- settings
    sampling_rounds: PositiveInt = 1  # rounds of sampling until enough groups have different returns (DAPO)
    overlong_buffer: Share = 0.2  # share of the response limit in which the overlong penalty grows (DAPO)
    overlong_penalty: NonNegativeFloat = 0.0  # penalty of a response at its limit

    def __post_init__(self) -> None:
        for name, value in _settings_of(self.credit).items():
            if value != (other := self.settings[name]):
                raise ConfigError(
                    f"algorithm {self.name!r}: setting {name!r} has two defaults, {value!r} and {other!r}"
                )

    @property
    def settings(self) -> dict[str, object]:
        """Every setting with its value."""
        own = {name: getattr(self, name) for name in OWN_SETTINGS}
        return _settings_of(self.credit) | _settings_of(self.loss) | own

    def with_settings(self, **settings: object) -> Algorithm:
        """Change settings of this row. Unknown names, wrong types and settings without effect are errors."""
        before = self.settings
        hints = _hints_of(Algorithm) | _hints_of(self.credit) | _hints_of(self.loss)
        checked = {}
        for name, value in settings.items():
            if name not in before:
                raise ConfigError(f"algorithm {self.name!r} has no setting {name!r}.{did_you_mean(name, before)}")
            checked[name] = self._check(name, value, hints[name])
        after = before | checked
        if "horizon" in before and before["horizon"] != after["horizon"] and after["aggregation"] != "constant":
            raise ConfigError(
                f"horizon has no effect with aggregation={after['aggregation']}; use aggregation=constant"
            )
        if before["overlong_buffer"] != after["overlong_buffer"] and not after["overlong_penalty"]:
            raise ConfigError("overlong_buffer has no effect without overlong_penalty; set both")
        own = {name: value for name, value in checked.items() if name in OWN_SETTINGS}
        return replace(self, credit=_bind(self.credit, checked), loss=_bind(self.loss, checked), **own)

    def _check(self, name: str, value: object, hint: Any) -> Any:
        adapter = TypeAdapter(hint, config={"allow_inf_nan": False})
        try:
            return adapter.validate_python(value, strict=True)  # strict takes 1 for 1.0, but not True or "1"
        except ValidationError as error:
            message = error.errors()[0]["msg"]
            raise ConfigError(f"algorithm {self.name!r}: setting {name}={value!r}: {message}") from None

    def require_updates(self, *, num_epochs: int, num_minibatches: int) -> None:
        if self.on_policy_only and num_epochs * num_minibatches > 1:
            raise ConfigError(
                f"{self.name} has no importance ratio, so only the first of {num_epochs * num_minibatches} updates of "
                "a batch would be right. Set learner.num_epochs=1 and learner.num_minibatches=1, or use rloo or cispo."
            )

    def require_ratio(self, where: str) -> None:
        """Raise ConfigError if samples of an older policy would bias the loss."""
        if self.on_policy_only:
            raise ConfigError(f"{self.name} has no importance ratio, so stale samples would bias it in {where}")

    def require_credit_by_role(self) -> None:
        """Raise ConfigError if the algorithm needs whole episodes, so that roles cannot be credited separately."""
        if self.needs_greedy:
            raise ConfigError(
                f"rewards.by_role compares a role with itself, but {self.name} compares an episode with its greedy "
                "attempt: leave by_role out, or use rloo"
            )
        if self.settings.get("bootstrap_truncated"):
            raise ConfigError(
                "rewards.by_role cannot bootstrap: the prompt that max_steps left unanswered belongs to one role only. "
                "Set bootstrap_truncated=false"
            )

    def require_group_size(self, group_size: int) -> None:
        if group_size < self.min_group_size:
            raise ConfigError(
                f"{self.name} needs at least {self.min_group_size} trajectories per row, got {group_size}. "
                f"Set group_size >= {self.min_group_size}."
            )
        if self.sampling_rounds > 1 and group_size < 2:
            raise ConfigError(
                f"sampling_rounds={self.sampling_rounds} keeps rows whose attempts differ: "
                "set group_size >= 2 or sampling_rounds=1"
            )


OWN_SETTINGS = ("sampling_rounds", "overlong_buffer", "overlong_penalty")


def _settings_of(function: Callable[..., object]) -> dict[str, object]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is not p.empty}


def _hints_of(function: Callable[..., object]) -> dict[str, Any]:
    return get_type_hints(getattr(function, "func", function), include_extras=True)  # a partial has no hints


def _bind(function: Callable[..., Result], settings: Mapping[str, object]) -> Callable[..., Result]:
    own = {name: value for name, value in settings.items() if name in _settings_of(function)}
    return partial(function, **own) if own else function


# `horizon` is the expected number of tokens of an episode, used only by the aggregation "constant".
_WEIGHTING: dict[str, Any] = {"aggregation": "token", "horizon": 256}
_CLIP = partial(losses.token_clip, clip_low=0.2, clip_high=0.2, dual_clip=None, **_WEIGHTING)
# A hundred times the paper's range, which was tuned for responses of thousands of tokens; see docs/algorithms/gspo.md.
_STEP_CLIP = partial(losses.step_clip, clip_low=0.03, clip_high=0.04, **{**_WEIGHTING, "aggregation": "step"})
_REINFORCE = partial(losses.reinforce, **_WEIGHTING)
_CAPPED = partial(losses.capped_weight, weight_cap=5.0, **_WEIGHTING)

_GROUP = partial(estimators.group_return, scale="group")
# The step budget is part of the task: evaluation counts success within it, so truncated episodes do not bootstrap. All
# algorithms share one discount, so that comparisons do not compare discounts.
_GAMMA = 1.0
_GAE: dict[str, Any] = {"gamma": _GAMMA, "lam": 1.0, "whiten_batch": True, "bootstrap_truncated": False}
_STEP_RETURN = partial(estimators.step_return, gamma=_GAMMA, whiten_batch=True)
_TOKEN_RETURN = partial(estimators.token_return, gamma=_GAMMA)
_ANCHORED = partial(
    estimators.anchored_return, scale="group", step_weight=1.0, gamma=_GAMMA, anchor="observation", similarity=None
)
_DAPO: dict[str, Any] = {"sampling_rounds": 3, "overlong_penalty": 1.0}
_PAIRS: dict[str, Any] = {"min_group_size": 2}  # attempts are compared with each other


def _row(name: str, credit: CreditFunction, loss: LossFunction, **needs: Any) -> Algorithm:
    return Algorithm(name, PAPERS[name], credit, loss, **needs)


_ROWS = [
    # name, credit, loss, what else it needs
    _row("grpo", _GROUP, _CLIP, **_PAIRS),
    _row("dr_grpo", partial(_GROUP, scale="none"), partial(_CLIP, aggregation="constant"), **_PAIRS),
    _row("dapo", _GROUP, partial(_CLIP, clip_high=0.28), **_PAIRS, **_DAPO),
    _row("gspo", _GROUP, _STEP_CLIP, **_PAIRS, own_old_logprobs=True),
    _row("cispo", _GROUP, _CAPPED, **_PAIRS),
    _row("rloo", estimators.leave_one_out_return, _CLIP, **_PAIRS),
    _row("remax", estimators.greedy_difference, _REINFORCE, needs_greedy=True, on_policy_only=True),
    _row("reinforce", _STEP_RETURN, _REINFORCE, on_policy_only=True),
    _row("reinforce++", _TOKEN_RETURN, _CLIP),
    _row("reinforce++_baseline", estimators.whitened_group_return, _CLIP, **_PAIRS),
    _row("ppo", partial(estimators.token_gae, **_GAE), _CLIP, needs_critic=True),
    _row("steppo", partial(estimators.step_gae, **_GAE), _STEP_CLIP, needs_critic=True, own_old_logprobs=True),
    _row("gigpo", _ANCHORED, _CLIP, **_PAIRS),
]
ALGORITHMS: dict[str, Algorithm] = {row.name: row for row in _ROWS}


def get_algorithm(name: str, **settings: object) -> Algorithm:
    """Look up a row of the table, and change its settings if any are given."""
    check_name(name, ALGORITHMS)
    return ALGORITHMS[name].with_settings(**settings)
