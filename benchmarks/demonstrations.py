"""Lengths of a recipe's demonstrations in tokens of its model, for choosing its limits.

    python -m benchmarks.demonstrations webshop --set data.path=DIR --set sft.count=300

They are played as in the warm start: those that exceed the limits are excluded and counted.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from statistics import fmean

from transformers import AutoTokenizer

from agent_r1.build.models.source import as_directory, find_model
from agent_r1.build.recipe import recipe_path
from agent_r1.build.start import sft_trajectories
from agent_r1.build.task import build_task
from agent_r1.config import load_config
from agent_r1.errors import ConfigError
from agent_r1.tokens.rendering import Renderer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--set", action="append", default=[], help="override of the recipe")
    options = parser.parse_args()
    config = load_config(options.recipe, options.set)
    if config.model.path is None or config.sft.demos is None:
        raise ConfigError(
            f"{options.recipe} has no model.path or no sft.demos: there is nothing to count, or nothing with"
        )
    tokenizer = AutoTokenizer.from_pretrained(as_directory(find_model(config.model.path), print))
    template = config.model.chat_template
    written = None if template is None else recipe_path(template, recipe=config.recipe).read_text(encoding="utf-8")
    renderer = Renderer(tokenizer, chat_template=written, template_kwargs=config.model.template_kwargs)
    played = asyncio.run(sft_trajectories(config, build_task(config), renderer, print))
    steps = [step for trajectory in played for step in trajectory.steps]
    show("steps of an episode", [len(trajectory.steps) for trajectory in played])
    show("first prompt", [len(trajectory.steps[0].prompt_ids) for trajectory in played])
    show("longest context", [max(len(s.prompt_ids) + len(s.response_ids) for s in t.steps) for t in played])
    show("response", [len(step.response_ids) for step in steps])


def show(name: str, counts: Sequence[int]) -> None:
    ordered = sorted(counts)
    nearly_all = ordered[int(0.99 * len(ordered))]
    print(f"{name:20} mean {fmean(ordered):7.1f}   99 % {nearly_all:6}   most {ordered[-1]:6}   of {len(ordered)}")


if __name__ == "__main__":
    main()
