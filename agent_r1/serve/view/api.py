"""The questions that the page asks, as functions of plain parameters. Knows nothing of HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agent_r1.errors import ConfigError, did_you_mean
from agent_r1.runs.outcomes import EvalRecord
from agent_r1.serve.view.detail import batch_page, episode_page, newest_batch, text_of, tokens_of
from agent_r1.serve.view.dropped import dropped_page
from agent_r1.serve.view.library import Library, NotFound, OpenRun
from agent_r1.vision.picture_store import MEDIA_TYPES, PICTURES, find_picture

PAGE_ROWS = 200  # at most, of the table of episodes
Params = Mapping[str, str]


class Api:
    """Answers a question by its name, with what can be written as JSON."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._answers = {
            "runs": self.runs,
            "metrics": self.metrics,
            "statistics": self.statistics,
            "config": self.config,
            "evaluations": self.evaluations,
            "episodes": self.episodes,
            "episode": self.episode,
            "group": self.group,
            "batch": self.batch,
            "tokens": self.tokens,
            "dropped": self.dropped,
            "text": self.text,
        }

    def answer(self, name: str, params: Params) -> Any:
        if name not in self._answers:
            raise NotFound(f"unknown question {name[:40]!r}.{did_you_mean(name, self._answers)}")
        return self._answers[name](params)

    def runs(self, params: Params) -> dict[str, Any]:
        described = []
        for run in self._library.runs():
            try:
                described.append(run.describe())
            except NotFound:
                continue  # deleted in this moment
        return {"runs": described, "places": [str(place) for place in self._library.places]}

    def metrics(self, params: Params) -> dict[str, Any]:
        """Return the records from number `since` on. A new `generation` means: start over."""
        run = self._run(params)
        records = run.tail.update()
        since = _whole(params, "since")
        if params.get("generation", str(run.tail.generation)) != str(run.tail.generation):
            since = 0
        return {"generation": run.tail.generation, "since": since, "records": records[since:]}

    def statistics(self, params: Params) -> dict[str, Any]:
        run = self._run(params)
        run.episodes.refresh()
        return {"steps": run.episodes.statistics(run.success_reward), **run.episodes.progress}

    def config(self, params: Params) -> dict[str, Any]:
        return {"settings": _flatten(self._run(params).settings)}

    def evaluations(self, params: Params) -> dict[str, Any]:
        run = self._run(params)
        found = list[dict[str, Any]]()
        for path in sorted(run.reader.evals.glob("*.json")):
            try:
                record = EvalRecord.load(path)
                mean, error = record.mean_and_error("success")
            except (ValueError, KeyError) as problem:
                found.append({"name": path.stem, "problem": str(problem)})
                continue
            about = record.subject
            model = about.model.removeprefix(f"{run.reader.path}/")  # its own checkpoints without the way to the run
            found.append({"name": path.stem, "model": model, "split": about.split, "rows": len(record.outcomes),
                          "success": mean, "stderr": error, "panel": about.panel, "time": record.time})  # fmt: skip
        return {"evaluations": found}

    def episodes(self, params: Params) -> dict[str, Any]:
        run = self._run(params)
        run.episodes.refresh()
        limit = min(PAGE_ROWS, _whole(params, "limit", PAGE_ROWS))
        # `spread`: instead of a page, so many of all matches, evenly, the first and the last among them.
        found = run.episodes.find(params, offset=_whole(params, "offset"), limit=limit, spread="spread" in params)
        return {**found, **run.episodes.progress, "success_reward": run.success_reward}

    def episode(self, params: Params) -> dict[str, Any]:
        run = self._run(params)
        page = episode_page(run.reader, _text(params, "file"), _whole(params, "n"))
        return {**page, "success_reward": run.success_reward}

    def group(self, params: Params) -> dict[str, Any]:
        """Return the attempts at a row in one file, and the rows before and after it."""
        run, file, row = self._run(params), _text(params, "file"), _text(params, "row")
        attempts = run.episodes.group(file, row)
        if not attempts:
            raise NotFound(f"{file} of {run.name} has no row {row[:80]!r}")
        return {"attempts": attempts, **run.episodes.neighbours(file, row), "success_reward": run.success_reward}

    def batch(self, params: Params) -> dict[str, Any]:
        """Return the times of all episodes in one file; without a name, in the newest with training episodes."""
        run = self._run(params)
        return {**batch_page(run, params.get("file") or newest_batch(run)), "success_reward": run.success_reward}

    def tokens(self, params: Params) -> dict[str, Any]:
        file, n, step = _text(params, "file"), _whole(params, "n"), _whole(params, "step")
        part, start = params.get("part", "prompt"), _whole(params, "start")
        return tokens_of(self._run(params).reader, file, n, step=step, part=part, start=start)

    def dropped(self, params: Params) -> dict[str, Any]:
        """Return what a step no longer saw of the prompt and response before it."""
        file, n, step = _text(params, "file"), _whole(params, "n"), _whole(params, "step")
        return dropped_page(self._run(params).reader, file, n, step=step, start=_whole(params, "start"))

    def text(self, params: Params) -> dict[str, Any]:
        file, n, start = _text(params, "file"), _whole(params, "n"), _whole(params, "start")
        return text_of(self._run(params).reader, file, n, at=_text(params, "at"), start=start)

    def picture(self, run: str, name: str) -> tuple[bytes, str]:
        """Return a picture of a run and its media type."""
        path = find_picture(self._library.run(run).reader.path / "trajectories" / PICTURES, name)
        if path is None:
            raise NotFound(f"{run} has no picture {name[:40]!r}")
        return path.read_bytes(), MEDIA_TYPES[path.suffix]

    def _run(self, params: Params) -> OpenRun:
        return self._library.run(_text(params, "run"))


def _text(params: Params, name: str) -> str:
    if not params.get(name):
        raise ConfigError(f"{name} is missing")
    return params[name]


def _whole(params: Params, name: str, default: int = 0) -> int:
    text = params.get(name) or str(default)
    if not (text.isascii() and text.isdecimal() and len(text) < 16):
        raise ConfigError(f"{name} must be an integer, got {text[:40]!r}")
    return int(text)


def _flatten(tree: Any, name: str = "") -> dict[str, Any]:
    """Return the settings by their dotted names."""
    if not isinstance(tree, dict) or not tree:
        return {name: tree}
    return {key: value for part in tree for key, value in _flatten(tree[part], f"{name}{name and '.'}{part}").items()}
