"""The settings that docs/configuration.md lists are those of the config, with their defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import yaml

from agent_r1.config.schema import (
    DEFAULT_ENGINE,
    AlgorithmConfig,
    AppendContext,
    ContextConfig,
    CorrectionConfig,
    CriticConfig,
    DataConfig,
    EngineConfig,
    EvalConfig,
    GatewayConfig,
    LearnerConfig,
    LoRAConfig,
    ModelConfig,
    RewardsConfig,
    RolloutConfig,
    Section,
    SFTConfig,
    TaskConfig,
    TrainerConfig,
    VerlConfig,
    WorkersConfig,
)

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
SECTIONS: dict[str, type[Section]] = {
    "task": TaskConfig,
    "task.workers": WorkersConfig,
    "data": DataConfig,
    "algorithm": AlgorithmConfig,
    "rewards": RewardsConfig,
    "critic": CriticConfig,
    "correction": CorrectionConfig,
    "sft": SFTConfig,
    "rollout": RolloutConfig,
    "eval": EvalConfig,
    "model": ModelConfig,
    "learner": LearnerConfig,
    "lora": LoRAConfig,
    "trainer": TrainerConfig,
    "gateway": GatewayConfig,
    "verl": VerlConfig,
}


def _as_written(default: Any) -> Any:
    return list(default) if isinstance(default, tuple) else default  # YAML has no tuples


def test_every_setting_of_these_sections_is_listed_with_its_default() -> None:
    shown: dict[str, Any] = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        name, _, rest = line.removeprefix("| `").partition("` | ")
        if line.startswith("| `") and name.split(".")[0] in (*SECTIONS, "context", "engine"):
            default = rest.split(" | ")[0]
            shown[name] = "required" if default == "(required)" else yaml.safe_load(default.strip("`"))
    actual = {
        f"{name}.{key}": "required" if field.is_required() else _as_written(field.default)
        for name, section in SECTIONS.items()
        for key, field in section.model_fields.items()
    }
    for name, kinds, choice in (("context", ContextConfig, "policy"), ("engine", EngineConfig, "kind")):
        for section in get_args(get_args(kinds)[0]):
            for key, field in section.model_fields.items():
                default = "required" if field.is_required() else field.default
                # a key that two kinds have means the same and has the same default
                assert actual.setdefault(f"{name}.{key}", default) == default or key == choice
    actual |= {"context.policy": AppendContext().policy, "engine.kind": DEFAULT_ENGINE}
    assert shown == actual
