"""Decide where a run computes and in which number format."""

from __future__ import annotations

import torch

from agent_r1.config import RunConfig
from agent_r1.config.schema import LocalEngineConfig
from agent_r1.errors import ConfigError


def model_device(config: RunConfig) -> torch.device:
    name = config.model.device
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("model.device=cuda, but torch finds no GPU. Set model.device=cpu or model.device=auto")
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)


def device_name(config: RunConfig) -> str:
    device = model_device(config)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def engine_device(config: RunConfig) -> torch.device:
    """Where the local engine samples."""
    own = model_device(config)
    if not isinstance(config.engine, LocalEngineConfig) or (name := config.engine.device) is None:
        return own
    gpus = torch.cuda.device_count() if own.type == "cuda" else 0
    if int(name.removeprefix("cuda:")) >= gpus:
        found = f"torch finds {gpus} GPUs, counted from cuda:0" if gpus else f"this run computes on {own.type}"
        raise ConfigError(f"engine.device={name}, but {found}. Leave it out to sample where the learner is")
    return torch.device(name)


def model_dtype(config: RunConfig) -> torch.dtype:
    """The format of sampling and of the learner's matrix products. Master weights are always float32."""
    formats = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    automatic = "bfloat16" if model_device(config).type == "cuda" else "float32"
    return formats[automatic if config.model.dtype == "auto" else config.model.dtype]


def compiles_layers(config: RunConfig) -> bool:
    wanted = config.learner.compile
    return model_device(config).type == "cuda" if wanted is None else wanted
