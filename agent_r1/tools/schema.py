"""The arguments of a tool: the JSON schema that the model reads, and the validation of what it sends.

Function signatures and hand-written JSON schemas both become a pydantic `TypeAdapter`, so they refuse the same mistakes
in the same words. Keywords that narrow a hand-written schema further (`minimum`, `pattern`) are shown to the model but
not checked; that is up to the tool.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal, NotRequired, TypeVar, Union, get_args, get_origin, get_type_hints
from urllib.parse import unquote

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic.errors import PydanticUserError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticSerializationError, to_jsonable_python
from typing_extensions import TypedDict

from agent_r1.errors import ConfigError, did_you_mean

MAX_PROBLEMS = 5  # a model corrects a few mistakes at a time; more lines only cost it context
MAX_VALUE_CHARS = 80  # how much of a wrong value the model is shown

T = TypeVar("T")


class _RowMarker:
    """Marks a parameter that the row fills in."""

    def __get_pydantic_json_schema__(self, *_: Any) -> Any:
        # Only called for a FromRow inside another type, because parameters that are one as a whole have no schema.
        raise PydanticUserError(
            "FromRow must be the whole annotation of a parameter, as in FromRow[str | None]. With batch=True, nothing "
            "comes from the row: use a BatchTool",
            code=None,
        )


FROM_ROW = _RowMarker()
# `table: FromRow[list[dict]]`: hidden from the model, filled from the row's `tools_kwargs`.
FromRow = Annotated[T, FROM_ROW]


class BadArguments(Exception):
    """The arguments do not fit the tool. The text is for the model that sent them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowKeys:
    """Which `tools_kwargs` a tool takes."""

    required: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()
    takes_all: bool = False  # the tool has a `**context`

    @staticmethod
    def of(parameters: Iterable[inspect.Parameter]) -> RowKeys:
        named = [p for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
        return RowKeys(
            required=frozenset(p.name for p in named if p.default is p.empty),
            optional=frozenset(p.name for p in named if p.default is not p.empty),
            takes_all=any(p.kind is p.VAR_KEYWORD for p in parameters),
        )

    def takes(self, key: str) -> bool:
        return self.takes_all or key in self.required or key in self.optional

    def select(self, tool: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values for this tool. ConfigError if the row lacks a required one."""
        for key in sorted(self.required - given.keys()):
            raise ConfigError(
                f"tool {tool!r} needs {key!r} from the row, which has {sorted(given) or 'nothing'}. "
                f"Put it in the row's env_kwargs: {{'tools_kwargs': {{{tool!r}: {{{key!r}: ...}}}}}}"
            )
        return {key: value for key, value in given.items() if self.takes(key)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The arguments of one tool."""

    tool: str
    parameters: dict[str, Any]  # JSON schema without references, as chat templates show it
    check: Callable[[dict[str, Any]], tuple[Any, list[str]]]  # returns what is valid, and the problems
    defaults: Mapping[str, Any] = field(default_factory=dict)
    is_open: bool = False  # other arguments than `parameters` lists may be allowed, so that `check` has to know

    def validate(self, arguments: Mapping[str, Any]) -> Any:
        """The validated arguments with defaults filled in. Raises BadArguments."""
        unknown = [] if self.is_open else [key for key in arguments if key not in self.parameters["properties"]]
        valid, wrong = self.check({key: value for key, value in arguments.items() if key not in unknown})
        problems = [f"unknown argument {key!r}" for key in unknown] + wrong
        if problems:
            more = [f"and {len(problems) - MAX_PROBLEMS} more"] if len(problems) > MAX_PROBLEMS else []
            shown = "; ".join(problems[:MAX_PROBLEMS] + more)
            raise BadArguments(f"bad arguments for {signature(self.tool, self.parameters)}: {shown}")
        return {**deepcopy(dict(self.defaults)), **valid} if self.defaults and isinstance(valid, dict) else valid


def _check_with(adapter: TypeAdapter[Any], arguments: dict[str, Any]) -> tuple[Any, list[str]]:
    try:
        return adapter.validate_python(arguments), []
    except ValidationError as error:
        return None, [_describe_problem(dict(detail)) for detail in error.errors(include_url=False)]


def arguments_from_signature(tool: str, function: Callable[..., Any]) -> tuple[Arguments, RowKeys]:
    """Separate the arguments that the model sends from those that the row fills in, by the function's annotations."""
    try:
        hints = get_type_hints(function, include_extras=True)
    except NameError as error:
        raise ConfigError(f"tool {tool!r}: an annotation is unknown: {error}. Define it at module level") from error
    fields: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    from_row: list[inspect.Parameter] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(f"tool {tool!r}: the model sends arguments by name, so {parameter} is not possible")
        if parameter.name not in hints:
            raise ConfigError(f"tool {tool!r}: parameter {parameter.name!r} has no type annotation")
        annotation = hints[parameter.name]
        if get_origin(annotation) is Annotated and FROM_ROW in get_args(annotation)[1:]:
            from_row.append(parameter)
            continue
        if isinstance(parameter.default, FieldInfo):
            raise ConfigError(
                f"tool {tool!r}: a Field belongs in the annotation, not in the default. Write "
                f"{parameter.name}: Annotated[..., Field(...)]"
            )
        fields[parameter.name] = _with_description(annotation)
        if parameter.default is not parameter.empty:
            defaults[parameter.name] = parameter.default
    typed_dict = _typed_dict(tool, fields, fields.keys() - defaults.keys(), extra="ignore")
    return _arguments(tool, typed_dict, defaults), RowKeys.of(from_row)


def _with_description(annotation: Any) -> Any:
    """`Annotated[int, "how many"]` as `Annotated[int, Field(description="how many")]`; pydantic ignores a bare text."""
    if get_origin(annotation) is not Annotated:
        return annotation
    kind, *marks = get_args(annotation)
    return Annotated[(kind, *(Field(description=mark) if isinstance(mark, str) else mark for mark in marks))]


def arguments_from_model(tool: str, model: type[BaseModel]) -> Arguments:
    """The fields of a pydantic model are the arguments; `validate` returns an instance."""
    return _arguments(tool, model, {})


def arguments_from_schema(tool: str, parameters: Mapping[str, Any]) -> Arguments:
    """The arguments of a schema written by hand, or received from a server."""
    if parameters.get("type") != "object" or not isinstance(parameters.get("properties", {}), Mapping):
        raise ConfigError(
            f"tool {tool!r}: parameters must be a JSON schema of type 'object' with 'properties', got {parameters!r}"
        )
    complete = {"properties": {}, **parameters}
    properties = complete["properties"]
    unknown = sorted(set(complete.get("required", ())) - set(properties))
    if unknown:
        raise ConfigError(f"tool {tool!r}: parameters require {unknown[0]!r}, which is not among its properties")
    defaults = {name: schema["default"] for name, schema in properties.items() if "default" in schema}
    check = partial(_check_with, TypeAdapter(_type_of_object(tool, complete)))
    return Arguments(tool=tool, check=check, parameters=complete, defaults=defaults)


def signature(tool: str, parameters: Mapping[str, Any]) -> str:
    """How the tool is called, in one line: `weather(city: string, unit: "c" | "f" = "c")`."""
    required = parameters.get("required", ())
    parts = []
    for name, schema in parameters.get("properties", {}).items():
        default = f" = {json.dumps(schema['default'], ensure_ascii=False)}" if "default" in schema else ""
        optional = "?" if name not in required and not default else ""
        parts.append(f"{name}{optional}: {_type_text(schema)}{default}")
    return f"{tool}({', '.join(parts)})"


def allows_text(schema: Mapping[str, Any]) -> bool:
    """Whether a plain string may be a value of this schema; formats without JSON types need to know."""
    if options := _options(schema):
        return any(map(allows_text, options))
    if (choices := _choices(schema)) is not None:
        return any(isinstance(value, str) for value in choices)
    kind = schema.get("type", "string")
    return "string" in ([kind] if isinstance(kind, str) else kind)


def _options(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [*schema.get("anyOf", ()), *schema.get("oneOf", ())]


def _choices(schema: Mapping[str, Any]) -> list[Any] | None:
    choices: list[Any] | None = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return choices


def _describe_problem(detail: dict[str, Any]) -> str:
    where = ".".join(str(part) for part in detail["loc"]) or "the arguments"
    if detail["type"] == "missing":
        return f"{where!r} is missing"
    value = repr(detail["input"])
    value = value if len(value) <= MAX_VALUE_CHARS else value[:MAX_VALUE_CHARS] + "..."
    return f"{where!r}: {detail['msg'][0].lower()}{detail['msg'][1:]}, got {value}"


def _typed_dict(
    tool: str, fields: Mapping[str, Any], required: Collection[str], *, extra: Literal["allow", "ignore"]
) -> Any:
    # Not a model, whose fields could not be called `json` or `_id`.
    annotations = {name: kind if name in required else NotRequired[kind] for name, kind in fields.items()}
    create: Any = TypedDict
    typed_dict = create(tool, annotations)
    # JSON has no NaN, and a text that spells one ("nan") is not a number either.
    typed_dict.__pydantic_config__ = ConfigDict(extra=extra, allow_inf_nan=False)
    return typed_dict


def _arguments(tool: str, kind: Any, defaults: Mapping[str, Any]) -> Arguments:
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(kind)
        raw = adapter.json_schema()
        properties = raw.setdefault("properties", {})
        for name, default in defaults.items():
            shown = {**properties[name], "default": to_jsonable_python(default)}
            properties[name] = dict(sorted(shown.items()))  # in pydantic's order, because the model reads it
    except (PydanticUserError, PydanticSerializationError, NameError) as error:
        raise ConfigError(f"tool {tool!r}: its parameters have no JSON schema: {error}") from error
    parameters = inlined(tool, raw)
    # Unknown arguments are refused anyway, and a pydantic model's docstring is not for the policy.
    for key in ("additionalProperties", "description"):
        parameters.pop(key, None)
    return Arguments(tool=tool, check=partial(_check_with, adapter), parameters=parameters, defaults=defaults)


def inlined(tool: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema with every `$ref` replaced by the schema it names, and without titles. Where a schema contains
    itself, the inner one becomes `{}`, which accepts anything. ConfigError for a reference that leads nowhere."""

    def replaced(node: Any, inside: tuple[str, ...]) -> Any:
        if isinstance(node, list):
            return [replaced(_as_mapping(item), inside) for item in node]
        if not isinstance(node, Mapping):
            return node
        if isinstance(reference := node.get("$ref"), str):
            rest = replaced({key: value for key, value in node.items() if key != "$ref"}, inside)
            target = {} if reference in inside else _look_up(tool, schema, reference)
            return {**replaced(target, (*inside, reference)), **rest}
        result = {}
        for key, value in node.items():
            if key in ("properties", "patternProperties"):  # by names, such as "title", that are not keywords
                result[key] = {name: replaced(_as_mapping(each), inside) for name, each in value.items()}
            elif key not in ("$defs", "definitions", "discriminator") and not (
                key == "title" and isinstance(value, str)
            ):
                is_data = key in ("default", "enum", "const", "examples")
                result[key] = value if is_data else replaced(_as_mapping(value) if key == "items" else value, inside)
        return result

    found: dict[str, Any] = replaced(schema, ("#",))
    return found


def _as_mapping(schema: Any) -> Any:
    """A schema may be `true` or `false`; readers of the result expect a mapping."""
    return {} if isinstance(schema, bool) else schema


def _look_up(tool: str, schema: Any, reference: str) -> Any:
    place, *parts = reference.split("/")
    try:
        for part in parts:
            name = unquote(part).replace("~1", "/").replace("~0", "~")
            schema = schema[int(name) if isinstance(schema, list) else name]
    except (KeyError, ValueError, IndexError, TypeError):
        place = ""
    if place != "#" or not isinstance(schema, Mapping | bool):
        raise ConfigError(
            f"tool {tool!r}: its JSON schema refers to {reference!r}, which it does not contain. Name the other tools "
            "of its server in `only`"
        )
    return _as_mapping(schema)


def _keep_integer(value: Any, as_float: ValidatorFunctionWrapHandler) -> Any:
    """JSON has one number type, and a tool that writes 250 to a table should not write 250.0."""
    return value if type(value) is int else as_float(value)


_JSON_TYPES: dict[str, Any] = {
    "string": str,
    "integer": int,
    "number": Annotated[float, WrapValidator(_keep_integer)],
    "boolean": bool,
    "null": None,
    "array": list[Any],
    "object": dict[str, Any],
}


def _type_of(tool: str, schema: Mapping[str, Any]) -> Any:
    """The Python type of a JSON schema."""
    if "$ref" in schema:
        raise ConfigError(f"tool {tool!r}: parameters use $ref {schema['$ref']!r}; write the schema out in place")
    if (choices := _choices(schema)) is not None:
        hashable = all(value is None or isinstance(value, str | int) for value in choices)
        return Literal[tuple(choices)] if hashable else Any
    options, kind = _options(schema), schema.get("type", [])
    if isinstance(kind, list):
        options += [{**schema, "type": each} for each in kind]
    if options:
        return Union[tuple(_type_of(tool, option) for option in options)]  # noqa: UP007 (built at run time)
    if not kind:
        return Any
    if kind not in _JSON_TYPES:
        raise ConfigError(f"tool {tool!r}: unknown JSON schema type {kind!r}.{did_you_mean(str(kind), _JSON_TYPES)}")
    if kind == "array" and "items" in schema:
        return list[_type_of(tool, schema["items"])]  # type: ignore[misc]
    if kind == "object" and schema.get("properties"):
        return _type_of_object(tool, schema)
    return _JSON_TYPES[kind]


def _type_of_object(tool: str, schema: Mapping[str, Any]) -> Any:
    fields = {name: _type_of(tool, property_schema) for name, property_schema in schema["properties"].items()}
    return _typed_dict(tool, fields, schema.get("required", ()), extra="allow")


def _type_text(schema: Mapping[str, Any]) -> str:
    if (choices := _choices(schema)) is not None:
        return " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    if options := _options(schema):
        return " | ".join(map(_type_text, options))
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list[{_type_text(schema.get('items', {}))}]"
    if kind == "object" and schema.get("properties"):
        return "{" + ", ".join(f"{name}: {_type_text(inner)}" for name, inner in schema["properties"].items()) + "}"
    return kind if isinstance(kind, str) else " | ".join(kind)
