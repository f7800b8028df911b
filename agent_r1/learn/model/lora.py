"""Low-rank adapters (LoRA, arXiv:2106.09685): the model stays as it is, and W x becomes W x + scale * B A x.

The layers are peft's. This module adds the way back: the weights of a plain model that computes the same,
W + scale * B A, under the model's own names, for an engine to sample from and for a checkpoint that anyone can load.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from agent_r1.errors import ConfigError, import_extra
from agent_r1.learn.model.layers import untied_state
from agent_r1.learn.model.sharding import Made

ADAPTER = "default"  # peft's name for the only adapter


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRA:
    rank: int
    alpha: float  # scale = alpha / rank
    target_modules: tuple[str, ...] | None  # last parts of module names; None: every linear layer but the output head
    seed: int  # initialises A; B starts at 0, so that the adapted model starts as the model itself
    share_base: bool = False  # keep the model's number format, in which an engine reads the same tensors
    merges: bool = True  # the engine loads weights that contain the adapters; False: it loads the adapters

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def layers_of(self, model: Any) -> list[str]:
        """Names of the layers that get an adapter: linear ones of the decoder, below the output head."""
        head, prefix = model.get_output_embeddings(), decoder_prefix(model)
        linear = [
            name
            for name, module in model.named_modules()
            if type(module) is nn.Linear and module is not head and name.startswith(prefix)
        ]
        endings = ("",) if self.target_modules is None else tuple(f".{target}" for target in self.target_modules)
        if not all(any(f".{name}".endswith(ending) for name in linear) for ending in endings):
            raise ConfigError(
                f"lora.target_modules={self.target_modules or 'auto'}: only linear layers of {type(model).__name__} "
                "below the output head can have an adapter, and each name must belong to one"
            )
        return [name for name in linear if f".{name}".endswith(endings)]


class Adapters:
    """Adds adapters to a model and freezes everything else in it."""

    def __init__(self, model: Any, settings: LoRA) -> None:
        lora, inject = require_peft()
        config = lora.LoraConfig(r=settings.rank, lora_alpha=settings.alpha, target_modules=settings.layers_of(model))
        with torch.random.fork_rng(devices=[]):  # peft draws on the CPU
            torch.manual_seed(settings.seed)
            inject(config, model)
        self._model = model
        self._layers: dict[str, Any] = {
            name: module for name, module in model.named_modules() if isinstance(module, lora.LoraLayer)
        }
        for layer in self._layers.values():  # peft takes over the number format of the base
            layer.lora_A.float()
            layer.lora_B.float()

    def state_dict(self) -> dict[str, Tensor]:
        """The live tensors of the adapters alone."""
        return {
            f"{name}.{part}": getattr(layer, part)[ADAPTER].weight.detach()
            for name, layer in self._layers.items()
            for part in ("lora_A", "lora_B")
        }

    def merged(self) -> Mapping[str, Tensor]:
        """The weights of a plain model that computes the same, tied ones once."""
        layers = {f"{name}.weight": layer for name, layer in self._layers.items()}
        skipped = {f"{name}.{part}.{ADAPTER}.weight" for name in self._layers for part in ("lora_A", "lora_B")}
        state = untied_state(self._model)
        plain = {_own_name(name, self._layers): tensor for name, tensor in state.items() if name not in skipped}

        def merge(name: str, weight: Tensor) -> Tensor:
            return weight + layers[name].get_delta_weight(ADAPTER) if name in layers else weight

        return Made(plain, merge)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Compute without the adapters."""
        for layer in self._layers.values():
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer.enable_adapters(True)


def decoder_prefix(model: Any) -> str:
    """The prefix of the names of a decoder's modules; empty if the model is only a decoder."""
    decoder = model.get_decoder() if getattr(model.config, "vision_config", None) is not None else model
    return next((f"{name}." for name, module in model.named_modules() if module is decoder and name), "")


def _own_name(name: str, layers: Mapping[str, Any]) -> str:
    """The model's name for a tensor that peft moved into a wrapped layer."""
    module, _, part = name.rpartition(".")
    outer = module.removesuffix(".base_layer")
    return f"{outer}.{part}" if outer != module and outer in layers else name


def require_peft() -> tuple[Any, Any]:
    """Import (peft.tuners.lora, inject_adapter_in_model)."""
    peft = import_extra("peft", "lora", "lora")
    return peft.tuners.lora, peft.inject_adapter_in_model
