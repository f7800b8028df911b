"""`agent-r1 bench learner`: what an optimizer step costs, in time and memory.

    packed    segments without padding against the usual padded step, for sequences of very different lengths
    steps     T-step episodes merged into one segment each, against one row per step; gradients compared
    shared    a group that shares a long prompt: the token tree against flat segments; gradients compared
    sharing   the same for ever shorter prompts: from which sharing factor on does the tree pay?

Every step is a whole one: trajectories in, merged and packed, all passes, clipping, AdamW.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from agent_r1.bench.arithmetic import break_even, training_flops
from agent_r1.bench.measure import GIB, Spent, alternate, free_memory, matmul_flops, spend, synchronize
from agent_r1.bench.models import SMOLLM2_135M, TINY, Shape, make_network
from agent_r1.bench.results import Figures, Row
from agent_r1.bench.training import BETAS, LR, MAX_GRAD_NORM, Maker, PaddedTrainer, one_row_per_step
from agent_r1.learn.algorithms import get_algorithm
from agent_r1.learn.batch.tree import PrefixSharing
from agent_r1.learn.learner import Learner
from agent_r1.learn.model.policy import PolicyModel
from agent_r1.types import CreditedTrajectory

STATE_BYTES = 12  # per parameter: the fp32 weight and AdamW's two moments


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSizes:
    shape: Shape
    fp32_layers: int  # of the model whose fp32 gradients are compared
    tokens_per_pack: int
    packed: tuple[tuple[int, int], ...]  # (mean tokens of a sequence, sequences)
    prompt_share: float  # of a sequence of `packed`
    steps: tuple[tuple[int, int, int], ...]  # (steps of an episode, tokens of its prompt, episodes)
    response: int  # tokens of a step of `steps`
    observation: int
    groups: int
    group_size: int
    shared_prompt: int
    shared_response: int
    sharing_prompts: tuple[int, ...]


FULL = LearnerSizes(
    shape=SMOLLM2_135M,
    fp32_layers=2,
    tokens_per_pack=131_072,
    packed=((1024, 32), (4096, 16)),
    prompt_share=0.25,
    steps=((4, 512, 64), (16, 512, 32), (64, 512, 16), (64, 2048, 8)),
    response=16,
    observation=64,
    groups=16,
    group_size=8,
    shared_prompt=2048,
    shared_response=256,
    sharing_prompts=(16, 32, 64, 128, 256, 512),
)
QUICK = LearnerSizes(
    shape=TINY,
    fp32_layers=1,
    tokens_per_pack=256,
    packed=((24, 4),),
    prompt_share=0.25,
    steps=((3, 12, 2),),
    response=4,
    observation=4,
    groups=1,
    group_size=4,
    shared_prompt=32,
    shared_response=8,
    sharing_prompts=(4, 16),
)


@dataclass(kw_only=True)
class LearnerBench:
    """Makes the policy when the first row needs it, and keeps it for the others."""

    sizes: LearnerSizes
    device: torch.device
    repeats: int
    start_up_seconds: float = field(default=0.0, init=False)
    _policy: PolicyModel | None = field(default=None, init=False)
    _plain: PolicyModel | None = field(default=None, init=False)

    @property
    def groups(self) -> dict[str, Callable[[], Iterator[Row]]]:
        return {"packed": self.packed, "steps": self.steps, "shared": self.shared, "sharing": self.sharing}

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        return torch.bfloat16 if self.device.type == "cuda" else None

    def close(self) -> None:
        self._policy = self._plain = None
        free_memory(self.device)

    def policy(self) -> PolicyModel:
        """Ready to be measured: compilation on first use is paid for, and reported, here."""
        if self._policy is None:
            network = make_network(self.sizes.shape, dtype=torch.float32, device=self.device)
            began = time.perf_counter()
            self._policy = PolicyModel(network, autocast_dtype=self.autocast_dtype, compiled=self.device.type == "cuda")
            maker, learner = Maker(self.sizes.shape.vocabulary), self._learner(self._policy)
            for count in (3, 5):  # two sizes, so that what is compiled is compiled for any
                learner.update([maker.single(maker.ids(8), 8 + count) for _ in range(count)])
            synchronize(self.device)
            self.start_up_seconds = time.perf_counter() - began
        return self._policy

    def packed(self) -> Iterator[Row]:
        sizes, maker = self.sizes, Maker(self.sizes.shape.vocabulary)
        learner = self._learner(self.policy())
        network = make_network(sizes.shape, dtype=torch.float32, device=self.device)
        padded = PaddedTrainer(model=network, autocast_dtype=self.autocast_dtype)
        peak_flops = matmul_flops(self.device, self.autocast_dtype or torch.float32)
        for mean, sequences in sizes.packed:
            lengths = maker.spread(mean, sequences)
            prompts = [max(1, round(sizes.prompt_share * length)) for length in lengths]
            batch = [maker.single(maker.ids(p), n - p) for p, n in zip(prompts, lengths, strict=True)]
            micro_batch = padded.largest_micro_batch(batch)
            learner.update(batch)
            flops = self._flops(lengths, trained=sum(lengths) - sum(prompts))
            spent = alternate(
                {
                    "packed": partial(self._spend, learner.policy.model, partial(learner.update, batch)),
                    "padded": partial(self._spend, network, partial(padded.step, batch, micro_batch)),
                },
                self.repeats,
            )
            yield Row(
                name=f"packed/{sequences} sequences of {mean} tokens",
                settings={"shape": asdict(sizes.shape), "mean": mean, "sequences": sequences, **self._common},
                headline="tokens_per_second",
                repeats=[self._packed_figures(each, sum(lengths), flops / peak_flops) for each in spent],
                once={
                    "padded_micro_batch": float(micro_batch),
                    "matmul_tflops": peak_flops / 1e12,
                    "start_up_seconds": self.start_up_seconds,
                },
            )

    def _packed_figures(self, spent: dict[str, Spent], tokens: int, peak_seconds: float) -> Figures:
        """`peak_seconds`: what the FLOPs would take at the rate of a large matrix product."""
        packed, padded = spent["packed"], spent["padded"]
        held = STATE_BYTES * self.sizes.shape.parameters
        figures = {
            "seconds": packed.seconds,
            "padded_seconds": padded.seconds,
            "speed_ratio": padded.seconds / packed.seconds,
            "tokens_per_second": tokens / packed.seconds,
            "mfu": peak_seconds / packed.seconds,
            "padded_mfu": peak_seconds / padded.seconds,
        }
        if self.device.type != "cuda":
            return figures
        return figures | {
            "peak_gib": (held + packed.added_bytes) / GIB,
            "padded_peak_gib": (held + padded.added_bytes) / GIB,
            "memory_share": (held + packed.added_bytes) / (held + padded.added_bytes),
        }

    def steps(self) -> Iterator[Row]:
        sizes, learner = self.sizes, self._learner(self.policy())
        plain = self._learner(self._fp32_policy())
        for steps, prompt, episodes in sizes.steps:
            maker = Maker(sizes.shape.vocabulary, seed=steps)
            lengths = {"prompt": prompt, "response": sizes.response, "observation": sizes.observation}
            merged = [maker.growing(steps=steps, **lengths) for _ in range(episodes)]
            rows = one_row_per_step(merged)
            difference = _difference(_gradient(learner, rows), _gradient(learner, merged))
            exact = _difference(_gradient(plain, rows[:steps]), _gradient(plain, merged[:1]))
            spent = self._both(
                learner.policy.model, rows=partial(learner.update, rows), merged=partial(learner.update, merged)
            )
            growth = sizes.response + sizes.observation
            ends = [prompt + sizes.response + growth * step for step in range(steps)]  # of each row; the last is merged
            trained = sizes.response * steps  # either way
            bound = self._flops(ends, trained=trained) / self._flops(ends[-1:], trained=trained)
            yield Row(
                name=f"steps/{steps} steps, prompt of {prompt}",
                settings={
                    "shape": asdict(sizes.shape),
                    "steps": steps,
                    "episodes": episodes,
                    **lengths,
                    **self._common,
                },
                headline="merged_seconds",
                repeats=[
                    {
                        "merged_seconds": each["merged"].seconds,
                        "rows_seconds": each["rows"].seconds,
                        "time_ratio": each["rows"].seconds / each["merged"].seconds,
                        "time_ratio_over_steps": each["rows"].seconds / each["merged"].seconds / steps,
                    }
                    for each in spent
                ],
                once={
                    "flops_ratio_over_steps": bound / steps,
                    "gradient_difference": difference,
                    "fp32_gradient_difference": exact,
                },
            )

    def _flops(self, lengths: Sequence[int], *, trained: int) -> float:
        """Of sequences of these lengths, with so many trained tokens in all."""
        shape = self.sizes.shape
        return training_flops(
            lengths,
            trained=trained,
            body_parameters=shape.body_parameters,
            head_parameters=shape.head_parameters,
            attention_width=shape.attention_width,
        )

    def shared(self) -> Iterator[Row]:
        yield self._tree_row("shared", self.sizes.shared_prompt)

    def sharing(self) -> Iterator[Row]:
        rows = [self._tree_row("sharing", prompt) for prompt in self.sizes.sharing_prompts]
        yield from rows
        found = break_even([(row.figures["token_ratio"], row.figures["speed_ratio"]) for row in rows])
        if found is not None:
            yield Row(
                name="sharing/break-even",
                settings={**rows[0].settings, "prompts": list(self.sizes.sharing_prompts)},
                headline="token_ratio",
                repeats=[],
                once={"token_ratio": found},
            )

    def _tree_row(self, group: str, prompt_tokens: int) -> Row:
        sizes, maker = self.sizes, Maker(self.sizes.shape.vocabulary, seed=prompt_tokens)
        prompts = [maker.ids(prompt_tokens) for _ in range(sizes.groups)]
        batch = [maker.single(p, sizes.shared_response) for p in prompts for _ in range(sizes.group_size)]
        flat, tree = self._learner(self.policy(), "off"), self._learner(self.policy(), "on")
        plain_flat, plain_tree = self._learner(self._fp32_policy(), "off"), self._learner(self._fp32_policy(), "on")
        some = batch[: sizes.group_size]
        difference = _difference(_gradient(tree, batch), _gradient(flat, batch))
        exact = _difference(_gradient(plain_tree, some), _gradient(plain_flat, some))
        spent = self._both(self.policy().model, flat=partial(flat.update, batch), tree=partial(tree.update, batch))
        flat_tokens = len(batch) * (prompt_tokens + sizes.shared_response)
        saved = sizes.groups * (sizes.group_size - 1) * prompt_tokens
        return Row(
            name=f"{group}/prompt of {prompt_tokens} tokens",
            settings={
                "shape": asdict(sizes.shape),
                "groups": sizes.groups,
                "group_size": sizes.group_size,
                "prompt": prompt_tokens,
                "response": sizes.shared_response,
                **self._common,
            },
            headline="tree_seconds",
            repeats=[
                {
                    "tree_seconds": each["tree"].seconds,
                    "flat_seconds": each["flat"].seconds,
                    "speed_ratio": each["flat"].seconds / each["tree"].seconds,
                }
                for each in spent
            ],
            once={
                "token_ratio": flat_tokens / (flat_tokens - saved),
                "gradient_difference": difference,
                "fp32_gradient_difference": exact,
            },
        )

    @property
    def _common(self) -> dict[str, int]:
        return {"tokens_per_pack": self.sizes.tokens_per_pack}

    def _fp32_policy(self) -> PolicyModel:
        """Few layers, no autocast: where two layouts differ by more than rounding, it shows."""
        if self._plain is None:
            shape = replace(self.sizes.shape, layers=self.sizes.fp32_layers)
            self._plain = PolicyModel(make_network(shape, dtype=torch.float32, device=self.device))
        return self._plain

    def _learner(self, policy: PolicyModel, prefix_sharing: PrefixSharing = "off") -> Learner:
        return Learner(
            policy,
            loss=get_algorithm("reinforce").loss,
            lr=LR,
            temperature=1.0,
            betas=BETAS,
            weight_decay=0.0,
            max_grad_norm=MAX_GRAD_NORM,
            max_tokens_per_pack=self.sizes.tokens_per_pack,
            max_nonfinite_updates=1,
            prefix_sharing=prefix_sharing,
        )

    def _spend(self, model: nn.Module, work: Callable[[], object]) -> Spent:
        """Gradients left over from the last step are not there before, so that they count as this one's."""
        model.zero_grad(set_to_none=True)
        return spend(work, self.device)

    def _both(self, model: nn.Module, **sides: Callable[[], object]) -> list[dict[str, Spent]]:
        return alternate({name: partial(self._spend, model, work) for name, work in sides.items()}, self.repeats)


def _gradient(learner: Learner, credited: Sequence[CreditedTrajectory]) -> Tensor:
    """Of all weights in one vector. An update leaves it behind; at this learning rate the weights are as before."""
    learner.update(credited)
    parameters = learner.policy.model.parameters()
    return torch.cat([parameter.grad.flatten() for parameter in parameters if parameter.grad is not None])


def _difference(gradient: Tensor, other: Tensor) -> float:
    """Relative to the length of the second."""
    return float((gradient - other).norm() / other.norm())
