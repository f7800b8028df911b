"""How much memory training takes, reported before the first step.

Weights, gradients and optimizer state are counted; they are the same in every step. What a pack adds (activations, the
attention of its segments, the logits of a chunk) depends on the model, the kernels and the compiler, so on a GPU it is
measured: packs of different sizes go through the real forward and backward passes, and a line through the peaks of the
two largest gives the number of tokens that fit. If the model takes pictures, packs full of them are measured too.
Larger packs are refused, or made smaller if the caller allows it; activation checkpointing can be left to the same
measurement.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from agent_r1.errors import ConfigError
from agent_r1.learn.learner import Learner
from agent_r1.learn.model.policy import PolicyModel
from agent_r1.learn.model.sharding import local
from agent_r1.learn.sizes import RESERVE
from agent_r1.types import CreditedTrajectory, Step, StopReason, Trajectory
from agent_r1.vision.eyes import MAX_CACHED_BYTES
from agent_r1.vision.picture_format import PictureFormat
from agent_r1.vision.pictures import Picture

PROBE_TOKENS = 4096  # tokens of the larger of the first two packs: more than a chunk of the head
# Tokens of a third pack, as a share of those that seem to fit. In small packs, fixed costs such as the logits of a
# chunk hide the cost per token of one checkpointed layer.
FAR = 0.5
SEGMENT_TOKENS = 512
# For groups whose attempts share a prefix: attempts, tokens that belong to one attempt, rows of a group.
ATTEMPTS, OWN_TOKENS = 8, 64
GROUP_ROWS = SEGMENT_TOKENS - OWN_TOKENS + ATTEMPTS * OWN_TOKENS
OTHERS_MATTER = 2 * 2**30  # bytes; CUDA itself takes some hundreds of MiB
PICTURE_PIXELS = 28  # side of the square that becomes one token, roughly
Layout = Literal["text", "shared", "pictures"]  # the packs that are measured
ROUND_TOKENS = 1024  # packs are cut to multiples of it, so that a little more or less free memory changes nothing
SAVINGS = (
    "learner.activation_checkpointing=true, learner.mlp_chunk_tokens=4096, learner.optimizer_state=8bit, "
    "learner.offload_optimizer=true and a section lora save memory"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The memory that packs take, and what is left for them."""

    bytes_per_token: float
    bytes_once: float  # independent of the size of the pack
    bytes_in_step: int  # needed by the optimizer's step, when packs are gone
    available: int
    elsewhere: int  # held by other processes, or by other libraries in this one
    first_seconds: float  # time of the first of two equal passes, in which layers are compiled
    second_seconds: float

    @property
    def tokens_that_fit(self) -> int:
        if self.available < self.bytes_in_step:
            return 0
        return max(0, int((self.available - self.bytes_once) / self.bytes_per_token))


def estimate(learner: Learner, *, longest: int | None = None, may_checkpoint: bool = False) -> str:
    """Measure on a GPU, and return a line to print before the first step.

    longest: tokens that a segment may have. If given, packs that do not fit are made smaller, down to that length;
    otherwise they are an error.
    may_checkpoint: turn on activation checkpointing if packs of the necessary size do not fit without.
    """
    fixed = ", ".join(f"{name} {readable(size)}" for name, size in fixed_bytes(learner).items() if size)
    if learner.policy.device.type != "cuda":
        return f"learner memory: {fixed}"
    needed, choice = longest or learner.max_tokens_per_pack, ""
    # With several ranks, a rank that has run out of memory cannot recover: the others wait for it in the middle of a
    # pass.
    measured = least_room(learner, may_fail=may_checkpoint and learner.ranks.size == 1)
    if may_checkpoint and (measured is None or measured.tokens_that_fit < needed):
        choice = f"; activation checkpointing is on: packs of {needed} tokens do not fit without it"
        for model in (learner.policy, *([] if learner.critic is None else [learner.critic.backbone])):
            model.checkpoint_activations()
        learner.zero_grad()  # memory that a failed pass left behind
        torch.cuda.empty_cache()
        measured = least_room(learner)
    assert measured is not None
    size = learner.max_tokens_per_pack = fitting_pack(fixed, measured, learner.max_tokens_per_pack, longest)
    return (
        f"learner memory: {fixed}; {readable(measured.bytes_per_token)} per token, so packs of up to "
        f"{measured.tokens_that_fit} tokens fit ({size} allowed); first pass {measured.first_seconds:.1f} s, next "
        f"{measured.second_seconds:.2f} s{choice}"
    )


def least_room(learner: Learner, *, may_fail: bool = False) -> Measured | None:
    """Measure on all ranks and return the one with the least room: all must choose the same size of packs. If memory
    runs out, return None with `may_fail`, otherwise raise ConfigError."""
    try:
        return min(learner.ranks.gather(measure(learner)), key=lambda one: one.tokens_that_fit)
    except torch.cuda.OutOfMemoryError as error:
        if may_fail:
            return None
        raise ConfigError(
            "the packs of a measurement do not fit into the GPU's memory. Set a lower engine.gpu_memory_share; "
            f"{SAVINGS}{held_by_others(_elsewhere(learner.policy.device))}"
        ) from error


def fixed_bytes(learner: Learner) -> dict[str, int]:
    """Return the bytes that are in use on the device in every step, by purpose."""
    policy, critic = learner.policy.model, learner.critic
    others = [] if critic is None else [*critic.head.parameters()]
    seen = {id(p) for p in policy.parameters()}
    others += [] if critic is None or critic.shared else [*critic.backbone.model.parameters()]
    others = [p for p in others if id(p) not in seen]  # a critic's adapters may share their base
    # A policy with adapters is its own reference: the same weights, so nothing more.
    reference = [p for p in learner.reference.model.parameters() if id(p) not in seen] if learner.reference else []
    return {
        "weights": size_of(policy.parameters()),
        "gradients": sum(size_of(optimizer.parameters) for optimizer in learner.optimizers.values()),
        "optimizer": sum(optimizer.state_bytes for optimizer in learner.optimizers.values()),
        "reference": size_of(reference),
        "critic": size_of(others),  # weights only; its gradients and optimizer state are counted above
    }


def size_of(tensors: Iterable[Tensor]) -> int:
    """Bytes on this rank."""
    return sum(local(tensor).numel() * tensor.element_size() for tensor in tensors)


def readable(size: float) -> str:
    """For example "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.{0 if unit == 'B' else 1}f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def fitting_pack(fixed: str, measured: Measured, wanted: int, longest: int | None) -> int:
    """Tokens of a pack: as many as wanted, or fewer if only those fit and `longest` is given. A segment of `longest`
    tokens is never cut."""
    fitting = measured.tokens_that_fit
    if fitting < (longest or wanted):
        asked, more = f"learner.max_tokens_per_pack={wanted}", ""
        if longest is not None:
            asked = f"an episode may have {longest} (rollout.max_context_tokens)"
            more = ". If no episode gets that long, set learner.max_tokens_per_pack"
        raise ConfigError(
            f"the GPU's memory has room for packs of {fitting} tokens, at {readable(measured.bytes_per_token)} each, "
            f"beside {fixed} and the engine's cache, but {asked}. Lower that or engine.gpu_memory_share; {SAVINGS}"
            f"{more}{held_by_others(measured.elsewhere)}"
        )
    return wanted if longest is None or fitting >= wanted else max(longest, fitting // ROUND_TOKENS * ROUND_TOKENS)


def held_by_others(size: int) -> str:
    """The end of an error about memory: a pack of the right size may not fit because of another process."""
    if size < OTHERS_MATTER:
        return ""
    return f". {readable(size)} of the GPU are held by other processes or libraries (see nvidia-smi)"


def measure(learner: Learner) -> Measured:
    """Run packs of each layout on the GPU and record the peaks. Nothing is learned, and no gradient is left.
    Layers that compile on first use are compiled here. All ranks must take part."""
    enough = max(PROBE_TOKENS, 4 * (learner.policy.mlp_chunk_tokens or 0))  # so that both compute MLPs in chunks
    large = max(4, min(enough, learner.max_tokens_per_pack))  # at least two sizes with something to predict
    small = large // 2
    layouts: list[Layout] = ["text"]
    layouts += [] if learner.prefix_sharing == "off" or small < GROUP_ROWS else ["shared"]
    layouts += [] if learner.policy.pictures is None else ["pictures"]
    first = [_peak(learner, small, layout) for layout in layouts]  # also makes gradients that later packs add to
    points = [[_peak(learner, tokens, layout) for tokens in (small, large)] for layout in layouts]
    lines = [_far_line(learner, low, high, layout) for (low, high), layout in zip(points, layouts, strict=True)]
    slope, once = max(lines)
    available = _available(learner)
    learner.zero_grad()
    torch.cuda.empty_cache()
    return Measured(
        bytes_per_token=slope,
        bytes_once=once,
        bytes_in_step=max(optimizer.step_bytes for optimizer in learner.optimizers.values()),
        available=available,
        elsewhere=_elsewhere(learner.policy.device),
        first_seconds=sum(each.seconds for each in first),
        second_seconds=sum(low.seconds for low, _ in points),
    )


def _far_line(learner: Learner, low: _Pass, high: _Pass, layout: Layout) -> tuple[float, float]:
    """(slope, value at 0) of the line through the peaks of the two largest of three packs. All ranks use the same size
    for the third."""
    slope, once = line_through((low.rows, low.peak), (high.rows, high.peak))
    fitting = min(learner.ranks.gather(int(FAR * (_available(learner) - once) / slope)))
    far = min(fitting, learner.max_tokens_per_pack) // SEGMENT_TOKENS * SEGMENT_TOKENS
    if far <= high.rows:
        return slope, once
    last = _peak(learner, far, layout)
    return line_through((high.rows, high.peak), (last.rows, last.peak))


def line_through(small: tuple[int, int], large: tuple[int, int]) -> tuple[float, float]:
    """(slope, value at 0) of the line through two (tokens, bytes) points; it never falls, nor starts below 0."""
    slope = max(1.0, (large[1] - small[1]) / max(1, large[0] - small[0]))  # equal if a pack holds one large picture
    return slope, max(0.0, small[1] - slope * small[0])


@dataclass(frozen=True, slots=True)
class _Pass:
    rows: int
    peak: int  # bytes in addition to those before
    seconds: float


def _peak(learner: Learner, rows: int, layout: Layout) -> _Pass:
    device, policy = learner.policy.device, learner.policy
    with_values = learner.critic is not None
    if layout == "pictures" and policy.pictures is not None:
        batch = picture_batch(rows, policy.pictures, with_values=with_values)
    else:
        batch = synthetic_batch(rows, policy.vocabulary_size, with_values=with_values, shared=layout == "shared")
    _forget_pictures(learner)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before, began = torch.cuda.memory_allocated(device), time.perf_counter()
    computed = learner.rehearse(batch)
    torch.cuda.synchronize(device)
    return _Pass(computed, torch.cuda.max_memory_allocated(device) - before, time.perf_counter() - began)


def _available(learner: Learner) -> int:
    """Memory for packs: what is free with gradients in place, minus optimizer state that the first step allocates and
    features of pictures that are kept here and in an engine on the same GPU."""
    device = learner.policy.device
    _forget_pictures(learner)
    features = sum(model.kept_features for model in _models(learner))
    features += MAX_CACHED_BYTES if learner.policy.pictures is not None else 0  # the engine's
    torch.cuda.empty_cache()  # memory cached for CUDA graphs, such as an engine's, is not for packs
    free, total = torch.cuda.mem_get_info(device)
    missing = sum(optimizer.state_bytes for optimizer in learner.optimizers.values() if not optimizer.has_state)
    return int(free - missing - features - RESERVE * total)


def _models(learner: Learner) -> list[PolicyModel]:
    critic = learner.critic
    own = [critic.backbone] if critic is not None and not critic.shared else []
    return [learner.policy, *([] if learner.reference is None else [learner.reference]), *own]


def _forget_pictures(learner: Learner) -> None:
    for model in _models(learner):
        model.forget_pictures()


def _elsewhere(device: torch.device) -> int:
    free, total = torch.cuda.mem_get_info(device)
    return max(0, total - free - torch.cuda.memory_reserved(device))


def synthetic_batch(num_rows: int, vocabulary: int, *, with_values: bool, shared: bool) -> list[CreditedTrajectory]:
    """Segments with `num_rows` rows in total, trained on all but their prompt. If `shared`, the prompt is most of
    a segment and common to a group; otherwise it is one token, and no two segments start alike."""
    if not shared:
        lengths = [min(SEGMENT_TOKENS, num_rows - start) for start in range(0, num_rows, SEGMENT_TOKENS)]
        segments = [(_synthetic_ids(index, max(2, length)), 1) for index, length in enumerate(lengths)]
    else:
        start = SEGMENT_TOKENS - OWN_TOKENS
        segments = [
            (_synthetic_ids(group, start) + _synthetic_ids(1 + group + attempt, OWN_TOKENS), start)
            for group in range(num_rows // GROUP_ROWS)
            for attempt in range(ATTEMPTS)
        ]
    ids = [([token % vocabulary for token in tokens], prompt) for tokens, prompt in segments]
    return [_credited(index, tokens, prompt, with_values) for index, (tokens, prompt) in enumerate(ids)]


def picture_batch(num_rows: int, form: PictureFormat, *, with_values: bool) -> list[CreditedTrajectory]:
    """Segments with `num_rows` rows in total and as many pictures as fit into each. They are all different, so the
    tower looks at every one of them."""
    segment = min(SEGMENT_TOKENS, num_rows) - 2  # rows for pictures
    side = math.isqrt(SEGMENT_TOKENS // 2) * PICTURE_PIXELS
    while side > PICTURE_PIXELS and form.tokens(_plain_picture(0, side)) > segment:
        side //= 2
    size = form.tokens(_plain_picture(0, side))
    each = max(1, segment // size)
    made = []
    for index in range(max(1, num_rows // (each * size + 2))):
        shown = [_plain_picture(index * each + number, side) for number in range(each)]
        ids = [token for picture in shown for token in form.ids(picture)]
        made.append(_credited(index, [*ids, 1, 2], len(ids), with_values, tuple(shown)))
    return made


def _plain_picture(number: int, side: int) -> Picture:
    pixels = np.zeros((side, side, 3), np.uint8)
    pixels.reshape(-1)[:3] = number % 256, number // 256 % 256, number // 65536
    return Picture.from_pixels(pixels)


def _synthetic_ids(index: int, length: int) -> list[int]:
    return [index + 7919 * position for position in range(length)]  # a prime: spread over any vocabulary


def _credited(
    index: int, ids: list[int], prompt: int, with_values: bool, pictures: tuple[Picture, ...] = ()
) -> CreditedTrajectory:
    numbers = [1.0] * (len(ids) - prompt)
    step = Step(
        prompt_ids=ids[:prompt], response_ids=ids[prompt:], response_logprobs=[-1.0] * len(numbers), pictures=pictures
    )
    return CreditedTrajectory(
        trajectory=Trajectory(
            row_id="memory", trajectory_id=f"memory-{index}", steps=[step], stop=StopReason.ANSWERED, outcome_reward=0.0
        ),
        advantages=[numbers],
        values=[numbers] if with_values else None,
        value_targets=[[*numbers]] if with_values else None,
    )
