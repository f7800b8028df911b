"""Read a recipe in layers: its YAML, presets on top of it, `key=value` overrides on top of those. The result is one
checked `RunConfig`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from yaml import YAMLError

from agent_r1.algorithm_names import check_early
from agent_r1.config.checks import Tree, check_idle, check_together, value_of
from agent_r1.config.errors import explain
from agent_r1.config.recipes import PYTHON, RECIPES, recipe_file, split_presets
from agent_r1.config.schema import DEFAULT_ENGINE, RunConfig
from agent_r1.errors import ConfigError, did_you_mean

PAIRS = (("model.path", "model.make"), ("sft.demos", "sft.trajectories"), ("gateway.agent", "gateway.command"))
REPLACES = {a: b for pair in PAIRS for a, b in (pair, pair[::-1])}  # a setting -> the one that it turns off
READ_ERRORS = (OmegaConfBaseException, YAMLError, OSError, TypeError, ValueError, RecursionError)


def load_config(recipe: str, overrides: Sequence[str] = (), settings: Mapping[str, Any] | None = None) -> RunConfig:
    """Read a recipe, add `settings` (sections with values), and apply overrides of the form `section.key=value`.

    `recipe` is a bundled name, NAME/PRESET, a YAML file, or a folder with `base.yaml`; `+PRESET` adds presets.
    """
    path, presets = recipe_file(recipe), split_presets(recipe)[1]
    try:
        layers = [*_read_layers(path, presets), OmegaConf.create(dict(settings or {})), _read_overrides(overrides)]
        stages = merge_layers(layers)
        tree = plain(stages[-1], resolve=True)
    except ConfigError:
        raise
    except READ_ERRORS as error:  # such as a list that meets a section
        raise ConfigError(f"cannot combine the settings of {path} and the overrides: {error}") from error
    if "recipe" in tree:
        raise ConfigError("recipe is not a setting: name the recipe as the first argument")
    is_bundled = path.parent.parent == RECIPES
    name = recipe if recipe == PYTHON or is_bundled else "+".join([str(path.resolve()), *presets])
    config = parse_config(tree | {"recipe": name})
    if is_bundled:  # other recipes may add algorithms
        check_early(config.algorithm.name)
    check_idle(*([plain(tree, resolve=False) for tree in trees] for trees in (layers, stages)))
    _check_secrets(plain(stages[-1], resolve=False))
    played = config.rollout.rows_per_step * config.rollout.group_size
    if config.learner.num_minibatches > played:  # not an error in an existing run
        minibatches = config.learner.num_minibatches
        raise ConfigError(f"learner.num_minibatches={minibatches} is more than the {played} episodes of a step")
    return config


def parse_config(tree: dict[str, Any]) -> RunConfig:
    """Check a plain tree, from YAML or from a run's config.json."""
    try:
        config = RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(explain(item, RunConfig) for item in error.errors())) from None
    check_together(config)
    return config


def change_config(config: RunConfig, overrides: Sequence[str], allowed: Sequence[str]) -> RunConfig:
    """Change the config of an existing run; only the allowed settings or sections may be changed."""
    for item in overrides:
        name = item.partition("=")[0]
        if name not in allowed and name.partition(".")[0] not in allowed:
            raise ConfigError(f"{item!r}: only {', '.join(allowed)} can be changed for an existing run")
    try:
        changes = plain(_read_overrides(overrides), resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"cannot read the settings {' '.join(overrides)}: {error}") from error
    tree = config.model_dump()
    for section, values in changes.items():
        tree[section] = tree[section] | values if isinstance(values, dict) else values
    return parse_config(tree)


def plain(tree: Any, *, resolve: bool) -> Tree:
    container = OmegaConf.to_container(tree, resolve=resolve)
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


def merge_layers(layers: Sequence[DictConfig]) -> list[Any]:
    """Return the merged settings after each layer.

    A setting in `REPLACES` turns the other one off. A new algorithm, context policy or engine does not inherit the
    settings of the one it replaces.
    """
    stages: list[Any] = [OmegaConf.create()]
    for layer in layers:
        new, old = plain(layer, resolve=False), plain(stages[-1], resolve=False)
        below = stages[-1].copy()
        if value_of(new, "algorithm.name") not in (None, value_of(old, "algorithm.name")):
            OmegaConf.update(below, "algorithm.settings", {}, merge=False)
        policy, other_policy = value_of(new, "context.policy"), value_of(old, "context.policy")
        if None not in (policy, other_policy) and policy != other_policy:
            below.context = {"reasoning": value_of(old, "context.reasoning")}  # every policy has this setting
        if value_of(new, "engine.kind") not in (None, value_of(old, "engine.kind") or DEFAULT_ENGINE):
            below.engine = {}
        off = [f"{other}=null" for setting, other in REPLACES.items() if value_of(new, setting) is not None]
        stages.append(OmegaConf.merge(below, OmegaConf.from_dotlist(off), layer))
    return stages[1:]


def _read_overrides(overrides: Sequence[str]) -> DictConfig:
    for item in overrides:
        key, equals, _ = item.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"override {item!r} is not of the form section.key=value, such as trainer.steps=20")
        try:
            OmegaConf.from_dotlist([item])
        except READ_ERRORS as error:
            has_brackets = "{" in item or "[" in item
            hint = f". Quote text with brackets, once more than for the shell: '{key}=\"...\"'" if has_brackets else ""
            reason = str(error).partition("\n    full_key")[0]  # OmegaConf adds lines about its own types
            raise ConfigError(f"override {item!r:.200} cannot be read: {reason}{hint}") from error
    return OmegaConf.from_dotlist(list(overrides))


def _read_layers(path: Path, presets: Sequence[str]) -> list[DictConfig]:
    """Return the layers of a file, its `base` first, then the `presets` beside it."""
    layers, base = _read_with_base(path)
    for name in presets:
        file = path.with_name(name if name.endswith((".yaml", ".yml")) else f"{name}.yaml")
        if not file.is_file():
            known = [other.stem for other in path.parent.glob("*.yaml") if other not in (base, path)]
            raise ConfigError(f"there is no preset {name!r} beside {path}.{did_you_mean(name, known)}")
        added, other_base = _read_with_base(file)
        if len(added) < 2 or other_base != base:
            raise ConfigError(f"{path.name} and {file.name} cannot be combined: the latter's base is not {base.name}")
        layers.append(added[-1])
    return layers


def _read_with_base(path: Path) -> tuple[list[DictConfig], Path]:
    """Return the layers of a file, and the path of the lowest."""
    top = _read_yaml(path)
    if "base" not in top:
        return [top], path
    base = top.pop("base")
    base_path = path.parent / str(base)
    if base_path == path or not base_path.is_file():
        raise ConfigError(f"{path}: base={base!r} must name another YAML file in the same folder")
    bottom = _read_yaml(base_path)
    if "base" in bottom:
        both = f"{base_path.stem}+{path.stem}"
        raise ConfigError(f"{path}: its base {base!r} is itself a preset. Use the base of that one, and run {both}")
    return [bottom, top], base_path


def _read_yaml(path: Path) -> DictConfig:
    try:
        tree = OmegaConf.load(path)
    except READ_ERRORS as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(tree, DictConfig):
        raise ConfigError(f"{path} must hold a mapping of sections, not {type(tree).__name__}")
    return tree


def _check_secrets(tree: Tree) -> None:
    """Refuse variables that OmegaConf would write, resolved, into the run's config.json."""
    for tool in value_of(tree, "task.tools") or []:
        if isinstance(tool, dict) and "${oc.env:" in str(tool):
            raise ConfigError(
                f"task.tools: {tool!r:.200} would write the variable's value to the run's config.json. Write $NAME, "
                "which is replaced when the server starts"
            )
