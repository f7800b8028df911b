"""The engine's attention, plugged into transformers' `AttentionInterface`, so that models need no port.

A step runs the tokens of all its sequences as one row, [1, N]: linear layers see N tokens, and only this function
knows which token belongs to which sequence. `cpu/cpu_attention.py` and `gpu/gpu_attention.py` compute it.

Not supported, and refused rather than ignored: soft-capped scores, attention sinks, position biases, custom masks.

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

from agent_r1.errors import ConfigError

PAGED = "agent_r1_paged"
REFUSED = ("softcap", "s_aux", "position_bias", "indices", "block_indices")


class AttentionStep(Protocol):
    """One step as the attention function needs it."""

    def attend(
        self, layer: int, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        """Keep the new keys and values; what each token sees in its own sequence, [N, H, D]."""
        ...


_STEP: ContextVar[AttentionStep | None] = ContextVar("agent_r1_step", default=None)


@contextmanager
def running(step: AttentionStep) -> Iterator[None]:
    """Attention calls inside belong to this step."""
    token = _STEP.set(step)
    try:
        yield
    finally:
        _STEP.reset(token)


_WINDOWS: ContextVar[dict[int, int | None] | None] = ContextVar("agent_r1_windows", default=None)


@contextmanager
def noting(windows: dict[int, int | None]) -> Iterator[None]:
    """Inside, every layer that calls our attention is noted, with its sliding window as the model passes it."""
    token = _WINDOWS.set(windows)
    try:
        yield
    finally:
        _WINDOWS.reset(token)


def register() -> None:
    """Make `PAGED` an attention implementation. No mask is registered with it: models then build none."""
    AttentionInterface.register(PAGED, paged_attention)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # compiled layers call it as it is: it differs from layer to layer
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
    """The signature transformers calls; keyword arguments that do not change the result are ignored."""
    step = _STEP.get()
    if step is None:
        raise ConfigError(
            "this model's attention belongs to a LocalEngine and was called outside it. The engine needs a model and "
            "a config of its own: pass it copy.deepcopy(model)."
        )
    refused = [name for name in REFUSED if kwargs.get(name) is not None]
    if attention_mask is not None or refused:
        raise ConfigError(
            f"{type(module).__name__} asks for {', '.join(refused) or 'a mask of its own'}, which LocalEngine does not "
            "support. Use another engine for this model."
        )
    layer: int = module.layer_idx  # type: ignore[assignment]
    if (windows := _WINDOWS.get()) is not None:
        windows[layer] = sliding_window
    query_NHD, key_NKD, value_NKD = (t[0].transpose(0, 1) for t in (query_1HND, key_1KND, value_1KND))
    if scaling is None:
        scaling = query_NHD.shape[-1] ** -0.5
    return step.attend(layer, query_NHD, key_NKD, value_NKD, scaling, sliding_window)[None], None
