"""Tools: schema from signature, arguments checked, timeouts kept, calls batched."""

from __future__ import annotations

import asyncio
import json
import math
import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal, Optional

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from agent_r1.errors import ConfigError
from agent_r1.tools.base import (
    BaseTool,
    BatchTool,
    FromRow,
    ToolCall,
    ToolError,
    get_tool,
    tool,
)
from agent_r1.tools.runner import ToolOutcome, run_tool
from agent_r1.tools.schema import signature


class Place(BaseModel):
    """A docstring that is not for the model."""

    title: str
    nearby: list[Place2] = []


class Place2(BaseModel):
    title: str = Field(description="its name")


class Tree(BaseModel):
    children: list[Tree] = []


Place.model_rebuild()


@tool
def weather(city: str, unit: Literal["c", "f"] = "c", days: Annotated[int, Field(ge=1)] = 1) -> str:
    """Tell the weather
    of a city."""
    return f"{city} {unit} {days}"


@tool
async def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


@tool
def visit(places: list[Place], note: Optional[str] = None) -> str:  # noqa: UP045 (the older spelling must work, too)
    """Visit places."""
    return f"{[place.title for place in places]} {note}"


@tool
def look_up(key: str, table: FromRow[dict[str, str]], fallback: FromRow[str] = "none") -> str:
    """Look up a key in the row's table."""
    return table.get(key, fallback)


class Echo(BaseTool):
    name = "echo"
    description = "Echo."
    parameters = {  # noqa: RUF012 (the seeds' spelling)
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "times": {"type": "integer", "default": 1},
            "options": {"type": "object", "properties": {"loud": {"type": "boolean"}}, "required": ["loud"]},
            "mode": {"enum": ["a", "b", None]},
            "numbers": {"type": "array", "items": {"type": ["number", "null"]}},
        },
        "required": ["text"],
    }

    async def execute(self, args: dict[str, Any], **context: Any) -> str:
        return json.dumps([args, context], sort_keys=True)


def run(one: BaseTool, arguments: dict[str, Any], context: dict[str, Any] | None = None) -> ToolOutcome:
    return asyncio.run(run_tool(one, arguments, context or {}))


def test_a_signature_becomes_an_openai_schema() -> None:
    assert weather.schema == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tell the weather\nof a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "unit": {"type": "string", "enum": ["c", "f"], "default": "c"},
                    "days": {"type": "integer", "minimum": 1, "default": 1},
                },
                "required": ["city"],
            },
        },
    }
    assert weather("Bern", unit="f") == "Bern f 1"  # the object is still the function


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
    assert run(forecast, {"city": "Ulm"}).text == "Ulm 1 c"
    assert run(forecast, {"city": "Ulm", "days": 0}).refused


def test_nested_models_are_inlined_and_a_property_named_title_survives() -> None:
    nearby = {"type": "object", "properties": {"title": {"type": "string", "description": "its name"}}}
    nearby["required"] = ["title"]
    properties = visit.parameters["properties"]
    assert "$" not in json.dumps(visit.parameters)
    assert properties["places"]["items"]["properties"] == {
        "title": {"type": "string"},
        "nearby": {"type": "array", "items": nearby, "default": []},
    }
    assert properties["note"] == {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}
    assert run(visit, {"places": [{"title": "Rome"}]}).text == "['Rome'] None"


def test_a_model_that_contains_itself_is_shown_once() -> None:
    @tool
    def count(tree: Tree) -> int:
        """Count the trees."""
        return 1 + len(tree.children)

    shown = count.parameters["properties"]["tree"]["properties"]["children"]
    assert shown["items"] == {}
    assert run(count, {"tree": {"children": [{"children": []}]}}).text == "2"
    assert run(count, {"tree": {"children": [{"children": 3}]}}).refused


def test_parameters_may_have_names_that_pydantic_reserves() -> None:
    @tool
    def odd(json: str, model_config: int, _id: int, copy: bool = False) -> str:
        """Take odd names."""
        return f"{json} {model_config} {_id} {copy}"

    assert list(odd.parameters["properties"]) == ["json", "model_config", "_id", "copy"]
    assert run(odd, {"json": "x", "model_config": 1, "_id": 2}).text == "x 1 2 False"


def test_a_tool_that_cannot_be_shown_is_refused_with_the_reason() -> None:
    def undocumented(a: int) -> str:
        return ""

    def untyped(a) -> str:  # type: ignore[no-untyped-def]
        """Do."""
        return ""

    def variadic(*words: str) -> str:
        """Do."""
        return ""

    def schemaless(lock: threading.Thread) -> str:
        """Do."""
        return ""

    def field_as_default(a: int = Field(1, ge=0)) -> str:
        """Do."""
        return ""

    cases: list[tuple[Callable[..., Any], str]] = [
        (field_as_default, "'field_as_default'.*a: Annotated"),
        (undocumented, "'undocumented'.*docstring"),
        (untyped, "'untyped'.*'a'"),
        (variadic, r"'variadic'.*\*words"),
        (schemaless, "'schemaless'.*JSON schema"),
    ]
    for function, message in cases:
        with pytest.raises(ConfigError, match=message):
            tool(function)
    with pytest.raises(ConfigError, match="max_batch"):
        tool(max_batch=2)(undocumented)
    with pytest.raises(ConfigError, match=r"'schemaless'.*batch=True"):
        tool(batch=True)(schemaless)


def test_bad_arguments_are_answered_with_field_problem_and_signature() -> None:
    outcome = run(weather, {"unit": "k", "dais": 2, "days": 0})
    assert outcome.refused
    assert outcome.error == outcome.text
    assert outcome.text == (
        'bad arguments for weather(city: string, unit: "c" | "f" = "c", days: integer = 1): unknown argument \'dais\'; '
        "'city' is missing; 'unit': input should be 'c' or 'f', got 'k'; "
        "'days': input should be greater than or equal to 1, got 0"
    )
    assert "'places.0.title': input should be a valid string, got 5" in run(visit, {"places": [{"title": 5}]}).text
    assert run(add, {"a": "2", "b": 3}).text == "5"  # models quote numbers; that much is forgiven


def test_long_values_and_many_problems_are_shortened() -> None:
    text = run(add, {f"x{i}": 0 for i in range(9)} | {"a": "z" * 9_999, "b": 1}).text
    assert len(text) < 400
    assert "and 5 more" in text  # 9 unknown + 1 invalid = 10, of which 5 are shown


def test_a_hand_written_schema_is_checked_like_a_signature() -> None:
    args, _ = json.loads(run(Echo(), {"text": "hi", "options": {"loud": True}, "numbers": [1.5, None]}).text)
    assert args == {"text": "hi", "times": 1, "options": {"loud": True}, "numbers": [1.5, None]}
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "'text' is missing"),
        ({"text": "a", "txt": 1}, "unknown argument 'txt'"),
        ({"text": "a", "mode": "c"}, "'mode': input should be 'a', 'b' or None, got 'c'"),
        ({"text": "a", "options": {}}, "'options.loud' is missing"),
        ({"text": "a", "numbers": ["x"]}, "'numbers.0"),
    ]
    for wrong, said in cases:
        outcome = run(Echo(), wrong)
        assert outcome.refused
        assert said in outcome.text
    assert signature("echo", Echo.parameters) == (
        'echo(text: string, times: integer = 1, options?: {loud: boolean}, mode?: "a" | "b" | null, '
        "numbers?: list[number | null])"
    )


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"type": "array"}, "'array'"),
        ({"type": "object", "properties": {"a": {"type": "strin"}}}, "'strin'.*'string'"),
        ({"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}}, r"#/\$defs/A"),
        ({"type": "object", "properties": {}, "required": ["a"]}, "'a'"),
    ],
)
def test_a_wrong_hand_written_schema_is_a_config_error(parameters: dict[str, Any], message: str) -> None:
    wrong = Echo()
    wrong.parameters = parameters
    with pytest.raises(ConfigError, match=message):
        get_tool(wrong)


def test_the_model_neither_sees_nor_sets_values_from_the_row() -> None:
    assert list(look_up.parameters["properties"]) == ["key"]
    assert run(look_up, {"key": "a"}, {"table": {"a": "1"}, "other": 0}).text == "1"
    assert run(look_up, {"key": "b"}, {"table": {}, "fallback": "?"}).text == "?"
    forged = run(look_up, {"key": "a", "table": {"a": "mine"}}, {"table": {"a": "1"}})
    assert forged.refused
    assert "unknown argument 'table'" in forged.text
    with pytest.raises(ConfigError, match=r"tool 'look_up' needs 'table' from the row, which has \['tabel'\]"):
        run(look_up, {"key": "a"}, {"tabel": {}})


def test_execute_takes_the_whole_context_or_named_values() -> None:
    class Named(Echo):
        async def execute(self, args: dict[str, Any], *, seed: int) -> str:  # type: ignore[override]
            return str(seed)

    assert json.loads(run(Echo(), {"text": "x"}, {"a": 1}).text)[1] == {"a": 1}
    assert run(Named(), {"text": "x"}, {"seed": 3, "a": 1}).text == "3"
    with pytest.raises(ConfigError, match="tool 'echo' needs 'seed'"):
        run(Named(), {"text": "x"})


def test_a_call_alone_is_a_batch_of_one() -> None:
    class Halves(BatchTool):
        name = "half"
        description = "Half of an even number."
        parameters = Echo.parameters

        async def batch_execute(self, calls: list[ToolCall]) -> list[str | BaseException]:
            return [ToolError(f"odd, says {call.context}") if call.args["n"] % 2 else "even" for call in calls]

    assert asyncio.run(Halves().execute({"n": 2})) == "even"
    with pytest.raises(ToolError, match=r"odd, says \{'who': 'Ada'\}"):
        asyncio.run(Halves().execute({"n": 3}, who="Ada"))
    with pytest.raises(TypeError, match="abstract"):
        BatchTool()  # type: ignore[abstract]


def test_tools_are_registered_by_name_and_checked() -> None:
    @BaseTool.register
    class Registered(Echo):
        name = "registered_echo"

    @BaseTool.register
    @tool(name="registered_add")
    def plus(a: int, b: int) -> int:
        """Add."""
        return a + b

    assert get_tool("registered_add") is plus
    assert isinstance(get_tool("registered_echo"), Registered)
    assert get_tool("registered_echo") is get_tool("registered_echo")  # shared by all episodes
    with pytest.raises(ConfigError, match=r"'registerd_add'.*'registered_add'"):
        get_tool("registerd_add")
    with pytest.raises(ConfigError, match="Decorate a function with @tool"):
        get_tool(len)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("problem", "values"),
    [
        ("timeout must be positive seconds", [0, math.nan, "5", None]),
        ("max_batch must be an integer of at least 1", [0, 2.5]),
        ("max_wait must be seconds, 0 or more", [-1, math.nan, "1"]),
        ("description", [""]),
    ],
)
def test_a_tool_with_a_wrong_attribute_is_refused(problem: str, values: list[Any]) -> None:
    for value in values:
        wrong = Echo()
        setattr(wrong, problem.split()[0], value)
        with pytest.raises(ConfigError, match=problem):
            get_tool(wrong)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3)))
def test_any_arguments_are_answered_with_text(value: Any) -> None:
    outcome = run(visit, {"places": value, "note": value})
    assert isinstance(outcome.text, str)


class Inner(BaseModel):
    secret: FromRow[str] = ""


@pytest.mark.parametrize("annotation", [FromRow[str] | None, list[FromRow[str]], list[Inner]])
def test_from_row_inside_another_type_is_refused(annotation: Any) -> None:
    def peek(key: str, secret: Any = None) -> str:
        """Look."""
        return f"{key} {secret}"

    peek.__annotations__["secret"] = annotation
    with pytest.raises(ConfigError, match=r"'peek'.*FromRow"):
        tool(peek)

    def peek_all(calls: list[Inner]) -> list[str]:
        """Look."""
        return [call.secret for call in calls]

    with pytest.raises(ConfigError, match=r"'peek_all'.*FromRow"):
        tool(batch=True)(peek_all)


@pytest.mark.parametrize("said", ["nan", "-Infinity"])
def test_texts_such_as_nan_are_not_numbers(said: str) -> None:
    @tool
    def half(numbers: list[float]) -> float:
        """Half of the first number."""
        return numbers[0] / 2

    outcome = run(half, {"numbers": [said]})
    assert outcome.refused
    assert f"'numbers.0': input should be a finite number, got {said!r}" in outcome.text
    assert run(half, {"numbers": ["3"]}).text == "1.5"


def test_only_a_function_can_be_made_a_tool() -> None:
    class Callable_:
        """Not written for the model."""

        def __call__(self, number: int) -> str:
            return str(number)

    for thing in (partial(max, 1), Callable_(), Callable_):
        with pytest.raises(ConfigError, match="@tool takes a function"):
            tool(name="named")(thing)


@pytest.mark.parametrize(
    ("sent", "taken"),
    [(250, 250), (250.0, 250.0), (2.5, 2.5), (-(10**30), -(10**30)), ("250", 250.0), ("2.5", 2.5)],
)
def test_integers_stay_integers_in_a_hand_written_schema(sent: Any, taken: float) -> None:
    class Pay(BaseTool):
        name = "pay"
        description = "Pay."
        parameters: dict[str, Any] = {  # noqa: RUF012
            "type": "object",
            "properties": {
                "amount": {"type": "number"},
                "parts": {"type": "array", "items": {"type": ["number", "null"]}},
            },
        }

        async def execute(self, args: dict[str, Any], **context: Any) -> str:
            return repr(args)

    with warnings.catch_warnings(action="error"):
        text = run(Pay(), {"amount": sent, "parts": [sent, None]}).text
    assert text == repr({"amount": taken, "parts": [taken, None]})
    assert "'amount': input should be a valid number" in run(Pay(), {"amount": "many"}).text
    assert run(Pay(), {"amount": "nan"}).refused


def test_tool_refuses_methods_without_an_object() -> None:
    with pytest.raises(ConfigError, match=r"Bank.deposit is a method"):

        class Bank:
            @tool
            def deposit(self, amount: int) -> str:
                """Put money on the account."""
                return str(amount)

    class Till:
        def count(self) -> str:
            """Count the money."""
            return type(self).__name__

        @staticmethod
        @tool
        def close(reason: str) -> str:
            """Close the till."""
            return reason

    assert run(tool(Till().count), {}).text == "Till"
    assert run(Till.close, {"reason": "late"}).text == "late"
