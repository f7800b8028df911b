"""What policies without a language model earn on the held-out rows of the recipe `forecast`.

    python -m benchmarks.forecast        # writes results/forecast_fixed.json, and the table into the recipe's README

Each model alone; the model with the smallest error on the hold-out window; the rule of thumb that some demonstrations
follow; and the best model in hindsight, which no policy can know.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean
from typing import Any

from agent_r1.config import RECIPES, load_config
from agent_r1.recipes.forecast import analysis, task
from agent_r1.recipes.forecast.models import MODELS
from agent_r1.runs.statistics import standard_error
from agent_r1.types import TaskRow
from benchmarks.machine import RESULTS, machine
from benchmarks.recipes import fill, keep, markdown

OUT = RESULTS / "forecast_fixed.json"
TITLES = {"test": "generated", "real_test": "bundled"}
Choose = Callable[[TaskRow, dict[str, Any]], str]


def scores(row: TaskRow, model: str) -> tuple[float, float]:
    """Reward and MASE of the model's forecast."""
    known = row.env_kwargs["tools_kwargs"]["series"]
    rounded = [round(float(value), task.DIGITS) for value in analysis.predict(model, **known)]
    parts = task.judge(row, rounded)
    return parts["reward"], parts["mase"]


def by_holdout(row: TaskRow, known: dict[str, Any]) -> str:
    return min(MODELS, key=lambda model: analysis.holdout_error(model, **known))


def in_hindsight(row: TaskRow, known: dict[str, Any]) -> str:
    return max(MODELS, key=lambda model: scores(row, model)[0])


def always(model: str) -> Choose:
    return lambda row, known: model


def policies() -> dict[str, Choose]:
    return {f"`{model}`": always(model) for model in MODELS} | {
        "smallest hold-out error": by_holdout,
        "rule of thumb": lambda row, known: task.rule_of_thumb(known),
        "best in hindsight": in_hindsight,
    }


def measure(rows: list[TaskRow], choose: Choose, success_reward: float) -> dict[str, float]:
    earned = [scores(row, choose(row, row.env_kwargs["tools_kwargs"]["series"])) for row in rows]
    rewards, errors = zip(*earned, strict=True)
    return {
        "rows": len(rows),
        "success": fmean(float(reward >= success_reward) for reward in rewards),
        "reward": fmean(rewards),
        "reward_stderr": standard_error(rewards),
        "mase": fmean(errors),
        "mase_stderr": standard_error(errors),
    }


def table(results: dict[str, dict[str, dict[str, float]]]) -> str:
    titles = ["policy"]
    for split in results:
        titles += [f"success, {TITLES[split]}", "reward", "MASE"]
    lines = [titles]
    for name in results["test"]:
        line = [name]
        for found in (results[split][name] for split in results):
            line += [f"{found['success']:.1%}", f"{found['reward']:.3f} ± {found['reward_stderr']:.3f}"]
            line += [f"{found['mase']:.3f} ± {found['mase_stderr']:.3f}"]
        lines.append(line)
    return markdown(lines)


def main() -> None:
    config = load_config("forecast")
    assert config.eval.rows is not None
    splits = {"test": task.rows("test", config.eval.rows), "real_test": task.rows("real_test", config.eval.rows)}
    results = {
        split: {name: measure(rows, choose, config.task.success_reward) for name, choose in policies().items()}
        for split, rows in splits.items()
    }
    facts = {"command": "python -m benchmarks.forecast", **machine()}
    keep(OUT, facts | {"results": results})
    written = table(results)
    print(written)
    told = f"Mean ± standard error over rows; commit `{facts['commit']}`: `{facts['command']}`"
    fill(RECIPES / "forecast" / "README.md", OUT.name, f"\n{written}\n\n{told}\n")


if __name__ == "__main__":
    main()
