"""Keywords of Python as settings of the config tree.

Every section of the config is a keyword that takes a dict (`rollout={"group_size": 4}`), every setting can be given by
its dotted name (`settings={"rollout.group_size": 4}`), and the most used ones have short forms (`steps=60`). Objects
are replaced by names here, so the same builders read the tree as for a recipe.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

import yaml

from agent_r1.api.given import give
from agent_r1.api.inputs import TINY, demos_name, rows_name, tiny_model_name, tool_names
from agent_r1.config import PYTHON, RunConfig, load_config
from agent_r1.errors import ConfigError, brief, did_you_mean

Tree = dict[str, Any]

SHORT = {
    "rows": "task.rows",
    "tools": "task.tools",
    "tool_kwargs": "task.tool_kwargs",
    "reward": "task.reward",
    "env": "task.env",
    "env_kwargs": "task.env_kwargs",
    "flow": "task.flow",
    "resources": "task.resources",
    "demos": "sft.demos",
    "steps": "trainer.steps",
}
SECTIONS = [name for name in RunConfig.model_fields if name != "recipe"]
MAIN = {"model": "path", "algorithm": "name", "engine": "kind", "context": "policy"}  # `model="..."`: its path
# Their values reach environments and tools as they are in the config; names in them are not looked up.
PASSED_ON = ("task.env_kwargs.", "task.tool_kwargs.", "task.rows_kwargs.", "model.template_kwargs.")
KEYWORDS = [*SHORT, "test_rows", "settings", *SECTIONS]


class Settings(TypedDict, total=False):
    """The keywords of `train`, `evaluate` and `Config`. docs/python-api.md describes them."""

    rows: Any
    test_rows: Any
    tools: Any
    tool_kwargs: Mapping[str, Any]
    reward: Any
    env: Any
    env_kwargs: Mapping[str, Any]
    flow: Any
    resources: Any
    demos: Any
    steps: int
    settings: Mapping[str, Any]
    seed: int
    backend: str
    task: Mapping[str, Any]
    data: Mapping[str, Any]
    model: Any
    sft: Mapping[str, Any]
    algorithm: str | Mapping[str, Any]
    rewards: Mapping[str, Any]
    critic: Mapping[str, Any] | None
    correction: Mapping[str, Any] | None
    rollout: Mapping[str, Any]
    context: str | Mapping[str, Any]
    engine: str | Mapping[str, Any]
    learner: Mapping[str, Any]
    lora: Mapping[str, Any] | None
    trainer: Mapping[str, Any]
    track: list[str]
    eval: Mapping[str, Any]
    gateway: Mapping[str, Any] | None
    verl: Mapping[str, Any] | None


class Config:
    """The settings of a run, checked. `config.resolved` is the whole tree, which `print(config)` shows as YAML.

    `recipe` is a bundled recipe or a YAML file to start from; without it, everything comes from the keywords.
    """

    def __init__(self, recipe: str | Path | None = None, /, **keywords: Unpack[Settings]) -> None:
        self.recipe = PYTHON if recipe is None else str(recipe)
        # They are read again by `with_settings`, and an iterator can be read only once.
        self.keywords = {
            name: list(value) if isinstance(value, Iterator) else value for name, value in keywords.items()
        }
        self.tree = read_keywords(self.keywords)
        self.resolved = load_config(self.recipe, settings=self.tree)

    def with_settings(self, **keywords: Unpack[Settings]) -> Config:
        """A copy with other settings on top: a keyword given here replaces the one of the same name."""
        recipe = None if self.recipe == PYTHON else self.recipe
        merged: dict[str, Any] = {**self.keywords, **keywords}
        return Config(recipe, **merged)

    def __repr__(self) -> str:
        return yaml.safe_dump(self.resolved.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def read_keywords(keywords: Mapping[str, Any]) -> Tree:
    """Return the sections that the keywords set, with names in place of objects."""
    check_names(keywords)
    tree: Tree = {}
    for name in SECTIONS:
        if name in keywords:
            _set(tree, name, _section(name, keywords[name]), f"{name}=")
    for dotted, value in dict(keywords.get("settings") or {}).items():
        _set(tree, dotted, value, f"settings[{dotted!r}]")
    for name, dotted in SHORT.items():
        if name in keywords:
            _set(tree, dotted, keywords[name], f"{name}=")
    _name_objects(tree, keywords.get("test_rows"))
    return {section: _plain(value, section) for section, value in tree.items()}


def check_names(keywords: Mapping[str, Any], others: Sequence[str] = ()) -> None:
    """Refuse unknown keywords. `others` are further keywords of the same function."""
    for name in keywords:
        if name not in KEYWORDS:
            raise ConfigError(f"unknown keyword {name!r}.{did_you_mean(name, [*KEYWORDS, *others])}")


def _section(name: str, value: Any) -> Any:
    """Return a section as a dict. Some sections may be given as the value of their main setting."""
    if name not in MAIN or isinstance(value, Mapping):
        return _copied(value)
    if name == "model" and callable(value):
        return {"make": value}
    return {MAIN[name]: str(value) if isinstance(value, Path) else value}


def _set(tree: Tree, dotted: str, value: Any, given: str) -> None:
    *parents, last = dotted.split(".")
    place: Any = tree
    for parent in parents:
        place = place.setdefault(parent, {}) if isinstance(place, dict) else None
    if not isinstance(place, dict):
        raise ConfigError(f"{given}: {'.'.join(parents)} is not a section")
    if last in place:
        raise ConfigError(f"{given} sets {dotted}, which another keyword sets too: give it once")
    place[last] = _copied(value)


def _copied(value: Any) -> Any:
    """Copy dicts, which are changed here, and nothing in them."""
    return {key: _copied(item) for key, item in value.items()} if isinstance(value, Mapping) else value


def _name_objects(tree: Tree, test_rows: Any) -> None:
    """Replace rows, tools, demonstrations and a tiny model by names. Other objects are replaced one by one later."""
    task, sft, model = (_as_dict(tree.get(name)) for name in ("task", "sft", "model"))
    demos = sft.get("demos")
    if task.get("tools"):
        task["tools"] = tool_names(task["tools"])
    if model.get("path") == TINY:
        model["make"] = tiny_model_name(demos, task.get("tools") or [])
        del model["path"]
    if task.get("rows") is not None:
        task["rows"] = rows_name(task["rows"], test_rows)
    elif test_rows is not None:
        raise ConfigError("test_rows belongs to a list of training rows: give rows too")
    if demos is not None:
        sft["demos"], count = demos_name(demos)
        if count is not None:
            sft.setdefault("count", max(1, count))


def _as_dict(section: Any) -> Tree:
    return section if isinstance(section, dict) else {}  # a wrong section is refused when the config is checked


def _plain(value: Any, where: str) -> Any:
    """The value with names in place of functions, classes and other objects."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ConfigError(f"{where} has the key {brief(key)}: config.json keeps only texts as keys")
        return {key: _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if callable(value) and where.startswith(PASSED_ON) and where != "task.env_kwargs.env_type":
        raise ConfigError(
            f"{where} is {brief(value)}: config.json cannot keep it. Give numbers, texts, lists and dicts, and put "
            "objects into the class or function that needs them"
        )
    if callable(value) or where.startswith("task.resources"):
        return give(value)
    raise ConfigError(f"{where} is {brief(value)}: give a number, text, list, dict, function or class")
