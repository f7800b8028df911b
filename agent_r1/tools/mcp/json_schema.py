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

from agent_r1.errors import ConfigError
from agent_r1.tools.schema import MAX_VALUE_CHARS, Arguments, inlined

# With one of these, properties may be allowed that `properties` does not list.
_OPENS = ("additionalProperties", "unevaluatedProperties", "patternProperties", "anyOf", "oneOf", "allOf", "if", "$ref")
_DATA = ("default", "enum", "const", "examples")


def arguments_from_server(tool: str, schema: Mapping[str, Any]) -> Arguments:
    """The arguments of a tool with this schema. They are sent unchanged: the server fills in its own defaults."""
    schema = _with_null(schema)
    kind = validator_for(schema, default=Draft202012Validator)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        raise ConfigError(f"tool {tool!r}: its JSON schema is not valid: {error.message}") from error
    parameters = {"properties": {}, **inlined(tool, schema)}
    # An empty registry: by default, jsonschema would fetch references to other documents from the network.
    validator: Any = kind(schema, format_checker=kind.FORMAT_CHECKER, registry=Registry())

    def check(arguments: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        return arguments, list(map(_describe, validator.iter_errors(arguments)))

    # Most servers would ignore a misspelt argument without a word, so unknown ones are refused if nothing allows them.
    is_open = any(keyword in schema for keyword in _OPENS)
    return Arguments(tool=tool, parameters=parameters, check=check, is_open=is_open)


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
