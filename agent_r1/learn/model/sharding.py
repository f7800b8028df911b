"""FSDP2: each rank keeps its share of every parameter, of its gradient and of its optimizer state, in fp32.

A layer is gathered for its forward pass and again for its backward pass, in the number format it is computed in. The
embeddings and the output head are gathered in fp32, because hidden states are added up in the format of the embeddings,
and stay gathered from the forward to the backward pass, because the head is read after it. Gradients are summed in
fp32, not averaged: losses are already divided by counts over all ranks. Autocast stays as in one process, so that
activations have the same formats.

Methods and functions that gather are collective: all ranks must call them, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import TensorMeta

from agent_r1.compute.compiling import repeated_layers

BODY = "packed_body"  # the method of a sharded model that runs its body


def shard_model(model: Any, body: nn.Module, mesh: DeviceMesh, dtype: torch.dtype | None) -> None:
    """Shard a causal LM layer by layer. dtype: what layers are computed in; None: fp32."""
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in repeated_layers(body):
        if layer._compiled_call_impl is not None:  # compile the layer without the hooks that gather it
            layer._compiled_call_impl = None
            layer.forward = torch.compile(layer.forward, dynamic=True)
        _shard(layer, mesh, mp_policy=precision)
    _shard(model, mesh, reshard_after_forward=False)
    setattr(model, BODY, MethodType(lambda _, **inputs: body(**inputs), model))
    register_fsdp_forward_method(model, BODY)


def shard_linear(head: nn.Linear, mesh: DeviceMesh) -> None:
    """Shard a small head of its own."""
    _shard(head, mesh, reshard_after_forward=True)


def _shard(module: nn.Module, mesh: DeviceMesh, **settings: Any) -> None:
    sharded: FSDPModule = fully_shard(module, mesh=mesh, **settings)  # the module itself, with another class
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)  # gloo cannot scale while it sums


def body_of(model: nn.Module, body: nn.Module) -> Callable[..., Any]:
    """The body, or for a sharded model the method that gathers weights around it."""
    method: Callable[..., Any] = getattr(model, BODY, body)
    return method


def release(model: nn.Module) -> None:
    """Free what stays gathered after a forward pass without a backward pass."""
    if isinstance(model, FSDPModule):
        model.reshard()


def whole(tensor: Tensor) -> Tensor:
    """Return the complete tensor; a tensor that is not sharded is returned unchanged. Collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor; itself if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sharded_like(part: Tensor, tensor: Tensor) -> Tensor:
    """Turn this rank's part, on any device, into a tensor sharded by rows like `tensor`. Scalars are not sharded."""
    if not isinstance(tensor, DTensor) or not part.ndim:
        return part
    shape = torch.Size((len(tensor), *part.shape[1:]))
    meta = TensorMeta(shape, part.contiguous().stride(), part.dtype)
    return DTensor(part, replace(tensor._spec, tensor_meta=meta), requires_grad=False)


def onto(tensor: Tensor, target: Tensor) -> Tensor:
    """A tensor that was read from a checkpoint, on the device of `target` and sharded like it."""
    return sharded_like(local(tensor).to(target.device), target)


class Made(Mapping[str, Tensor]):
    """Makes each tensor on access, such as a gathered or a merged one: a second copy of the model would not fit."""

    def __init__(self, tensors: Mapping[str, Tensor], make: Callable[[str, Tensor], Tensor]) -> None:
        self._tensors, self._make = tensors, make

    @torch.no_grad()
    def __getitem__(self, name: str) -> Tensor:
        return self._make(name, self._tensors[name])

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def gathered(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The complete tensors. Reading one is collective."""
    return Made(tensors, lambda _, tensor: whole(tensor))
