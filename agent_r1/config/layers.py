"""Settings as written, in layers: a recipe's YAML, presets on top of it, `key=value` overrides on top of those.

Reads and merges layers, and refuses settings that have no effect. `schema.py` says what a setting may be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from agent_r1.errors import ConfigError, did_you_mean
from agent_r1.places import anchored

DEFAULT_CONTEXT: Literal["append"] = "append"  # the context policy if the settings name none
DEFAULT_ENGINE = "local"  # the kind of engine if the settings name none
# Names for `task.rows`, `task.env` and `task.reward`, and their modules.
ADAPTERS = {"gymnasium": "gymnasium_env", "reasoning_gym": "reasoning_tasks", "verifiers": "verifiers_tasks"}
ADAPTERS |= {"harbor": "harbor", "openenv": "openenv_env"}
Tree = dict[str, Any]  # section -> key -> value, as people wrote it
REPLACES = {  # a setting -> the one that it turns off
    "model.path": "model.make",
    "model.make": "model.path",
    "sft.demos": "sft.trajectories",
    "sft.trajectories": "sft.demos",
    "gateway.agent": "gateway.command",
    "gateway.command": "gateway.agent",
}


def read_switch(value: Any) -> Any:
    """Read on and off as YAML does."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


def with_default(value: Any, **choice: str) -> Any:
    """Fill in the defaults of a section."""
    return choice | value if isinstance(value, dict) else value


def read_overrides(overrides: Sequence[str]) -> DictConfig:
    for item in overrides:
        key, equals, _ = item.partition("=")
        if not equals or not key.strip():
            raise ConfigError(
                f"override {item!r} is not of the form section.key=value, without spaces: for example trainer.steps=20"
            )
        try:
            OmegaConf.from_dotlist([item])
        except (OmegaConfBaseException, YAMLError, ValueError, RecursionError) as error:
            has_brackets = "{" in item or "[" in item
            hint = f". Quote text with brackets, once more than for the shell: '{key}=\"...\"'" if has_brackets else ""
            reason = str(error).partition("\n    full_key")[0]  # OmegaConf adds lines about its own types
            raise ConfigError(f"override {item!r:.200} cannot be read: {reason}{hint}") from error
    return OmegaConf.from_dotlist(list(overrides))


def split_presets(recipe: str) -> tuple[str, list[str]]:
    """Split `alfworld/hints+gigpo` into the first preset and the names of those on top of it."""
    folder, slash, name = recipe.rpartition("/")
    first, *others = [name] if anchored(recipe).exists() else name.split("+")  # a file may be called a+b.yaml
    return f"{folder}{slash}{first}", others


def read_layers(path: Path, presets: Sequence[str] = ()) -> list[DictConfig]:
    """Return the layers of a file, its `base` first, then the `presets` beside it."""
    layers, base = _read_with_base(path)
    for name in presets:
        file = path.with_name(name if name.endswith((".yaml", ".yml")) else f"{name}.yaml")
        if not file.is_file():
            known = [other.stem for other in path.parent.glob("*.yaml") if other not in (base, path)]
            raise ConfigError(f"there is no preset {name!r} beside {path}.{did_you_mean(name, known)}")
        added, other_base = _read_with_base(file)
        if len(added) < 2 or other_base != base:
            raise ConfigError(
                f"{path.name} and {file.name} cannot be combined: {file.name} is not a preset of {base.name}"
            )
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
        raise ConfigError(
            f"{path}: its base {base!r} is itself a preset. Use the base of that one, and combine the two when you run "
            f"them: {base_path.stem}+{path.stem}"
        )
    return [bottom, top], base_path


def merge_layers(layers: Sequence[DictConfig]) -> list[Any]:
    """Return the merged settings after each layer.

    A setting in `REPLACES` turns the other one off. A new algorithm, context policy or engine does not inherit the
    settings of the one it replaces.
    """
    stages: list[Any] = [OmegaConf.create()]
    for layer in layers:
        new, old = plain(layer, resolve=False), plain(stages[-1], resolve=False)
        below = stages[-1].copy()
        name = _value(new, "algorithm.name")
        if name not in (None, _value(old, "algorithm.name")) and _value(old, "algorithm.settings"):
            below.algorithm.settings = {}
        policy, other = _value(new, "context.policy"), _value(old, "context.policy")
        if None not in (policy, other) and policy != other:
            reasoning = _value(old, "context.reasoning")
            below.context = {} if reasoning is None else {"reasoning": reasoning}  # every policy has this setting
        kind = _value(new, "engine.kind")
        if kind not in (None, _value(old, "engine.kind") or DEFAULT_ENGINE):
            below.engine = {}
        off = [f"{other}=null" for setting, other in REPLACES.items() if _value(new, setting) is not None]
        stages.append(OmegaConf.merge(below, OmegaConf.from_dotlist(off), layer))
    return stages[1:]


def _read_yaml(path: Path) -> DictConfig:
    try:
        tree = OmegaConf.load(path)
    except (OmegaConfBaseException, YAMLError, OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(tree, DictConfig):
        raise ConfigError(f"{path} must hold a mapping of sections, not {type(tree).__name__}")
    return tree


def plain(tree: Any, *, resolve: bool) -> Tree:
    container = OmegaConf.to_container(tree, resolve=resolve)
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


def check_idle(layers: Sequence[Any], stages: Sequence[Any]) -> None:
    """Refuse settings that have no effect.

    A layer may set what a later layer turns off, as with `sft.demos=null`. The config.json of a run, which holds every
    field, is not checked.
    """
    written, merged = ([plain(tree, resolve=False) for tree in trees] for trees in (layers, stages))
    for setting, (needed, is_there) in RULES.items():
        idle = [not is_there(stage) for stage in merged]
        given = [_value(layer, setting) is not None for layer in written]
        if idle[-1] and any(map(all, zip(given, idle, strict=True))):
            raise ConfigError(f"{setting} does nothing without {needed}; set that or leave {setting} out")


def _value(tree: Tree, setting: str) -> Any:
    found: Any = tree
    for key in setting.split("."):
        found = found.get(key) if isinstance(found, dict) else None
    return found


def _needs(*names: str, idle: tuple[Any, ...] = (None, 0), which: str = "") -> tuple[str, Callable[[Tree], bool]]:
    """Return a condition for a setting to have an effect, in words and as a function: one of `names` has a value other
    than `idle`."""
    return " or ".join(names) + which, lambda tree: any(_value(tree, name) not in idle for name in names)


_IMITATES = _needs("sft.demos", "sft.trajectories")
_UPDATES_AGAIN = _needs("learner.num_epochs", "learner.num_minibatches", idle=(None, 1), which=" above 1")
_COMPARES_STEPS = _needs("algorithm.settings.step_weight", idle=(0,))  # only gigpo has it, by default not 0
RULES = {
    "sft.count": _needs("sft.demos"),
    "sft.min_reward": _needs("sft.trajectories"),
    "sft.max_per_row": _needs("sft.trajectories"),
    **{f"sft.{key}": _IMITATES for key in ("epochs", "batch_size", "lr", "warmup_steps", "schedule", "target_loss")},
    **{f"algorithm.{key}": _needs("algorithm.kl_coef") for key in ("kl_estimator", "kl_in", "kl_target")},
    "algorithm.kl_horizon": _needs("algorithm.kl_target"),
    **{f"algorithm.settings.{key}": _COMPARES_STEPS for key in ("gamma", "anchor", "similarity")},
    "context.demo_summary": _needs("sft.demos"),
    "critic.value_clip": _UPDATES_AGAIN,
    "learner.target_kl": _UPDATES_AGAIN,
    "learner.min_lr_ratio": _needs(
        "learner.schedule", "critic.schedule", idle=(None, "constant"), which=" other than constant"
    ),
    "trainer.max_staleness": _needs("trainer.mode", idle=(None, "sync"), which="=async"),
}
