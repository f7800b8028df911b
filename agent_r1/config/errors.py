"""Explain what is wrong with a setting, in terms of what the user wrote.

Knows how pydantic reports errors and how sections nest; `schema.py` says what a setting may be.
"""

from __future__ import annotations

import math
from typing import Any, get_args

from pydantic import BaseModel

from agent_r1.errors import did_you_mean, nearest

Section = type[BaseModel]
MAX_VALUE_CHARS = 200  # characters of a value in a message


def explain(error: Any, root: Section) -> str:
    """Explain one entry of `ValidationError.errors()` in a line."""
    path, section, kind = _place([str(part) for part in error["loc"]], root)
    name, value = ".".join(path), error.get("input")
    if error["type"] == "extra_forbidden":
        fields = list(section.model_fields) if section is not None else []
        near = _elsewhere(path[-1], root, besides=path[:-1]) or nearest(path[-1], fields)
        hint = f" Did you mean {near!r}?" if near else ""
        where = ".".join(path[:-1]) or "the recipe"
        return f"{where}{kind} has no field {path[-1]!r}.{hint} Fields: {', '.join(fields)}"
    if error["type"] == "missing":
        if path[-1].isdigit():
            return f"{'.'.join(path[:-1])}={value!r}: too few numbers"
        return f"{name} is missing; give it in the recipe or as {name}=..."
    if error["type"] in ("union_tag_invalid", "union_tag_not_found"):
        key = error["ctx"]["discriminator"].strip("'")
        known = _tags(root.model_fields[path[0]].annotation, key)
        if error["type"] == "union_tag_not_found":
            return f"{name}.{key} is missing; choose one of: {', '.join(known)}"
        return f"unknown {name}.{key} {error['ctx']['tag']!r}.{did_you_mean(error['ctx']['tag'], known)}"
    message = error["msg"][0].lower() + error["msg"][1:]
    if error["type"] == "model_attributes_type":
        message = f"{name} is a section"
    field = root.model_fields.get(path[0]) if len(path) == 1 else None
    key = field.discriminator if field is not None else None
    kinds = _tags(field.annotation, key) if field is not None and isinstance(key, str) else []
    hint = f". Did you mean {name}.{key}={value}?" if value in kinds else _same_value(error["type"], value)
    if error["type"] == "model_type" and (names := _names(section, path[-1])):
        if isinstance(value, str) and "name" in names:
            return f"{name}={_spell(value)}: {name} is a section. Did you mean {name}.name={value}?"
        return f"{name}={_spell(value)}: {name} is a section. Fields: {', '.join(names)}"
    return f"{name}={_spell(value)}: {message}{hint}"


def _spell(value: Any) -> str:
    """Spell a value as YAML does, at most its beginning."""
    if isinstance(value, bool | None):
        return {True: "true", False: "false", None: "null"}[value]
    text = repr(value)
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[:MAX_VALUE_CHARS]}..."


def _same_value(kind: str, value: Any) -> str:
    """Hint how to write what a value of another type probably means."""
    if kind == "int_type" and isinstance(value, float) and value.is_integer():
        return f"; write {value:.0f}"
    if kind == "bool_type" and isinstance(value, int) and value in (0, 1):
        return f"; write {_spell(bool(value))}"
    if kind == "list_type" and isinstance(value, str) and value.isidentifier():
        return f"; write [{value}]"
    if kind not in ("int_type", "float_type", "bool_type") or not isinstance(value, str):
        return ""
    if value == "None":
        return "; write null"
    if not _is_literal(kind, value):
        return ""
    number = int(value) if kind == "int_type" else value  # YAML reads 08 as text
    return f", not text; write {number} without quotes, and a variable as ${{oc.decode:${{oc.env:NAME}}}}"


def _is_literal(kind: str, text: str) -> bool:
    if kind == "bool_type":
        return text.lower() in ("true", "false")
    try:
        return math.isfinite(int(text) if kind == "int_type" else float(text))
    except (ValueError, OverflowError):
        return False


def _place(location: list[str], root: Section) -> tuple[list[str], Section | None, str]:
    """Return the path as people write it, the section of its last part, and the kind of that section.

    If a section has several kinds, pydantic puts the kind between the name of the section and the name of the field."""
    path, section, kind = [], root, ""
    rest = location[:-1]
    while rest:
        part = rest.pop(0)
        field = section.model_fields.get(part)
        options = _sections(field.annotation) if field is not None else []
        path.append(part)
        if not options:
            return [*path, *rest, location[-1]], None, ""
        section = options[0]
        key = field.discriminator if field is not None else None
        if isinstance(key, str) and rest:
            tag = rest.pop(0)
            section = next(option for option in options if tag in _tags(option, key))
            kind = f" ({key} {tag})"
    return [*path, location[-1]], section, kind


def _sections(annotation: Any) -> list[Section]:
    options = [annotation, *get_args(annotation)]
    return [item for item in options if isinstance(item, type) and issubclass(item, BaseModel)]


def _tags(annotation: Any, key: str) -> list[str]:
    """Return the values of `key`, which names the kind of a section."""
    return [tag for section in _sections(annotation) for tag in get_args(section.model_fields[key].annotation)]


def _names(section: Section | None, key: str) -> list[str]:
    """Return the fields of the section called `key` inside this one; empty if `key` is not a section."""
    field = None if section is None else section.model_fields.get(key)
    sections = _sections(field.annotation) if field is not None else []
    return list(dict.fromkeys(name for one in sections for name in one.model_fields))


def _elsewhere(key: str, root: Section, besides: list[str]) -> str | None:
    """Return where a key written in the wrong section belongs; the sections of reinforcement learning come first."""
    homes = [
        name
        for name, field in root.model_fields.items()
        if [name] != besides and any(key in section.model_fields for section in _sections(field.annotation))
    ]
    homes.sort(key=lambda name: name not in ("learner", "rollout", "trainer"))
    return f"{homes[0]}.{key}" if homes else None
