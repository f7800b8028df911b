"""Explain what is wrong with a setting, in terms of what the user wrote.

Knows how pydantic reports errors and how sections nest; `schema.py` says what a setting may be.
"""

from __future__ import annotations

from typing import Any, get_args

from pydantic import BaseModel, TypeAdapter, ValidationError

from agent_r1.algorithm_names import PAPERS
from agent_r1.errors import did_you_mean, nearest

Section = type[BaseModel]
MAX_VALUE_CHARS = 200  # characters of a value in a message
TYPES: dict[str, type] = {"int_type": int, "float_type": float, "bool_type": bool}


def explain(error: Any, root: Section) -> str:
    """Explain one entry of `ValidationError.errors()` in a line."""
    path, section, kind = _place([str(part) for part in error["loc"]], root)
    name, value = ".".join(path), error.get("input")
    if error["type"] == "extra_forbidden":
        fields = _fields([section])
        near = _elsewhere(path[-1], root, besides=path[:-1]) or nearest(path[-1], fields)
        hint = f" Did you mean {near!r}?" if near else ""
        where = ".".join(path[:-1]) or "the recipe"
        return f"{where}{kind} has no field {path[-1]!r}.{hint} Fields: {', '.join(fields)}"
    if error["type"] == "missing":
        if path[-1].isdigit():
            return f"{'.'.join(path[:-1])}={_spell(value)}: too few numbers"
        return f"{name} is missing; give it in the recipe or as {name}=..."
    if error["type"] == "union_tag_invalid":
        key, tag = error["ctx"]["discriminator"].strip("'"), error["ctx"]["tag"]
        return f"unknown {name}.{key} {tag!r}.{did_you_mean(tag, _tags(root.model_fields[path[0]].annotation, key))}"
    if error["type"] in ("model_type", "model_attributes_type"):  # the latter for a section of several kinds
        annotation = section.model_fields[path[-1]].annotation if section is not None else None
        fields = _fields(_sections(annotation))
        choice = next((key for key in ("name", "policy", "kind") if key in fields), None)
        hint = f"Fields: {', '.join(fields)}"
        if isinstance(value, str) and choice is not None:
            near = nearest(value, PAPERS if name == "algorithm" else _tags(annotation, choice))
            hint = f"Did you mean {name}.{choice}={near or value}?"
        return f"{name}={_spell(value)}: {name} is a section. {hint}"
    message = error["msg"][0].lower() + error["msg"][1:]
    return f"{name}={_spell(value)}: {message}{_same_value(error['type'], value)}"


def _spell(value: Any) -> str:
    """Spell a value as YAML does, at most its beginning."""
    if isinstance(value, bool | None):
        return {True: "true", False: "false", None: "null"}[value]
    text = repr(value)
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[:MAX_VALUE_CHARS]}..."


def _same_value(kind: str, value: Any) -> str:
    """Hint how to write what a value of another type probably means."""
    if kind == "list_type" and isinstance(value, str) and value.isidentifier():
        return f"; write [{value}]"
    if value == "None":
        return "; write null"
    if kind not in TYPES or (isinstance(value, bool) and kind != "bool_type"):
        return ""
    try:
        meant: Any = TypeAdapter(TYPES[kind]).validate_python(value)
    except ValidationError:
        return ""
    if not isinstance(value, str):
        return f"; write {_spell(meant)}"
    return f", not text; write {_spell(meant)} without quotes, and a variable as ${{oc.decode:${{oc.env:NAME}}}}"


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


def _fields(sections: list[Any]) -> list[str]:
    return list(dict.fromkeys(name for section in sections if section is not None for name in section.model_fields))


def _elsewhere(key: str, root: Section, besides: list[str]) -> str | None:
    """Return where a key written in the wrong section belongs; the sections of reinforcement learning come first."""
    homes = [
        name
        for name, field in root.model_fields.items()
        if [name] != besides and any(key in section.model_fields for section in _sections(field.annotation))
    ]
    homes.sort(key=lambda name: name not in ("learner", "rollout", "trainer"))
    return f"{homes[0]}.{key}" if homes else None
