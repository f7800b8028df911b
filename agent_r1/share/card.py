"""The model card: what was trained, how, and with which results. Paths of this machine stay here."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import yaml

from agent_r1 import __version__
from agent_r1.config import PYTHON, RunConfig, recipe_name
from agent_r1.runs.run_dir import RunDir

CURVE = "curve.png"
GIVEN = re.compile(r"^agent_r1\.api\.given\.(\w+)_[0-9a-f]{8}$")  # an object that was given in Python
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
SHOWN = ("episode/steps", "episode/tool_calls", "episode/response_tokens")  # shown beside success and reward


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """The content of a folder's model card."""

    run: RunDir
    config: RunConfig
    step: int  # step of the checkpoint
    is_adapter: bool
    sees_pictures: bool
    base: str | None  # the hub id of the model that was trained, if it has one
    has_curve: bool
    place: str  # where others will find the folder: a hub id, or the folder's name


def model_card(about: About) -> str:
    config, name = about.config, recipe_name(about.config.recipe)
    where = "settings given in Python" if config.recipe == PYTHON else f"the recipe `{name}`"
    header = yaml.safe_dump(_header(about), sort_keys=False)
    parts = [
        f"---\n{header}---",
        f"# {about.run.path.name}",
        f"A language-model agent, trained for {about.step} steps of {config.algorithm.name} with "
        f"agent-r1 {__version__}, from {where}.",
        "## Results",
        _results(about),
        f"![Success over optimizer steps]({CURVE})" if about.has_curve else "",
        "## Use",
        _usage(about),
        "## Training",
        "Settings that differ from the defaults; `agent-r1.json` has all of them.",
        f"```yaml\n{yaml.safe_dump(changed_settings(config), sort_keys=False, allow_unicode=True)}```",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _header(about: About) -> dict[str, Any]:
    return {
        "library_name": "peft" if about.is_adapter else "transformers",
        **({} if about.base is None else {"base_model": about.base}),
        "pipeline_tag": "image-text-to-text" if about.sees_pictures else "text-generation",
        "tags": ["agent-r1", "reinforcement-learning", "agent", about.config.algorithm.name],
    }


def _results(about: About) -> str:
    """Success on held-out rows, before and after training and in later evaluations."""
    rows = []
    evaluated = [record for record in about.run.read_metrics("eval") if record["step"] <= about.step]
    chosen = {record["step"]: record for record in [*evaluated[:1], *evaluated[-1:]]}
    for step, record in chosen.items():
        rows.append([f"while training, step {step}", *_numbers(record)])
    for name, kept in about.run.evaluations().items():
        rows.append([f"`evals/{name}`, split {kept.subject.split}", *_numbers(kept.metrics)])
    if not rows:
        return "The run has no evaluations."
    return markdown_table(
        ["evaluation", "rows", "success", "reward", *(each.partition("/")[2] for each in SHOWN)], rows
    )


def _numbers(metrics: Mapping[str, Any]) -> list[str]:
    success = f"{metrics['success']:.1%} ± {metrics.get('success_stderr', 0.0):.1%}"
    others = [metrics.get(name) for name in ("reward/mean", *SHOWN)]
    return [f"{metrics['rows']:.0f}", success, *("" if value is None else f"{value:.2f}" for value in others)]


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in [columns, ["---"] * len(columns), *rows])


def _usage(about: About) -> str:
    folder = f'"{about.place}"'
    tools = ", ".join(str(_last(each)) for each in about.config.task.tools)
    needs = f" It was trained with the tools {tools}." if tools else ""
    whole = "AutoModelForImageTextToText" if about.sees_pictures else "AutoModelForCausalLM"
    if about.is_adapter and about.sees_pictures:  # peft has no class that finds the base of such a model
        imports = f"from peft import PeftModel\nfrom transformers import {whole}, AutoTokenizer"
        loader, again = f"PeftModel.from_pretrained({whole}.from_pretrained({about.base or 'BASE'!r}), {folder})", ""
    elif about.is_adapter:
        imports = "from peft import AutoPeftModelForCausalLM\nfrom transformers import AutoTokenizer"
        loader, again = f"AutoPeftModelForCausalLM.from_pretrained({folder})", ""
    else:
        imports = f"from transformers import {whole}, AutoTokenizer"
        loader, again = (
            f"{whole}.from_pretrained({folder})",
            f" `agent-r1 eval RUN --model {about.place}` repeats its evaluation.",
        )
    code = f"model = {loader}\ntokenizer = AutoTokenizer.from_pretrained({folder})"
    return f"```python\n{imports}\n\n{code}\n```\n\nThe chat template is the one of training.{needs}{again}"


def _last(tool: Any) -> Any:
    return without_paths(tool).rpartition(".")[2] if isinstance(tool, str) else next(iter(tool))


def changed_settings(config: RunConfig) -> dict[str, Any]:
    """The settings that are not the defaults, for people elsewhere."""
    tree = config.model_dump(mode="json", exclude_defaults=True)
    return {"recipe": recipe_name(config.recipe), **without_paths({k: v for k, v in tree.items() if k != "recipe"})}


def without_paths(value: Any) -> Any:
    """The value with absolute paths cut down to their last part, and objects of a notebook to their names."""
    if isinstance(value, str):
        value = GIVEN.sub(r"\1", value)
        return f".../{PurePath(value).name}" if value.startswith(("/", "~")) and "\n" not in value else value
    if isinstance(value, dict):
        return {key: without_paths(item) for key, item in value.items()}
    return [without_paths(item) for item in value] if isinstance(value, list) else value
