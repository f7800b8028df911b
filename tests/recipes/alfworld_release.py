"""A small release of ALFWorld games as a file tree: synthetic games of all splits, with placeholder rules."""

from __future__ import annotations

import io
import json
import tarfile
import zipfile
from pathlib import Path
from typing import Any, Literal

import pytest

from agent_r1.recipes.alfworld import data, synthetic
from agent_r1.recipes.alfworld.game import TASK_TYPES

Files = dict[str, bytes]
COMPRESSED: dict[str, Literal["w:xz", "w:gz"]] = {".xz": "w:xz", ".txz": "w:xz", ".tgz": "w:gz"}


def synthetic_release(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Files:
    """One training game of each kind and one game of every other split, with others that the loader leaves out.

    The one mug is on the counter in the training games, and in the cabinet in all others.
    """
    monkeypatch.setenv("AGENT_R1_DATA", str(cache))
    monkeypatch.setattr(data, "DOMAIN", data.short_hash(b"the domain"))
    monkeypatch.setattr(data, "GRAMMAR", data.short_hash(b'"rhs": ""'))
    files: Files = {}
    for index, split in enumerate(("train",) * 6 + ("valid_train", "valid_seen", "valid_unseen")):
        kind = TASK_TYPES[index % 6]
        mug = "CounterTop" if split == "train" else "Cabinet"
        facts = synthetic.kitchen({"Mug_bar_1": mug, "DeskLamp_bar_1": "Desk"})
        problem = synthetic.write_problem(facts, synthetic.GOALS[kind].format(thing="Mug", place="Desk"))
        name = f"json/{split}/{kind}-Mug-None-Desk-1/trial_{index}/{data.RELEASED}"
        sentence = synthetic.SENTENCES[kind].format(thing="mug", place="desk")
        files[name] = _file(problem, f"Your task is to: {sentence}", ["go to countertop 1"])
        files[name.replace("trial_", "unsolvable_")] = _file(problem, "Your task is to: x.", [], solvable=False)
        files[name.replace("Mug-None", "MugSliced-None")] = _file(problem, "Your task is to: x.", [])
        files[name.replace(kind, "pick_and_place_with_movable_recep")] = _file(problem, "Your task is to: x.", [])
    return files


def _file(problem: str, said: str, steps: list[str], **changed: Any) -> bytes:
    game = {"pddl_domain": "the domain", "grammar": f'"rhs": "{said}"', "pddl_problem": problem}
    return json.dumps({**game, "solvable": True, "walkthrough": steps, **changed}).encode()


def write_tree(files: Files, folder: Path) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def write_archive(files: Files, file: Path) -> Path:
    """As its suffix says."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".zip":
        with zipfile.ZipFile(file, "w") as archive:
            for name, content in files.items():
                archive.writestr(name, content)
    else:
        with tarfile.open(str(file), COMPRESSED[file.suffix]) as packed:
            for name, content in files.items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                packed.addfile(member, io.BytesIO(content))
    return file
