"""A small sound recipe, whose settings choose one of many faults in its code, and what doctor says about it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agent_r1.recipes.quickstart.tiny import CHAT_TEMPLATE
from tests.chatml import TEMPLATE
from tests.conftest import Cli

SHOWS_TOOLS = CHAT_TEMPLATE.read_text(encoding="utf-8")
FORGETS = TEMPLATE.replace("for m in messages", "for m in messages[-1:]")  # what was said before

YAML = {
    "task": {"rows": "task.rows", "tools": ["task.look_up"], "reward": "task.reward"},
    "model": {"make": "task.make_model", "device": "cpu"},
    "sft": {"demos": "task.demos", "count": 6, "epochs": 1, "batch_size": 4},
    "rollout": {
        "rows_per_step": 2,
        "group_size": 2,
        "max_steps": 3,
        "max_response_tokens": 64,
        "max_context_tokens": 512,
    },
    "engine": {"threads": 1, "max_cached_tokens": 16384},
    "trainer": {"steps": 2, "eval_every": 2, "save_every": 1, "threads": 1},
    "eval": {"rows": None},
}


@dataclass(frozen=True)
class Diagnosis:
    code: int
    findings: list[dict[str, str]]

    def levels(self, name: str) -> list[str]:
        return [each["level"] for each in self.findings if each["name"] == name]

    @property
    def bad(self) -> list[tuple[str, str]]:
        return [(each["level"], each["name"]) for each in self.findings if each["level"] != "green"]

    def evidence(self, name: str) -> str:
        return " ".join(each["evidence"] for each in self.findings if each["name"] == name)


def write_recipe(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(Path(__file__).with_name("faulty_task.py"), folder / "task.py")
    (folder / "base.yaml").write_text(json.dumps(YAML), encoding="utf-8")  # JSON is YAML
    (folder / "forgets.jinja").write_text(FORGETS, encoding="utf-8")
    (folder / "hides_tools.jinja").write_text(TEMPLATE, encoding="utf-8")
    hides_results = SHOWS_TOOLS.replace("for message in messages", 'for message in messages if message.role != "tool"')
    (folder / "hides_results.jinja").write_text(hides_results, encoding="utf-8")
    other_calls = SHOWS_TOOLS.replace('"<tool_call>\\n"', '"(call "').replace('"\\n</tool_call>"', '")"')
    (folder / "other_calls.jinja").write_text(other_calls, encoding="utf-8")
    (folder / "other_end.jinja").write_text(TEMPLATE.replace("<|im_end|>", "###"), encoding="utf-8")
    return folder


def diagnose(cli: Cli, recipe: Path | str, settings: Sequence[str] = ()) -> Diagnosis:
    ended = cli("doctor", str(recipe), *settings, "--rows", "4", "--json")
    assert ended.err == ""
    return Diagnosis(ended.code, json.loads(ended.out))
