"""Arguments validated against the JSON schemas that servers send."""

from __future__ import annotations

from typing import Any

import pytest

from agent_r1.errors import ConfigError
from agent_r1.tokens.formats.table import FORMATS
from agent_r1.tools.schema import BadArguments
from agent_r1.types import Observation
from tests.tokens.small_tokenizers import renderer_of

pytest.importorskip("jsonschema", reason="pip install 'agent-r1[mcp]'")

from agent_r1.tools.mcp.json_schema import arguments_from_server

ORDER: dict[str, Any] = {
    "type": "object",
    "$defs": {
        "Item": {
            "type": "object",
            "properties": {"name": {"type": "string", "minLength": 1}, "count": {"type": "integer", "minimum": 1}},
            "required": ["name"],
            "additionalProperties": False,
        },
        "Tree": {"type": "object", "properties": {"children": {"type": "array", "items": {"$ref": "#/$defs/Tree"}}}},
    },
    "properties": {
        "items": {"type": "array", "items": {"$ref": "#/$defs/Item"}, "minItems": 1, "maxItems": 2},
        "note": {"type": ["string", "null"], "default": None},
        "speed": {"enum": ["slow", "fast"]},
        "kind": {"const": "order"},
        "price": {"anyOf": [{"type": "number", "exclusiveMinimum": 0, "multipleOf": 0.5}, {"type": "null"}]},
        "to": {
            "oneOf": [
                {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
                {"type": "object", "properties": {"depot": {"type": "integer"}}, "required": ["depot"]},
            ]
        },
        "code": {"allOf": [{"type": "string"}, {"pattern": "^[A-Z]{2}$"}, {"maxLength": 2}]},
        "day": {"type": "string", "format": "date"},
        "tags": {"type": "object", "additionalProperties": {"type": "string"}},
        "pair": {"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}], "items": False},
        "tree": {"$ref": "#/$defs/Tree"},
        "gift": {"type": "boolean", "nullable": True},
        "extra": True,
    },
    "required": ["items"],
}
ITEMS = {"items": [{"name": "tea"}]}


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"note": None},
        {"note": "soon"},
        {"speed": "fast", "kind": "order"},
        {"price": 2.5},
        {"price": None},
        {"to": {"city": "Bath"}},
        {"code": "AB"},
        {"day": "2026-02-28"},
        {"tags": {"a": "b"}},
        {"pair": ["a", 1]},
        {"tree": {"children": [{"children": []}]}},
        {"gift": None, "extra": [1, "two"]},
    ],
)
def test_what_fits_the_schema_is_sent_unchanged(arguments: dict[str, Any]) -> None:
    assert arguments_from_server("order", ORDER).validate({**ITEMS, **arguments}) == {**ITEMS, **arguments}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"items": []}, "'items'"),
        ({"items": [{"count": 1}]}, "'name'"),
        ({"items": [{"name": "tea", "count": 0}]}, "'items.0.count'"),
        ({"items": [{"name": "tea", "size": 1}]}, "'size'"),
        ({"items": [{"name": "a"}, {"name": "b"}, {"name": "c"}]}, "'items'"),
        ({"note": 3}, "'note'"),
        ({"speed": "quick"}, "'speed'"),
        ({"kind": "offer"}, "'kind'"),
        ({"price": 0}, "'price'"),
        ({"price": 0.3}, "'price'"),
        ({"to": {"city": 5}}, "'to.city'"),
        ({"to": {"city": "Bath", "depot": 1}}, "'to'"),
        ({"code": "abc"}, "'code'"),
        ({"day": "2026-02-30"}, "'day'"),
        ({"tags": {"a": 1}}, "'tags.a'"),
        ({"pair": ["a", 1, 2]}, "'pair'"),
        ({"tree": {"children": [{"children": 1}]}}, "'tree.children.0.children'"),
        ({"gift": "yes"}, "'gift'"),
        ({"sped": "fast"}, "'sped'"),
    ],
)
def test_what_does_not_fit_is_named_by_its_path(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(BadArguments) as error:
        arguments_from_server("order", ORDER).validate({**ITEMS, **arguments})
    assert named in str(error.value).partition("): ")[2]


def test_a_schema_that_allows_other_arguments_takes_them() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "integer"}}
    assert arguments_from_server("open", schema).validate({"a": 1, "b": 2}) == {"a": 1, "b": 2}
    with pytest.raises(BadArguments, match="'b'"):
        arguments_from_server("open", schema).validate({"b": "x"})


def test_the_signature_in_messages_shows_what_references_mean() -> None:
    with pytest.raises(BadArguments) as error:
        arguments_from_server("order", ORDER).validate({})
    assert "items: list[{name: string, count: integer}]" in str(error.value)


def test_formats_without_json_types_convert_arguments_behind_references() -> None:
    schema = {
        "type": "object",
        "$defs": {"Count": {"type": "integer"}, "Where": {"type": "object", "properties": {"x": {"type": "number"}}}},
        "properties": {"count": {"$ref": "#/$defs/Count"}, "where": {"$ref": "#/$defs/Where"}},
    }
    arguments = arguments_from_server("move", schema)
    converted = FORMATS["qwen3_coder"].convert_arguments({"count": "3", "where": '{"x": 1}'}, arguments.parameters)
    assert arguments.validate(converted) == {"count": 3, "where": {"x": 1}}


@pytest.mark.parametrize(("definition", "shown"), [({"type": "string"}, {"type": "string"}), (True, {})])
def test_references_are_decoded_and_may_lead_to_true(definition: Any, shown: Any) -> None:
    part = {"anyOf": [{"$ref": "#/$defs/Part%3CX%3E"}, True]}
    schema = {"type": "object", "properties": {"part": part}, "$defs": {"Part<X>": definition}}
    assert arguments_from_server("parts", schema).parameters["properties"]["part"] == {"anyOf": [shown, {}]}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/Missing"}}},
        {"type": "object", "properties": {"a": {"$ref": "https://example.com/schema.json"}}},
        {"type": "object", "properties": {"a": {"type": "integr"}}},
        {"type": "object", "properties": []},
    ],
)
def test_a_schema_that_cannot_be_used_is_an_error_before_the_run(schema: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="'broken'"):
        arguments_from_server("broken", schema)


@pytest.mark.parametrize("family", ["qwen2_5", "qwen3", "llama3", "harmony"])
def test_chat_templates_show_the_schema_as_it_is(family: str) -> None:
    tool = {"type": "function", "function": {"name": "order", "description": "Order.", "parameters": ORDER}}
    renderer = renderer_of(family)
    ids = renderer.render(Observation(messages=[{"role": "user", "content": "Tea."}]), [tool])
    shown = renderer.decode(ids)
    assert all(name in shown for name in ORDER["properties"])
