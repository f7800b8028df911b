"""Compare our advantages, losses and gradients with those of verl, on the same tensors.

    python -m benchmarks.against_verl        # results/against_verl.json and the tables of docs/algorithms/parity.md

Calls verl's functions (`verl_side.py`): advantage estimators, policy losses, rollout correction, KL penalties and value
loss. Fails if a difference is above the tolerance, or if something that differs by design does not.

Needs `pip install --no-deps verl==0.9.1` and `pip install "transformers<5.11" tensordict==0.10.0 ray hydra-core
codetiming torchdata pandas datasets peft dill pylatexenc pillow tensorboard cachetools fastapi uvicorn TransferQueue`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from agent_r1.learn.algorithms import ALGORITHMS, get_algorithm
from agent_r1.learn.losses import Correction, KLEstimator
from benchmarks import parity
from benchmarks import verl_side as verl
from benchmarks.parity import Comparison, Outcome
from benchmarks.parity_cases import USUAL, Case

Estimator = Callable[[Case], Tensor]

ADVANTAGES: dict[str, tuple[Estimator, str]] = {
    "grpo": (lambda case: verl.by_group(case, "grpo"), ""),
    "dr_grpo": (lambda case: verl.by_group(case, "grpo", norm_adv_by_std_in_grpo=False), ""),
    "dapo": (lambda case: verl.by_group(case.varied(), "grpo"), "groups without signal are left out"),
    "gspo": (lambda case: verl.by_group(case, "grpo"), ""),
    "cispo": (lambda case: verl.by_group(case, "grpo"), ""),
    "rloo": (lambda case: verl.by_group(case, "rloo"), ""),
    "remax": (verl.remax, ""),
    "reinforce": (verl.step_returns, "verl's `reinforce_plus_plus`, given each step as one token"),
    "reinforce++": (verl.token_returns, ""),
    "reinforce++_baseline": (lambda case: verl.by_group(case, "reinforce_plus_plus_baseline"), ""),
    "ppo": (verl.token_gae, "verl's `gae`"),
    "steppo": (verl.step_gae, "verl's `gae`, given each step as one token"),
    "gigpo": (lambda case: verl.by_group(case, "grpo"), "`step_weight: 0`; verl does not compare equal states"),
}
# Features without a counterpart in verl are switched off, and listed below as differences.
_GAE: dict[str, Any] = {"gamma": 1.0, "bootstrap_truncated": False}
SETTINGS: dict[str, dict[str, Any]] = {"ppo": _GAE, "steppo": _GAE, "gigpo": {"step_weight": 0.0}}
WITH_PROCESS = (*USUAL, "process rewards")


def advantage_row(
    name: str, theirs: Estimator, *, changed: str = "", kinds: Sequence[str] = USUAL, note: str = "", **settings: Any
) -> Comparison:
    algorithm = get_algorithm(name, **{**SETTINGS.get(name, {}), **settings})
    return Comparison(
        algorithm=name,
        compared=f"advantages, {changed}" if changed else "advantages",
        kinds=kinds,
        ours=lambda case: Outcome(parity.advantages(case, algorithm)),
        theirs=lambda case: Outcome(theirs(case).double()),
        note=note,
    )


def advantage_rows() -> list[Comparison]:
    kinds = {"remax": USUAL, "ppo": (*WITH_PROCESS, "truncated"), "steppo": (*WITH_PROCESS, "truncated")}
    rows = []
    for name in ALGORITHMS:
        theirs, note = ADVANTAGES[name]
        rows.append(advantage_row(name, theirs, kinds=kinds.get(name, WITH_PROCESS), note=note))
    one = ("one token",)
    return [
        *rows,
        advantage_row("rloo", lambda case: verl.by_group(case, "rloo_vectorized"), note="verl's `rloo_vectorized`"),
        advantage_row("ppo", lambda case: verl.token_gae(case, lam=0.9), changed="`lam: 0.9`", lam=0.9),
        advantage_row("steppo", lambda case: verl.step_gae(case, lam=0.9), changed="`lam: 0.9`", lam=0.9),
        advantage_row("ppo", lambda case: verl.token_gae(case, 0.9), changed="`gamma: 0.9`", kinds=one, gamma=0.9),
        advantage_row(
            "reinforce++", lambda case: verl.token_returns(case, 0.9), changed="`gamma: 0.9`", kinds=one, gamma=0.9
        ),
    ]


def loss_row(
    name: str, *, changed: str = "", kinds: Sequence[str] = USUAL, note: str = "", **settings: Any
) -> Comparison:
    """With our advantages on both sides."""
    algorithm = get_algorithm(name, **{**SETTINGS.get(name, {}), **settings})
    return Comparison(
        algorithm=name,
        compared=f"loss and gradient, {changed}" if changed else "loss and gradient",
        kinds=kinds,
        ours=lambda case: parity.policy_loss(case, algorithm),
        theirs=lambda case: verl.policy_loss(case, algorithm),
        note=note,
    )


def loss_rows() -> list[Comparison]:
    kinds = (*USUAL, "on-policy", "nearly on-policy")
    rows = [
        loss_row(name, kinds=kinds, note=f"verl's `{verl.loss_name(row)}`{_rows(row.settings['aggregation'])}")
        for name, row in ALGORITHMS.items()
    ]
    modes = [
        loss_row(
            "grpo",
            changed=f"`aggregation: {mode}`",
            note=f"verl's `{verl.AGGREGATIONS[mode]}`{_rows(mode)}",
            aggregation=mode,
        )
        for mode in ("step", "trajectory", "constant")
    ]
    return [*rows, loss_row("grpo", changed="`dual_clip: 3`", kinds=(*USUAL, "far"), dual_clip=3.0), *modes]


def _rows(level: object) -> str:
    return ", on a row per step" if level == "step" else ""


CAP, FLOOR = 1.5, 0.7


def correction_row(name: str, level: Any, kind: Any) -> Comparison:
    algorithm = get_algorithm(name, **SETTINGS.get(name, {}))
    correction = Correction(kind=kind, level=level, cap=CAP, floor=FLOOR)
    theirs = {
        "rollout_is": "token" if level == "token" else "sequence",
        "rollout_is_threshold": CAP if kind == "truncate" else f"{FLOOR}_{CAP}",
    }
    rows = _rows("step" if level == "step" else algorithm.settings["aggregation"])
    return Comparison(
        algorithm=name,
        compared=f"loss and gradient, `correction.kind: {kind}`, `correction.level: {level}`",
        ours=lambda case: parity.policy_loss(case, algorithm, correction),
        theirs=lambda case: verl.policy_loss(case, algorithm, theirs),
        note=f"verl's `rollout_is={theirs['rollout_is']}`{', IcePop' if kind == 'reject' else ''}{rows}",
    )


def correction_rows() -> list[Comparison]:
    kinds = [(level, kind) for level in ("token", "step") for kind in ("truncate", "reject")]
    return [correction_row(name, *each) for name in ("grpo", "gspo", "steppo") for each in kinds]


def kl_row(ours: KLEstimator, theirs: str, kinds: Sequence[str], note: str = "", differs: bool = False) -> Comparison:
    return Comparison(
        algorithm="any",
        compared=f"KL in the loss and gradient, `kl_estimator: {ours}`",
        kinds=kinds,
        ours=lambda case: parity.kl_loss(case, ours),
        theirs=lambda case: verl.kl_loss(case, theirs),
        note=f"verl's `{theirs}`{note}",
        differs=differs,
    )


def critic_row(name: str, clip: float | None) -> Comparison:
    return Comparison(
        algorithm=name,
        compared=f"value loss and gradient, {'not clipped' if clip is None else f'clipped at {clip}'}",
        kinds=WITH_PROCESS,
        ours=lambda case: parity.critic_loss(case, name, clip),
        theirs=lambda case: verl.critic_loss(case, name, clip),
        note="" if name == "ppo" else "at the first token of each step",
    )


def kl_and_critic_rows() -> list[Comparison]:
    small = ("one step", "several steps", "one token")
    return [
        kl_row("k1", "k1+", USUAL, ", which has the gradient of `k2`"),
        kl_row("k2", "k2", USUAL),
        kl_row("k3", "k3", small),
        kl_row("k3+", "k3+", small),
        Comparison(
            algorithm="reinforce++",
            compared="advantages, `kl_in: reward`",
            ours=lambda case: parity.kl_in_reward(case, "reinforce++"),
            theirs=verl.kl_in_reward,
            note="verl's `apply_kl_penalty`",
        ),
        Comparison(
            algorithm="any",
            compared="KL coefficient, `kl_target`",
            ours=parity.kl_coefficients,
            theirs=verl.kl_coefficients,
            note="verl's `AdaptiveKLController`",
        ),
        Comparison(
            algorithm="ppo",
            compared="value targets",
            kinds=WITH_PROCESS,
            ours=lambda case: Outcome(parity.value_targets(case, "ppo").double()),
            theirs=lambda case: Outcome(verl.token_value_targets(case).double()),
        ),
        *(critic_row(name, clip) for name in ("ppo", "steppo") for clip in (None, 0.2)),
    ]


# Where the definitions differ by design.


def advantage_difference(
    name: str, kind: str, theirs: Estimator, compared: str, note: str, **settings: Any
) -> Comparison:
    algorithm = get_algorithm(name, **{**SETTINGS.get(name, {}), **settings})
    return Comparison(
        algorithm=name,
        compared=compared,
        kinds=(kind,),
        ours=lambda case: Outcome(parity.advantages(case, algorithm)),
        theirs=lambda case: Outcome(theirs(case).double()),
        note=note,
        differs=True,
    )


def advantage_differences() -> list[Comparison]:
    grpo = ADVANTAGES["grpo"][0]
    return [
        advantage_difference(
            "grpo",
            "groups of one",
            grpo,
            "advantages of a group of one",
            "0 for us, because there is nothing to compare with; verl keeps the raw reward. Equal for larger groups.",
        ),
        advantage_difference(
            "grpo",
            "equal rewards",
            grpo,
            "advantages of equal rewards",
            "0 for us; verl divides the rounding error of the mean by 1e-6. Equal in fp64.",
        ),
        advantage_difference(
            "ppo",
            "critic rounding only",
            verl.token_gae,
            "advantages, equal returns and values that are off by 1e-7",
            "Critic rounding is not a signal: 0 for us; verl scales it up 10,000 times. Equal when returns differ.",
        ),
        Comparison(
            algorithm="reinforce++",
            compared="advantages, `kl_in: reward` and equal rewards",
            kinds=("equal rewards",),
            ours=lambda case: parity.kl_in_reward(case, "reinforce++"),
            theirs=verl.kl_in_reward,
            note="0 for us, since a KL alone is not a signal; verl scales it up to size 1. Equal when rewards differ.",
            differs=True,
        ),
        advantage_difference(
            "remax",
            "process rewards",
            verl.remax,
            "advantages with process rewards",
            "Return of the episode minus that of the greedy one for us; verl starts from the return of what follows "
            "each token. Equal when only the outcome is rewarded.",
        ),
        advantage_difference(
            "ppo",
            "several steps",
            lambda case: verl.token_gae(case, 0.9),
            "advantages, `gamma: 0.9`",
            "We discount each reply of the environment, verl each token. Equal for responses of one token.",
            gamma=0.9,
        ),
        advantage_difference(
            "ppo",
            "truncated",
            verl.token_gae,
            "advantages, `bootstrap_truncated: true`",
            "We add the critic's value of the state after the last step; verl has no bootstrap. Equal without it.",
            bootstrap_truncated=True,
        ),
    ]


def loss_differences() -> list[Comparison]:
    grpo, gspo = get_algorithm("grpo"), get_algorithm("gspo")
    reject = Correction(kind="reject", level="token", cap=CAP, floor=FLOOR)
    masked = {
        "rollout_is": "token",
        "rollout_is_threshold": 1e9,
        "rollout_rs": "token_k1",
        "rollout_rs_threshold": f"{FLOOR}_{CAP}",
    }
    return [
        Comparison(
            algorithm="gspo",
            compared="loss and gradient, an episode of several steps as one row",
            kinds=("several steps",),
            ours=lambda case: parity.policy_loss(case, gspo),
            theirs=lambda case: verl.policy_loss(case, gspo, layout=case.episodes),
            note="Our ratio is that of a response, verl's that of the row. Equal on a row per step.",
            differs=True,
        ),
        Comparison(
            algorithm="grpo",
            compared="loss and gradient, rejection by verl's `rollout_rs`",
            kinds=("several steps",),
            ours=lambda case: parity.policy_loss(case, grpo, reject),
            theirs=lambda case: verl.policy_loss(case, grpo, masked),
            note="We count a rejected token in the mean, so that rejecting never makes others weigh more; verl does "
            "not count it. Equal to its IcePop weights.",
            differs=True,
        ),
        kl_row("k1", "k1", ("several steps",), ", whose gradient is 0 on average. Equal to its `k1+`.", True),
        kl_row("k3", "k3", ("stale",), " is bounded at 10, with gradient 0 above. Equal below.", True),
    ]


def comparisons() -> list[Comparison]:
    same = [*advantage_rows(), *loss_rows(), *correction_rows(), *kl_and_critic_rows()]
    return [*same, *advantage_differences(), *loss_differences()]


if __name__ == "__main__":
    parity.run("verl", comparisons(), sys.argv[1:])
