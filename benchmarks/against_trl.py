"""Compare our advantages, losses and gradients with those of TRL, on the same tensors.

    python -m benchmarks.against_trl         # results/against_trl.json and the table of docs/algorithms/parity.md

Real `GRPOTrainer` and `RLOOTrainer` objects run their code from rewards to loss (`_generate_and_score_completions`,
`_compute_loss`); only episodes and log-probs come from the case instead of a model. Fails if a difference is above the
tolerance, or if something that differs by design does not.

Needs `pip install trl==1.16.0 datasets`. This version of TRL has no PPO.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import trl  # type: ignore[import-not-found, unused-ignore]
from datasets import Dataset
from torch import Tensor
from transformers.utils import logging

from agent_r1.bench.models import TINY, make_tokenizer
from agent_r1.learn.algorithms import get_algorithm
from agent_r1.learn.losses import Correction, KLEstimator
from benchmarks.parity import (
    KL_COEF,
    Comparison,
    Outcome,
    advantages,
    differentiate,
    kl_in_reward,
    kl_loss,
    policy_loss,
    run,
    shared_advantages,
)
from benchmarks.parity_cases import Case

ATTEMPTS, ROWS = 4, 16  # TRL's groups have equal sizes
HORIZON = 256
ONE_STEP = ("one step", "stale, one step", "on-policy, one step")
ALL = ("one step", "several steps", "success or failure", "one token", "stale", "on-policy")


class FromCase:
    """A trainer that takes episodes and log-probs from a case."""

    case: Case
    logprobs_R: Tensor
    ref_model: Any

    def load(self, case: Case) -> None:
        self.case, self.logprobs_R = case, case.logprobs_R

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, None]:
        known_R = self.logprobs_R if torch.is_grad_enabled() else self.case.old_R
        if model is self.ref_model:
            known_R = self.case.reference_R
        rows_BL = self.case.episodes.spread(known_R, fill=-1.0)
        return rows_BL, torch.zeros_like(rows_BL), None


class GRPO(FromCase, trl.GRPOTrainer):  # type: ignore[misc]
    pass


class RLOO(FromCase, trl.RLOOTrainer):  # type: ignore[misc]
    def _generate(self, prompts: Sequence[Any]) -> tuple[list[list[int]], list[list[int]], list[str]]:
        """RLOOTrainer takes no rollout function."""
        found = rollout(prompts, self)
        return found["prompt_ids"], found["completion_ids"], [""] * len(prompts)


def rollout(prompts: Sequence[Any], trainer: FromCase) -> dict[str, Any]:
    layout, case = trainer.case.episodes, trainer.case
    ends = [len(row) - row[::-1].index(True) for row in layout.mask_BL.tolist()]
    sampler_BL = layout.spread(case.sampler_R, fill=-1.0).tolist()
    return {
        "prompt_ids": [[5, 6]] * len(prompts),
        "completion_ids": [[7] * end for end in ends],
        "logprobs": [row[:end] for row, end in zip(sampler_BL, ends, strict=True)],
        "env_mask": [row[:end] for row, end in zip(layout.mask_BL.int().tolist(), ends, strict=True)],
    }


@cache
def model_folder() -> str:
    """TRL loads the reference model from the same folder as the model."""
    folder = tempfile.TemporaryDirectory()
    TINY.model().network(dtype=torch.float32, device=torch.device("cpu")).save_pretrained(folder.name)
    make_tokenizer(TINY.vocabulary).save_pretrained(folder.name)
    KEPT.append(folder)
    return folder.name


KEPT: list[Any] = []  # folders live as long as the program


@cache
def trainer(kind: str, **settings: Any) -> Any:
    """With TRL's defaults, except for `settings`."""
    config, make = (trl.GRPOConfig, GRPO) if kind == "grpo" else (trl.RLOOConfig, RLOO)
    own = {"num_iterations": 2, "steps_per_generation": 1}  # so that there are old log-probs
    correction = {name: settings.pop(name) for name in list(settings) if name.startswith("vllm_")}
    more = {"rollout_func": rollout} if kind == "grpo" else {}

    def earned(completions: Any, **kwargs: Any) -> list[float]:
        return [trajectory.total_reward for trajectory in made.case.trajectories]

    made = make(
        model=model_folder(),
        args=config(
            output_dir=str(Path(model_folder()) / "out"),
            per_device_train_batch_size=ROWS,
            num_generations=ATTEMPTS,
            max_completion_length=HORIZON,
            gradient_accumulation_steps=1,
            use_cpu=True,
            bf16=False,
            report_to="none",
            **own,
            **settings,
        ),
        train_dataset=Dataset.from_list([{"prompt": "x"}] * ROWS),
        reward_funcs=earned,
        **more,
    )
    made.model.train()
    made.current_gradient_accumulation_steps = 1
    if correction:  # the part of vLLM other than generation
        made.use_vllm = made.vllm_importance_sampling_correction = True
        made._last_loaded_step = made.state.global_step  # vLLM would have these weights
        for name, value in correction.items():
            setattr(made, name, value)
    return made


# The other side.


def scored(case: Case, kind: str, **settings: Any) -> tuple[Any, dict[str, Any]]:
    made = trainer(kind, **settings)
    made.load(case)
    return made, made._generate_and_score_completions([{"prompt": "x"} for _ in range(ROWS)])


def trl_advantages(case: Case, kind: str = "grpo", **settings: Any) -> Outcome:
    found_B = scored(case, kind, **settings)[1]["advantages"].double()
    sizes_B = torch.tensor([sum(sizes) for sizes in case.sizes])
    return Outcome(found_B.repeat_interleave(sizes_B))


def trl_loss(case: Case, advantages_R: Tensor | None, kind: str = "grpo", **settings: Any) -> Outcome:
    """On TRL's advantages if none are given."""
    made, inputs = scored(case, kind, **settings)
    if advantages_R is not None:  # one per episode
        starts = torch.tensor([sum(sizes) for sizes in case.sizes]).cumsum(0)
        inputs["advantages"] = advantages_R[starts - 1]

    def loss(leaf_R: Tensor) -> Tensor:
        made.logprobs_R = leaf_R
        result: Tensor = made._compute_loss(made.model, inputs)
        return result

    return differentiate(case.logprobs_R, loss)


# The comparisons.


def compare_losses(
    name: str,
    compared: str,
    theirs: dict[str, Any],
    ours: dict[str, Any],
    *,
    kinds: Sequence[str] = ALL,
    note: str = "",
) -> Comparison:
    """With our advantages on both sides."""
    algorithm = get_algorithm(name, **ours)
    clip: dict[str, Any] = {
        "epsilon": algorithm.settings.get("clip_low", 0.2),
        "epsilon_high": algorithm.settings.get("weight_cap") or algorithm.settings["clip_high"],
    }
    return Comparison(
        algorithm=name,
        compared=", ".join(filter(None, ["loss and gradient", compared])),
        kinds=kinds,
        ours=lambda case: policy_loss(case, algorithm),
        theirs=lambda case: trl_loss(case, shared_advantages(case, algorithm), **clip, **theirs),
        note=note,
    )


def loss_rows() -> list[Comparison]:
    sequence = {"loss_type": "grpo", "importance_sampling_level": "sequence"}
    return [
        compare_losses("grpo", "", {"loss_type": "bnpo"}, {}, note="TRL's `loss_type=bnpo`"),
        compare_losses(
            "grpo",
            "`aggregation: trajectory`",
            {"loss_type": "grpo"},
            {"aggregation": "trajectory"},
            note="TRL's `loss_type=grpo`",
        ),
        compare_losses(
            "grpo",
            "`dual_clip: 3`",
            {"loss_type": "bnpo", "delta": 3.0},
            {"dual_clip": 3.0},
            kinds=(*ALL, "far"),
            note="TRL's `delta=3`",
        ),
        compare_losses("dr_grpo", "", {"loss_type": "dr_grpo"}, {"horizon": HORIZON}, note="TRL's `loss_type=dr_grpo`"),
        compare_losses("dapo", "", {"loss_type": "dapo"}, {"sampling_rounds": 1}, note="TRL's `loss_type=dapo`"),
        compare_losses("cispo", "", {"loss_type": "cispo"}, {}, note="TRL's `loss_type=cispo`, `epsilon_high=5`"),
        compare_losses(
            "gspo",
            "one step per episode",
            sequence,
            {},
            kinds=ONE_STEP,
            note="TRL's `importance_sampling_level=sequence`",
        ),
    ]


def compare_advantages(name: str, compared: str, kinds: Sequence[str], note: str, **theirs: Any) -> Comparison:
    algorithm = get_algorithm(name)
    return Comparison(
        algorithm=name,
        compared=compared,
        kinds=kinds,
        ours=lambda case: Outcome(advantages(case, algorithm)),
        theirs=lambda case: trl_advantages(case, **theirs),
        note=note,
    )


def advantage_rows() -> list[Comparison]:
    kinds = (*ALL, "process rewards")
    return [
        compare_advantages("dr_grpo", "advantages", kinds, "TRL's `scale_rewards=none`", scale_rewards="none"),
        compare_advantages("rloo", "advantages", ONE_STEP, "TRL's RLOO takes no tool text", kind="rloo", beta=0.0),
        Comparison(
            algorithm="rloo",
            compared="advantages, `kl_in: reward`",
            kinds=ONE_STEP,
            ours=lambda case: kl_in_reward(case, "rloo"),
            theirs=lambda case: trl_advantages(case, "rloo", beta=KL_COEF),
            note="TRL's `beta`",
        ),
    ]


def correction_row(level: Any, kind: Any) -> Comparison:
    algorithm, correction = get_algorithm("grpo"), Correction(kind=kind, level=level, cap=1.5, floor=0.7)
    theirs: dict[str, Any] = {
        "vllm_importance_sampling_mode": f"{'token' if level == 'token' else 'sequence'}_{MODES[kind]}",
        "vllm_importance_sampling_clip_max": 1.5,
        "vllm_importance_sampling_clip_min": 0.7 if kind == "reject" else None,
    }
    return Comparison(
        algorithm="grpo",
        compared=f"loss and gradient, `correction.kind: {kind}`, `correction.level: {level}`",
        kinds=ALL if level == "token" else ONE_STEP,
        ours=lambda case: policy_loss(case, algorithm, correction),
        theirs=lambda case: trl_loss(case, shared_advantages(case, algorithm), loss_type="bnpo", **theirs),
        note=f"TRL's `{theirs['vllm_importance_sampling_mode']}`{'' if level == 'token' else ', one step per episode'}",
    )


MODES = {"truncate": "truncate", "reject": "mask"}


def kl_row(estimator: KLEstimator, note: str, **theirs: Any) -> Comparison:
    """TRL adds the penalty inside its loss, so the sum of both is compared."""
    algorithm = get_algorithm("grpo")

    def ours(case: Case) -> Outcome:
        policy, kl = policy_loss(case, algorithm), kl_loss(case, estimator)
        return Outcome(policy.value + KL_COEF * kl.value, _gradient(policy) + KL_COEF * _gradient(kl))

    return Comparison(
        algorithm="grpo",
        compared=f"loss with KL and gradient, `kl_estimator: {estimator}`",
        kinds=ALL,
        ours=ours,
        theirs=lambda case: trl_loss(
            case, shared_advantages(case, algorithm), loss_type="bnpo", beta=KL_COEF, **theirs
        ),
        note=note,
    )


def end_to_end(name: str, note: str, kinds: Sequence[str] = ALL, **theirs: Any) -> Comparison:
    """From rewards to the loss, each side with its own advantages."""
    algorithm = get_algorithm(name)
    return Comparison(
        algorithm=name,
        compared="loss and gradient from rewards on",
        kinds=kinds,
        ours=lambda case: policy_loss(case, algorithm),
        theirs=lambda case: trl_loss(case, None, **theirs),
        note=note,
    )


# Where the definitions differ by design.


def difference(
    name: str, compared: str, kinds: Sequence[str], ours: Callable[[Case], Outcome], theirs: Any, note: str
) -> Comparison:
    return Comparison(algorithm=name, compared=compared, kinds=kinds, ours=ours, theirs=theirs, note=note, differs=True)


def differences() -> list[Comparison]:
    grpo, gspo, rloo = get_algorithm("grpo"), get_algorithm("gspo"), get_algorithm("rloo")
    summed = get_algorithm("rloo", aggregation="constant", horizon=1)
    sequence: dict[str, Any] = {"loss_type": "grpo", "importance_sampling_level": "sequence"}
    clip: dict[str, Any] = {"epsilon": gspo.settings["clip_low"], "epsilon_high": gspo.settings["clip_high"]}
    return [
        difference(
            "grpo",
            "advantages",
            ALL,
            lambda case: Outcome(advantages(case, grpo)),
            trl_advantages,
            "TRL adds 1e-4 to the standard deviation it divides by. Equal without the division, as in `dr_grpo`.",
        ),
        difference(
            "gspo",
            "loss and gradient, episodes of several steps",
            ("several steps",),
            lambda case: policy_loss(case, gspo),
            lambda case: trl_loss(case, shared_advantages(case, gspo), **clip, **sequence),
            "Our ratio is that of a response, TRL's that of the episode. Equal for one step.",
        ),
        difference(
            "rloo",
            "loss and gradient off-policy",
            ("stale, one step",),
            lambda case: policy_loss(case, rloo),
            lambda case: trl_loss(case, None, "rloo", beta=0.0),
            "We clip a ratio per token, TRL the product over the episode. The gradient is equal on-policy with "
            "`aggregation: constant` and `horizon: 1`.",
        ),
        Comparison(
            algorithm="rloo",
            compared="gradient on-policy, `aggregation: constant`, `horizon: 1`",
            kinds=("on-policy, one step",),
            ours=lambda case: Outcome(_gradient(policy_loss(case, summed))),
            theirs=lambda case: Outcome(_gradient(trl_loss(case, None, "rloo", beta=0.0))),
            note="TRL adds up the log-probs of an episode",
        ),
    ]


def _gradient(outcome: Outcome) -> Tensor:
    assert outcome.gradient_R is not None
    return outcome.gradient_R


def comparisons() -> list[Comparison]:
    return [
        *advantage_rows(),
        *loss_rows(),
        end_to_end(
            "dr_grpo",
            "TRL's `loss_type=dr_grpo`, `scale_rewards=none`",
            loss_type="dr_grpo",
            scale_rewards="none",
        ),
        *(correction_row(level, kind) for level in ("token", "step") for kind in MODES),
        kl_row("k3", "TRL's `beta`, `use_bias_correction_kl=False`", use_bias_correction_kl=False),
        kl_row("k3_weighted", "TRL's `use_bias_correction_kl`", use_bias_correction_kl=True),
        *differences(),
    ]


if __name__ == "__main__":
    logging.disable_progress_bar()
    run("trl", comparisons(), sys.argv[1:])
