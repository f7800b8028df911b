"""What a tool may be asked: the schema the model reads, and the check of what it sends.

A function's signature and a hand-written JSON schema both end in one pydantic model, so they refuse the same mistakes
in the same words. Knows nothing of running tools. Keywords that narrow a hand-written schema further (`minimum`,
`pattern`) are shown to the model, but checking them is that tool's own business.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    create_model,
)
from pydantic.errors import PydanticUserError
from pydantic.fields import FieldInfo

from agent_r1.errors import ConfigError, did_you_mean

MAX_PROBLEMS = 5  # a model mends a few mistakes at a time; more lines only cost it context
MAX_VALUE_CHARS = 80  # of a wrong value, as echoed to the model

T = TypeVar("T")


class _RowMarker:
    """Marks a parameter that the row fills in."""


FROM_ROW = _RowMarker()
# `table: FromRow[list[dict]]`: hidden from the model, filled from the row's `tools_kwargs`.
FromRow = Annotated[T, FROM_ROW]


class BadArguments(Exception):
    """The arguments do not fit the tool. The text is written for the model that sent them."""


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
        """The part of `given` that is this tool's; a missing required key is the row's mistake."""
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
    model: type[BaseModel]
    parameters: dict[str, Any]  # JSON schema without references, as chat templates show it

    def validate(self, arguments: Mapping[str, Any]) -> BaseModel:
        known = self.parameters["properties"]
        problems = [f"unknown argument {key!r}" for key in arguments if key not in known]
        try:
            model = self.model.model_validate({key: value for key, value in arguments.items() if key in known})
        except ValidationError as error:
            problems += [_problem(dict(detail)) for detail in error.errors(include_url=False)]
        if problems:
            shown = problems[:MAX_PROBLEMS]
            shown += [f"and {len(problems) - MAX_PROBLEMS} more"] if len(problems) > MAX_PROBLEMS else []
            raise BadArguments(f"bad arguments for {signature(self.tool, self.parameters)}: {'; '.join(shown)}")
        return model

    def values(self, model: BaseModel) -> dict[str, Any]:
        """The validated values by argument name, nested models kept as such."""
        return {field.alias or name: getattr(model, name) for name, field in type(model).model_fields.items()}


def arguments_from_signature(tool: str, function: Callable[..., Any]) -> tuple[Arguments, RowKeys]:
    """What the model sends and what the row fills in, by the function's annotations."""
    try:
        hints = get_type_hints(function, include_extras=True)
    except NameError as error:
        raise ConfigError(
            f"tool {tool!r}: an annotation cannot be resolved: {error}. Define the type at module level."
        ) from error
    fields: dict[str, tuple[Any, Any]] = {}
    hidden: list[inspect.Parameter] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(
                f"tool {tool!r}: parameter {parameter} cannot be called by name. "
                "The model sends named arguments; spell each of them out."
            )
        if parameter.name not in hints:
            raise ConfigError(
                f"tool {tool!r}: parameter {parameter.name!r} has no type annotation; "
                "the model's arguments are checked by it"
            )
        annotation = hints[parameter.name]
        if get_origin(annotation) is Annotated and FROM_ROW in get_args(annotation)[1:]:
            hidden.append(parameter)
        else:
            annotation = _with_description(annotation)
            fields[parameter.name] = (annotation, ... if parameter.default is parameter.empty else parameter.default)
    return arguments_from_model(tool, _make_model(tool, fields)), RowKeys.of(hidden)


def _with_description(annotation: Any) -> Any:
    """`Annotated[int, "how many"]` as `Annotated[int, Field(description="how many")]`; pydantic ignores a bare text."""
    if get_origin(annotation) is not Annotated:
        return annotation
    kind, *marks = get_args(annotation)
    return Annotated[(kind, *(Field(description=mark) if isinstance(mark, str) else mark for mark in marks))]


def arguments_from_model(tool: str, model: type[BaseModel]) -> Arguments:
    """The fields of a pydantic model are the arguments."""
    for name, field in model.model_fields.items():
        if _takes_from_row(field, frozenset({model})):
            raise ConfigError(
                f"tool {tool!r}: {field.alias or name!r} has a FromRow inside another type or in a pydantic model, "
                "where the policy would be asked for it. Make it the whole annotation of a parameter, as in "
                "FromRow[str | None]; a tool with batch=True takes nothing from the row, a BatchTool does"
            )
    try:
        raw = model.model_json_schema(by_alias=True)
    except (PydanticUserError, NameError) as error:
        raise ConfigError(f"tool {tool!r}: its parameters have no JSON schema: {error}") from error
    parameters = _inlined(tool, raw, raw.get("$defs", {}), ())
    # Unknown arguments are refused anyway, and a pydantic model's docstring is not written for the policy.
    for key in ("additionalProperties", "description"):
        parameters.pop(key, None)
    parameters.setdefault("properties", {})
    return Arguments(tool=tool, model=model, parameters=parameters)


def arguments_from_schema(tool: str, parameters: Mapping[str, Any]) -> Arguments:
    """The check for a schema written by hand, or received from a server."""
    if parameters.get("type") != "object" or not isinstance(parameters.get("properties", {}), Mapping):
        raise ConfigError(
            f"tool {tool!r}: parameters must be a JSON schema of type 'object' with 'properties', "
            f"got {dict(parameters)}"
        )
    complete = {"properties": {}, **parameters}
    unknown = sorted(set(complete.get("required", ())) - set(complete["properties"]))
    if unknown:
        raise ConfigError(f"tool {tool!r}: parameters require {unknown[0]!r}, which is not among its properties")
    return Arguments(tool=tool, model=_model_of_schema(tool, complete), parameters=complete)


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
    options = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
    if options:
        return any(allows_text(option) for option in options)
    if "enum" in schema or "const" in schema:
        return any(isinstance(value, str) for value in schema.get("enum", [schema.get("const")]))
    kind = schema.get("type", "string")
    return "string" in ([kind] if isinstance(kind, str) else kind)


def _problem(detail: dict[str, Any]) -> str:
    where = ".".join(str(part) for part in detail["loc"]) or "the arguments"
    if detail["type"] == "missing":
        return f"{where!r} is missing"
    value = repr(detail["input"])
    value = value if len(value) <= MAX_VALUE_CHARS else value[:MAX_VALUE_CHARS] + "..."
    return f"{where!r}: {detail['msg'][0].lower()}{detail['msg'][1:]}, got {value}"


def _takes_from_row(field: FieldInfo, inside: frozenset[type[BaseModel]]) -> bool:
    def mentions(annotation: Any) -> bool:
        if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
            known = annotation in inside
            fields = () if known else annotation.model_fields.values()
            return any(_takes_from_row(field, inside | {annotation}) for field in fields)
        return annotation is FROM_ROW or any(map(mentions, get_args(annotation)))

    return any(mark is FROM_ROW for mark in field.metadata) or mentions(field.annotation)


def _make_model(
    tool: str, fields: Mapping[str, tuple[Any, Any]], *, extra: Literal["allow", "ignore"] = "ignore"
) -> Any:
    # Real names live in aliases: as attributes, names like `json` or `_id` would collide with pydantic's own.
    definitions: dict[str, Any] = {
        f"argument_{index}": (Annotated[annotation, Field(alias=name)], default)
        for index, (name, (annotation, default)) in enumerate(fields.items())
    }
    try:
        # JSON has no NaN, and a text that spells one ("nan") is no number either.
        return create_model(tool, __config__=ConfigDict(extra=extra, allow_inf_nan=False), **definitions)
    except (PydanticUserError, NameError) as error:
        raise ConfigError(f"tool {tool!r}: its parameters have no JSON schema: {error}") from error


def _inlined(tool: str, node: Any, defs: Mapping[str, Any], inside: tuple[str, ...]) -> Any:
    """The schema with every `$ref` replaced by what it names, and pydantic's titles dropped."""
    if not isinstance(node, Mapping):
        return node
    if "$ref" in node:
        name = str(node["$ref"]).rsplit("/", 1)[-1]
        if name in inside:
            raise ConfigError(
                f"tool {tool!r}: {name} contains itself, and chat templates cannot show a recursive schema. "
                "Take the nested part as a JSON string instead."
            )
        target = _inlined(tool, defs[name], defs, (*inside, name))
        return {**target, **_inlined(tool, {k: v for k, v in node.items() if k != "$ref"}, defs, inside)}
    result: dict[str, Any] = {}
    for key, value in node.items():
        if key in ("$defs", "discriminator") or (key == "title" and isinstance(value, str)):
            continue
        if key in ("properties", "patternProperties"):  # names of ours, which may well be "title"
            result[key] = {name: _inlined(tool, schema, defs, inside) for name, schema in value.items()}
        elif key in ("anyOf", "oneOf", "allOf", "prefixItems"):
            result[key] = [_inlined(tool, schema, defs, inside) for schema in value]
        elif key in ("items", "additionalProperties", "propertyNames", "contains", "not"):
            result[key] = _inlined(tool, value, defs, inside)
        else:
            result[key] = value
    return result


def _number(value: Any, as_float: ValidatorFunctionWrapHandler) -> Any:
    """Keep integers: JSON has one number type, and a tool that writes 250 to a table should not write 250.0."""
    return value if type(value) is int else as_float(value)


_JSON_TYPES: dict[str, Any] = {
    "string": str,
    "integer": int,
    "number": Annotated[float, WrapValidator(_number)],
    "boolean": bool,
    "null": None,
    "array": list[Any],
    "object": dict[str, Any],
}


def _python_type(tool: str, schema: Mapping[str, Any]) -> Any:
    if "$ref" in schema:
        raise ConfigError(f"tool {tool!r}: parameters use $ref {schema['$ref']!r}; write the schema out in place")
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if choices is not None:
        hashable = all(value is None or isinstance(value, str | int) for value in choices)
        return Literal[tuple(choices)] if hashable else Any
    options = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
    kinds = schema.get("type", [])
    if isinstance(kinds, list):
        options += [{**schema, "type": kind} for kind in kinds]
    if options:
        return Union[tuple(_python_type(tool, option) for option in options)]  # noqa: UP007 (built at run time)
    if not kinds:
        return Any
    if kinds not in _JSON_TYPES:
        raise ConfigError(f"tool {tool!r}: unknown JSON schema type {kinds!r}.{did_you_mean(str(kinds), _JSON_TYPES)}")
    if kinds == "array" and "items" in schema:
        return list[_python_type(tool, schema["items"])]  # type: ignore[misc]
    if kinds == "object" and schema.get("properties"):
        return _model_of_schema(tool, schema)
    return _JSON_TYPES[kinds]


def _model_of_schema(tool: str, schema: Mapping[str, Any]) -> type[BaseModel]:
    required = schema.get("required", ())
    fields = {
        name: (_python_type(tool, property_schema), ... if name in required else property_schema.get("default"))
        for name, property_schema in schema["properties"].items()
    }
    model: type[BaseModel] = _make_model(tool, fields, extra="allow")
    return model


def _type_text(schema: Mapping[str, Any]) -> str:
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if choices is not None:
        return " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    options = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
    if options:
        return " | ".join(_type_text(option) for option in options)
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list[{_type_text(schema.get('items', {}))}]"
    if kind == "object" and schema.get("properties"):
        return "{" + ", ".join(f"{name}: {_type_text(inner)}" for name, inner in schema["properties"].items()) + "}"
    return kind if isinstance(kind, str) else " | ".join(kind)
