"""`engine` is a section of several kinds, told apart by `kind`; without one it is the local engine."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from omegaconf import OmegaConf
from pydantic import Field, ValidationError

from agent_r1.config import load_config
from agent_r1.config.errors import explain
from agent_r1.config.load import merge_layers, plain
from agent_r1.config.schema import LocalEngineConfig, Section
from agent_r1.errors import ConfigError


@pytest.mark.parametrize("overrides", [["engine.threads=2"], ["engine.kind=local", "engine.threads=2"]])
def test_the_local_engine_is_the_default_kind(overrides: list[str]) -> None:
    engine = load_config("quickstart", overrides).engine
    assert isinstance(engine, LocalEngineConfig)
    assert (engine.kind, engine.threads) == ("local", 2)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("engine.kind=locl", r"engine\.kind 'locl'.*'local'"),
        ("engine.burts=2", r"engine \(kind local\) has no field 'burts'\. Did you mean 'burst'"),
        ("engine=local", r"engine\.kind=local"),
        ("engine.gpus=[0]", r"engine \(kind local\) has no field 'gpus'"),
    ],
)
def test_unknown_kinds_and_fields_are_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config("quickstart", [override])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([], r"exactly one of engine\.urls .* and engine\.python"),
        (["urls=[http://a:1]", "python=p"], r"exactly one of engine\.urls .* and engine\.python"),
        (["urls=[a:1]"], r"engine\.urls must be addresses .* not 'a:1'"),
        (["urls=[http://a:1,http://a:1]"], r"engine\.urls must be .* given once, not 'http://a:1'"),
        (["python=p", "gpus=[0,1,2]", "tensor_parallel=2"], r"engine\.gpus=\[0, 1, 2\] cannot be divided"),
        (["python=p", "gpus=[0,0]"], r"engine\.gpus=\[0, 0\] cannot be divided"),
        (["python=p", "gpus=[0,1]", "servers=2"], r"engine\.servers is the number of servers on a CPU"),
        (["python=p", "tensor_parallel=2"], r"engine\.gpus=\[\] cannot be divided"),
    ],
)
def test_contradictions_between_settings_of_vllm_are_refused(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config("quickstart", ["engine.kind=vllm", *(f"engine.{setting}" for setting in settings)])


class Remote(Section):
    kind: Literal["remote"]
    url: str


class Root(Section):
    engine: Annotated[LocalEngineConfig | Remote, Field(discriminator="kind")]


def test_a_field_of_another_kind_is_refused_by_name() -> None:
    with pytest.raises(ValidationError) as caught:
        Root.model_validate({"engine": {"kind": "remote", "url": "x", "burst": 2}})
    (message,) = (explain(error, Root) for error in caught.value.errors())
    assert message.startswith("engine (kind remote) has no field 'burst'")


@pytest.mark.parametrize(
    ("below", "above", "merged"),
    [
        ({"burst": 2}, {"kind": "remote", "url": "x"}, {"kind": "remote", "url": "x"}),
        ({"kind": "remote", "url": "x"}, {"kind": "local"}, {"kind": "local"}),
        ({"burst": 2}, {"kind": "local", "threads": 1}, {"kind": "local", "threads": 1, "burst": 2}),
        ({"kind": "remote", "url": "x"}, {"url": "y"}, {"kind": "remote", "url": "y"}),
    ],
)
def test_another_kind_does_not_inherit_settings(
    below: dict[str, Any], above: dict[str, Any], merged: dict[str, Any]
) -> None:
    stages = merge_layers([OmegaConf.create({"engine": below}), OmegaConf.create({"engine": above})])
    assert plain(stages[-1], resolve=True)["engine"] == merged
