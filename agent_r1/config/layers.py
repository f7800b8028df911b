"""What people wrote, in layers: a recipe's YAML, presets on top of it, `key=value` overrides on top of those.

Knows how layers are read and merged, and which settings go together; what a setting may be is `config.py`'s business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from agent_r1.errors import ConfigError, did_you_mean
from agent_r1.places import anchored

MAX_NESTING = 30  # levels of a config; OmegaConf and pydantic fail at about a hundred without naming the place
MAX_DIGITS = 309  # of a number: no float is longer
DEFAULT_ENGINE = "local"  # what settings of the engine belong to if they do not name a kind
Tree = dict[str, Any]  # section -> key -> value, as people wrote it
WARM_START = ("sft.demos", "sft.trajectories")
NEEDS: dict[str, Sequence[str]] = {  # a setting -> what it does nothing without
    "sft.count": ["sft.demos"],
    "sft.min_reward": ["sft.trajectories"],
    "sft.max_per_row": ["sft.trajectories"],
    **{f"sft.{key}": WARM_START for key in ("epochs", "batch_size", "lr", "warmup_steps", "schedule", "target_loss")},
    **{f"algorithm.{key}": ["algorithm.kl_coef"] for key in ("kl_estimator", "kl_in", "kl_target")},
    "algorithm.kl_horizon": ["algorithm.kl_target"],
    "context.demo_summary": ["sft.demos"],
}
SEVERAL_UPDATES = "learner.num_epochs or learner.num_minibatches above 1"
STEP_COMPARISON = [f"algorithm.settings.{name}" for name in ("gamma", "anchor", "similarity")]
REPLACES = {  # a setting -> the one whose place it takes
    "model.path": "model.make",
    "model.make": "model.path",
    "sft.demos": "sft.trajectories",
    "sft.trajectories": "sft.demos",
}


def read_overrides(overrides: Sequence[str]) -> DictConfig:
    for item in overrides:
        key, equals, _ = item.partition("=")
        if key.count(".") > MAX_NESTING:
            raise ConfigError(f"override {key[:60]}...: the name has more than {MAX_NESTING} parts")
        if not equals or not key.strip():
            raise ConfigError(f"override {item!r} is not of the form section.key=value, for example trainer.steps=20")
        try:
            _check_size(item.partition("=")[2], f"override {item[:60]}")
            OmegaConf.from_dotlist([item])
        except ConfigError:
            raise
        except (OmegaConfBaseException, YAMLError, ValueError) as error:
            quoted = f'{key}="..."' if "{" in item or "[" in item else ""
            hint = f". Text with brackets is quoted, once more than for the shell: '{quoted}'" if quoted else ""
            raise ConfigError(f"override {item!r} cannot be read: {error}{hint}") from error
    with _shapes_told("the overrides"):
        return OmegaConf.from_dotlist(list(overrides))


def split_presets(recipe: str) -> tuple[str, list[str]]:
    """`alfworld/hints+gigpo`: the first preset, and the names of those on top of it."""
    folder, slash, name = recipe.rpartition("/")
    first, *others = [name] if anchored(recipe).exists() else name.split("+")  # a file may be called a+b.yaml
    return f"{folder}{slash}{first}", others


def read_layers(path: Path, presets: Sequence[str] = ()) -> list[DictConfig]:
    """The layers of a file: itself, or what it changes on top of its `base`. Then those of `presets` beside it."""
    layers, base = _with_base(path)
    for name in presets:
        file = path.with_name(name if name.endswith((".yaml", ".yml")) else f"{name}.yaml")
        if not file.is_file():
            known = [other.stem for other in path.parent.glob("*.yaml") if other not in (base, path)]
            raise ConfigError(f"there is no preset {name!r} beside {path}.{did_you_mean(name, known)}")
        added, other_base = _with_base(file)
        if len(added) < 2 or other_base != base:
            raise ConfigError(
                f"{path.name} and {file.name} cannot be combined: {file.name} is not a preset of {base.name}"
            )
        layers.append(added[-1])
    return layers


def _with_base(path: Path) -> tuple[list[DictConfig], Path]:
    """The layers of a file, and the whole description among them."""
    described = _read_yaml(path)
    if "base" not in described:
        return [described], path
    base = described.pop("base")
    beneath = path.parent / str(base)
    if beneath == path or not beneath.is_file():
        raise ConfigError(f"{path}: base={base!r} must name another YAML file in the same folder")
    basis = _read_yaml(beneath)
    if "base" in basis:
        raise ConfigError(
            f"{path}: its base {base!r} is a preset itself. Name that one's base, and combine the two when you run "
            f"them: {Path(str(base)).stem}+{path.stem}"
        )
    return [basis, described], beneath


@contextmanager
def _shapes_told(what: str) -> Iterator[None]:
    """OmegaConf has no error of its own for a list that meets a section."""
    try:
        yield
    except (TypeError, ValueError) as error:
        lists = "a list is written whole, as learner.betas=[0.9,0.95], and only where one is asked for"
        raise ConfigError(f"{what} cannot be put together: {error}; {lists}") from error


def merge_layers(layers: Sequence[DictConfig]) -> list[Any]:
    """What each layer makes of those before it. A setting that takes the place of another turns that one off, and an
    algorithm, context policy or engine that takes the place of another does not inherit its settings."""
    stages: list[Any] = [OmegaConf.create()]
    for layer in layers:
        said = plain(layer, resolve=False)
        below, before = stages[-1].copy(), plain(stages[-1], resolve=False)
        name = _value(said, "algorithm.name")
        if name not in (None, _value(before, "algorithm.name")) and _value(before, "algorithm.settings"):
            below.algorithm.settings = {}
        policy, other = _value(said, "context.policy"), _value(before, "context.policy")
        if None not in (policy, other) and policy != other:
            below.context = {}
        kind = _value(said, "engine.kind")
        if kind not in (None, _value(before, "engine.kind") or DEFAULT_ENGINE):
            below.engine = {}
        off = [f"{other}=null" for setting, other in REPLACES.items() if _value(said, setting) is not None]
        with _shapes_told("the settings"):
            stages.append(OmegaConf.merge(below, OmegaConf.from_dotlist(off), layer))
    return stages[1:]


def _read_yaml(path: Path) -> DictConfig:
    try:
        _check_size(path.read_text(encoding="utf-8"), str(path))
        tree = OmegaConf.load(path)
    except ConfigError:
        raise
    except (OmegaConfBaseException, YAMLError, OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(tree, DictConfig):
        raise ConfigError(f"{path} must hold a mapping of sections, not {type(tree).__name__}")
    return tree


def _check_size(text: str, place: str) -> None:
    """Refuse valid YAML that would crash OmegaConf or pydantic, and name the line."""
    depth = 0
    for event in yaml.parse(text):
        opens, closes = (yaml.CollectionStartEvent, yaml.CollectionEndEvent)
        depth += isinstance(event, opens) - isinstance(event, closes)
        line = f"{place} line {event.start_mark.line + 1}"
        if depth > MAX_NESTING:
            raise ConfigError(f"{line}: lists and sections are nested more than {MAX_NESTING} levels deep")
        if isinstance(event, yaml.ScalarEvent) and len(event.value) > MAX_DIGITS and event.value.lstrip("+-").isdigit():
            raise ConfigError(f"{line}: a number of {len(event.value):,} digits; at most {MAX_DIGITS} are allowed")


def plain(tree: Any, *, resolve: bool) -> Tree:
    made = OmegaConf.to_container(tree, resolve=resolve)
    assert isinstance(made, dict)
    return {str(key): value for key, value in made.items()}


def check_idle(layers: Sequence[Any], stages: Sequence[Any]) -> None:
    """Refuse settings that do nothing where they are given.

    What a layer says is not to blame when a later one turned off what it belongs to (`sft.demos=null`). Only what
    people wrote is looked at, never a run's config.json, which holds every field.
    """
    written, made = ([plain(tree, resolve=False) for tree in trees] for trees in (layers, stages))
    for setting, (needed, is_there) in _rules().items():
        idle = [not is_there(stage) for stage in made]
        given = [_value(layer, setting) is not None for layer in written]
        if idle[-1] and any(said and did_nothing for said, did_nothing in zip(given, idle, strict=True)):
            raise ConfigError(f"{setting} does nothing without {needed}; set that or leave {setting} out")


def _rules() -> dict[str, tuple[str, Callable[[Tree], bool]]]:
    """A setting -> what it does nothing without: in words, and whether a tree has it."""
    return {
        **{setting: (" or ".join(names), partial(_has_any, names)) for setting, names in NEEDS.items()},
        **dict.fromkeys(("critic.value_clip", "learner.target_kl"), (SEVERAL_UPDATES, _updates_again)),
        "learner.min_lr_ratio": ("learner.schedule or critic.schedule other than constant", _decays),
        **dict.fromkeys(STEP_COMPARISON, ("algorithm.settings.step_weight", _compares_steps)),
    }


def _has_any(names: Sequence[str], tree: Tree) -> bool:
    return any(_value(tree, name) for name in names)


def _updates_again(tree: Tree) -> bool:
    return any(_value(tree, f"learner.{name}") not in (None, 1) for name in ("num_epochs", "num_minibatches"))


def _decays(tree: Tree) -> bool:
    return any(_value(tree, f"{section}.schedule") not in (None, "constant") for section in ("learner", "critic"))


def _compares_steps(tree: Tree) -> bool:
    """Of gigpo alone: others have no step_weight."""
    return bool(_value(tree, "algorithm.settings.step_weight") != 0)


def _value(tree: Tree, setting: str) -> Any:
    found: Any = tree
    for key in setting.split("."):
        found = found.get(key) if isinstance(found, dict) else None
    return found
