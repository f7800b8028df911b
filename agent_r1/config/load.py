"""Read a recipe, its presets and the overrides into one checked `RunConfig`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from agent_r1.algorithm_names import check_early
from agent_r1.config.checks import check_together
from agent_r1.config.errors import explain
from agent_r1.config.layers import check_idle, merge_layers, plain, read_layers, read_overrides, split_presets
from agent_r1.config.recipes import PYTHON, RECIPES, recipe_file
from agent_r1.config.schema import RunConfig
from agent_r1.errors import ConfigError


def load_config(recipe: str, overrides: Sequence[str] = (), settings: Mapping[str, Any] | None = None) -> RunConfig:
    """Read a recipe, add `settings` (sections with values), and apply overrides of the form `section.key=value`.

    `recipe` is a bundled name, NAME/PRESET, a YAML file, or a folder with `base.yaml`; `+PRESET` adds presets.
    """
    path, presets = recipe_file(recipe), split_presets(recipe)[1]
    try:
        layers = [*read_layers(path, presets), OmegaConf.create(dict(settings or {})), read_overrides(overrides)]
        stages = merge_layers(layers)
        tree = plain(stages[-1], resolve=True)
    except ConfigError:
        raise
    except (OmegaConfBaseException, TypeError, ValueError, RecursionError) as error:  # such as a list meeting a section
        raise ConfigError(f"cannot combine the settings of {path} and the overrides: {error}") from error
    if "recipe" in tree:
        raise ConfigError("recipe is not a setting: name the recipe as the first argument")
    is_bundled = path.parent.parent == RECIPES
    name = recipe if recipe == PYTHON or is_bundled else "+".join([str(path.resolve()), *presets])
    config = parse_config(tree | {"recipe": name})
    if is_bundled:  # other recipes may add algorithms
        check_early(config.algorithm.name)
    check_idle(layers, stages)
    _check_secrets(plain(stages[-1], resolve=False))
    played = config.rollout.rows_per_step * config.rollout.group_size
    if config.learner.num_minibatches > played:  # not an error in an existing run
        raise ConfigError(
            f"learner.num_minibatches={config.learner.num_minibatches} is more than the {played} episodes of a step "
            "(rollout.rows_per_step times rollout.group_size)"
        )
    return config


def _check_secrets(tree: dict[str, Any]) -> None:
    """Refuse variables that OmegaConf would write, resolved, into the run's config.json."""
    task = tree.get("task")
    for tool in (task.get("tools") or []) if isinstance(task, dict) else []:
        if isinstance(tool, dict) and "${oc.env:" in str(tool):
            raise ConfigError(
                f"task.tools: {tool!r:.200} would write the variable's value to the run's config.json. Write $NAME, "
                "which is replaced when the server starts"
            )


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
        changes = plain(read_overrides(overrides), resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"cannot read the settings {' '.join(overrides)}: {error}") from error
    tree = config.model_dump()
    for section, values in changes.items():
        tree[section] = tree[section] | values if isinstance(values, dict) else values
    return parse_config(tree)
