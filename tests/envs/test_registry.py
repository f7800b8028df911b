"""Names of envs, flows and tools."""

from __future__ import annotations

from typing import Any

import pytest

from agent_r1.errors import ConfigError
from agent_r1.flows.flow import AgentFlowBase, SingleStepFlow, flow_class
from agent_r1.registry import Registry
from agent_r1.tools.base import BaseTool, tool


class Dig(BaseTool):
    name, description, parameters = "dig", "Dig.", {"type": "object", "properties": {}}

    async def execute(self, args: dict[str, Any], **context: Any) -> str:
        return "a hole"


def spade() -> BaseTool:
    @tool
    def dig() -> str:
        """Dig."""
        return "a hole"

    return dig


def test_the_same_thing_may_be_registered_again() -> None:
    names: Registry[Any] = Registry("tool")
    names.add("dig", Dig)
    made = Dig()
    names.add("dig", made)
    assert names["dig"] is made
    names.add("spade", spade())
    again = spade()  # as a module that is imported twice defines it
    names.add("spade", again)
    assert names["spade"] is again


@pytest.mark.parametrize("other", [spade(), SingleStepFlow, object()])
def test_a_taken_name_is_refused(other: object) -> None:
    names: Registry[Any] = Registry("tool")
    names.add("dig", Dig)
    with pytest.raises(ConfigError, match=rf"^tool name 'dig' is taken by {__name__}\.Dig$"):
        names.add("dig", other)
    assert names["dig"] is Dig


def test_a_flow_is_found_by_each_of_its_names() -> None:
    assert flow_class("single_step") is flow_class("single_step_agent") is SingleStepFlow
    with pytest.raises(ConfigError, match=r"unknown flow 'singel_step'\. Did you mean 'single_step'\?"):
        flow_class("singel_step")

    class Other(SingleStepFlow):
        pass

    with pytest.raises(ConfigError, match=r"flow name 'single_step' is taken by .*\.SingleStepFlow"):
        AgentFlowBase.register("single_step")(Other)
