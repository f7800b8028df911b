"""What the model reads about the parameters of a tool."""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

from pydantic import Field

from agent_r1.tools.base import tool
from agent_r1.tools.runner import run_tool


def test_annotated_texts_and_fields_describe_parameters() -> None:
    @tool
    def forecast(
        city: Annotated[str, "Name of the city"],
        days: Annotated[int, Field(ge=1), "How many days"] = 1,
        unit: Annotated[Literal["c", "f"], Field(description="Scale")] = "c",
    ) -> str:
        """Forecast the weather."""
        return f"{city} {days} {unit}"

    properties = forecast.schema["function"]["parameters"]["properties"]
    assert {name: each["description"] for name, each in properties.items()} == {
        "city": "Name of the city",
        "days": "How many days",
        "unit": "Scale",
    }
    assert properties["days"]["minimum"] == 1
    assert asyncio.run(run_tool(forecast, {"city": "Ulm"}, {})).text == "Ulm 1 c"
    assert asyncio.run(run_tool(forecast, {"city": "Ulm", "days": 0}, {})).refused
