"""Continue existing runs: supply their Python objects again, and change the settings that may change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agent_r1.api.given import stem
from agent_r1.api.settings import Tree
from agent_r1.cli.train_command import RESUME_SETTINGS, flatten
from agent_r1.config import RunConfig, parse_config
from agent_r1.errors import ConfigError
from agent_r1.runs.run_dir import RunDir

RECREATED = ("sft.count",)  # follows from other keywords


def stored_config(directory: RunDir, tree: Tree) -> tuple[RunConfig, list[str]]:
    """Return the config of a run with the settings of `tree`, and the names of objects that have changed since.

    Settings may be repeated. Objects that were defined in Python may be given again, even in a changed form. Other
    settings may differ only if `agent-r1 train --resume` may change them.
    """
    stored = directory.settings
    config = parse_config(_merged(stored, tree))
    before, after = flatten(parse_config(stored).model_dump(mode="json")), flatten(config.model_dump(mode="json"))
    changed = []
    for name in {**before, **after}:
        old, new = before.get(name), after.get(name)
        if old == new or name in (*RESUME_SETTINGS, *RECREATED):
            continue
        if not _is_same_object(old, new):
            raise ConfigError(
                f"{directory} was started with {name}={_shown(old)}, not {_shown(new)}: only "
                f"{', '.join(RESUME_SETTINGS)} can be changed for an existing run"
            )
        changed.append(name)
    return config, changed


def _merged(stored: Any, given: Any) -> Any:
    """Settings on top of stored ones. Lists and other single values are replaced as a whole."""
    if not isinstance(stored, Mapping) or not isinstance(given, Mapping):
        return given
    return {**stored, **{key: _merged(stored.get(key), value) for key, value in given.items()}}


def _is_same_object(old: Any, new: Any) -> bool:
    """Whether these are two versions of one object, or of one list of objects."""
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(a == b or _is_same_object(a, b) for a, b in zip(old, new, strict=True))
    return isinstance(old, str) and isinstance(new, str) and stem(old) is not None and stem(old) == stem(new)


def _shown(value: Any) -> Any:
    return stem(value) or value if isinstance(value, str) else value
