"""Arguments that are validated against any JSON schema, as servers send them.

`tools/schema.py` reads the schemas that are written by hand; this one supports everything that `jsonschema` does:
`$ref` and `$defs`, `anyOf`, `oneOf`, `allOf`, limits, patterns and formats. The model is shown the schema unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError
from jsonschema.validators import validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from agent_r1.errors import ConfigError
from agent_r1.tools.schema import MAX_PROBLEMS, MAX_VALUE_CHARS, BadArguments, signature

# With one of these, properties may be allowed that `properties` does not list.
_OPENS = ("additionalProperties", "unevaluatedProperties", "patternProperties", "anyOf", "oneOf", "allOf", "if", "$ref")
_DEFINITIONS = ("$defs", "definitions")
_DATA = ("default", "enum", "const", "examples")
_BY_NAME = ("properties", "patternProperties")


class SchemaArguments:
    """The arguments of a tool with this schema."""

    def __init__(self, tool: str, schema: Mapping[str, Any]) -> None:
        schema = _with_null(schema)
        self.tool = tool
        self.parameters: dict[str, Any] = {"properties": {}, **inlined(tool, schema)}
        self.defaults: dict[str, Any] = {}  # empty: the server fills in its own defaults
        kind = validator_for(schema, default=Draft202012Validator)
        try:
            kind.check_schema(schema)
        except SchemaError as error:
            raise ConfigError(f"tool {tool!r}: its JSON schema is not valid: {error.message}") from error
        # An empty registry: by default, jsonschema would fetch references to other documents from the network.
        self._validator: Any = kind(schema, format_checker=kind.FORMAT_CHECKER, registry=Registry())
        self._closed = not any(keyword in schema for keyword in _OPENS)

    def validate(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments, unchanged. Raises BadArguments."""
        problems: list[str] = []
        if self._closed:  # most servers would ignore a misspelt argument without a word
            problems = [f"unknown argument {key!r}" for key in arguments if key not in self.parameters["properties"]]
        problems += map(_describe, self._validator.iter_errors(dict(arguments)))
        if problems:
            shown = problems[:MAX_PROBLEMS]
            shown += [f"and {len(problems) - MAX_PROBLEMS} more"] if len(problems) > MAX_PROBLEMS else []
            raise BadArguments(f"bad arguments for {signature(self.tool, self.parameters)}: {'; '.join(shown)}")
        return dict(arguments)


def inlined(tool: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema with references replaced, for code that looks into properties. Where a schema contains itself,
    the inner one becomes `{}`, which accepts anything. Raises ConfigError for a reference that leads nowhere."""
    resolver = Registry().with_resource("", DRAFT202012.create_resource(dict(schema))).resolver()

    def replaced(node: Any, inside: tuple[str, ...]) -> Any:
        if isinstance(node, list):
            return [replaced(_as_mapping(item), inside) for item in node]
        if not isinstance(node, Mapping):
            return node
        if not isinstance(reference := node.get("$ref"), str):
            return {key: opened(key, value, inside) for key, value in node.items() if key not in _DEFINITIONS}
        rest = {key: value for key, value in node.items() if key != "$ref"}
        if reference in inside:
            return replaced(rest, inside)
        try:
            target = resolver.lookup(reference).contents
        except Unresolvable as error:
            raise ConfigError(
                f"tool {tool!r}: its JSON schema refers to {reference!r}, which it does not contain. Name the other "
                "tools in `only`"
            ) from error
        found = replaced(target, (*inside, reference))
        return {**(found if isinstance(found, dict) else {}), **replaced(rest, inside)}

    def opened(key: str, value: Any, inside: tuple[str, ...]) -> Any:
        if key in _BY_NAME and isinstance(value, Mapping):
            return {name: replaced(_as_mapping(each), inside) for name, each in value.items()}
        return value if key in _DATA else replaced(_as_mapping(value) if key == "items" else value, inside)

    result: dict[str, Any] = replaced(schema, ("#",))
    return result


def _as_mapping(schema: Any) -> Any:
    """Replace the schema `true`, which accepts anything, and `false`, which accepts nothing, by a mapping."""
    return {True: {}, False: {"not": {}}}[schema] if isinstance(schema, bool) else schema


def _with_null(node: Any) -> Any:
    """Write OpenAPI's `nullable: true`, which JSON Schema does not know, as a type."""
    if isinstance(node, list):
        return [_with_null(item) for item in node]
    if not isinstance(node, Mapping):
        return node
    changed = {key: value if key in _DATA else _with_null(value) for key, value in node.items()}
    if node.get("nullable") is not True:
        return changed
    return {"anyOf": [{key: value for key, value in changed.items() if key != "nullable"}, {"type": "null"}]}


def _describe(error: ValidationError) -> str:
    """Describe one problem for the model, after the path of the argument."""
    where = ".".join(str(part) for part in error.absolute_path)
    prefix = f"{where!r}: " if where else ""
    if error.validator in ("anyOf", "oneOf") and error.context:
        # The option that fits best is the one whose problem lies deepest.
        nearest = max(error.context, key=lambda inner: len(inner.absolute_path))
        return f"{prefix}fits none of the options. Closest: {_describe(nearest)}"
    limit = 2 * MAX_VALUE_CHARS
    return prefix + (error.message if len(error.message) <= limit else f"...{error.message[-limit:]}")
