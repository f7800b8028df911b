"""The engine's attention, plugged into transformers' `AttentionInterface`, so that models need no port.

A step runs the tokens of all its sequences as one row, [1, N]: linear layers see N tokens, and only this function
knows which token belongs to which sequence. `cpu/cpu_attention.py` and `gpu/gpu_attention.py` compute it.

Position biases and custom masks are refused (see `agent_r1/compute/attention.py`).

Shape suffixes: N = tokens in the step, H = query heads, K = key/value heads, D = head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from agent_r1.compute.attention import Scoring, read_scoring
from agent_r1.errors import ConfigError

PAGED = "agent_r1_paged"


class AttentionStep(Protocol):
    """One step as the attention function needs it."""

    def attend(self, layer: int, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, scoring: Scoring) -> Tensor:
        """Store the new keys and values, and attend to each token's own sequence, [N, H, D]."""
        ...


_STEP: ContextVar[AttentionStep | None] = ContextVar("agent_r1_step", default=None)


@contextmanager
def running(step: AttentionStep) -> Iterator[None]:
    """Attention calls in this context belong to `step`."""
    token = _STEP.set(step)
    try:
        yield
    finally:
        _STEP.reset(token)


_WINDOWS: ContextVar[dict[int, int | None] | None] = ContextVar("agent_r1_windows", default=None)


@contextmanager
def record_windows(windows: dict[int, int | None]) -> Iterator[None]:
    """Record each layer that calls our attention, with the sliding window that the model passes."""
    token = _WINDOWS.set(windows)
    try:
        yield
    finally:
        _WINDOWS.reset(token)


def register() -> None:
    """Make `PAGED` an attention implementation, without a mask function, so that models build no mask."""
    AttentionInterface.register(PAGED, paged_attention)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # it differs between layers
def paged_attention(
    module: nn.Module,
    query_1HND: Tensor,
    key_1KND: Tensor,
    value_1KND: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Called by transformers. Keyword arguments that do not change the result are ignored."""
    step = _STEP.get()
    if step is None:
        raise ConfigError("the attention of a LocalEngine was called outside it: pass the engine copy.deepcopy(model)")
    scoring = read_scoring(module, query_1HND, attention_mask, scaling, sliding_window, kwargs)
    layer: int = module.layer_idx  # type: ignore[assignment]
    if (windows := _WINDOWS.get()) is not None:
        windows[layer] = sliding_window
    query_NHD, key_NKD, value_NKD = (t[0].transpose(0, 1) for t in (query_1HND, key_1KND, value_1KND))
    return step.attend(layer, query_NHD, key_NKD, value_NKD, scoring)[None], None
