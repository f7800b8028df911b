"""Loaded by every process of verl, through the entry point `verl.plugins` or VERL_USE_EXTERNAL_MODULES. Only registers
names.

Two things of verl have no setting, so they are replaced here: the value head of a critic starts at zero as ours does,
and a critic uses the attention of the policy. `contract.py` checks that both still look as expected.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from verl.utils import model as verl_models
from verl.workers.rollout import base
from verl.workers.rollout.replica import RolloutReplicaRegistry

from agent_r1.backends.verl.settings import CPU_ENGINE, SETTINGS
from agent_r1.build.resolve import make_importable

if os.environ.get("VERL_PLATFORM") == "cpu":
    from agent_r1.backends.verl.inside import cpu

    cpu.prepare()


if SETTINGS in os.environ:  # losses of a recipe's own algorithms arrive here by name
    make_importable(json.loads(Path(os.environ[SETTINGS]).read_text(encoding="utf-8"))["recipe"])


def _replica() -> Any:
    from agent_r1.backends.verl.inside.server import Replica

    return Replica


def _load_critic(local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> Any:
    """Replaces verl's `load_valuehead_model`, which hard-codes FlashAttention and a random head."""
    from torch import nn
    from transformers import AutoModelForTokenClassification

    network = AutoModelForTokenClassification.from_pretrained(
        local_path, dtype=torch_dtype, config=model_config, trust_remote_code=trust_remote_code
    )
    for parameter in network.score.parameters():
        nn.init.zeros_(parameter)  # start with V = 0 everywhere, not with noise
    return network


RolloutReplicaRegistry.register(CPU_ENGINE, _replica)
# verl has no function to add a name here.
base._ROLLOUT_REGISTRY[(CPU_ENGINE, "async")] = "agent_r1.backends.verl.inside.server.Adapter"
verl_models.load_valuehead_model = _load_critic
