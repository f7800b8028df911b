"""A run as a Python object: its numbers, pictures and episodes, an agent to talk to, and evaluations."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Unpack

from agent_r1.api.agent import Agent
from agent_r1.api.inputs import rows_name
from agent_r1.api.results import EvalResult, Picture, Transcript
from agent_r1.api.resume import stored_config
from agent_r1.api.screen import screen
from agent_r1.api.settings import Settings, read_keywords
from agent_r1.api.threads import apart
from agent_r1.cli.commands.play import run_eval
from agent_r1.cli.commands.train import draw_curve
from agent_r1.cli.display import eval_summary
from agent_r1.cli.terminal import Interrupted
from agent_r1.config import RunConfig, parse_config
from agent_r1.errors import ConfigError, DataError
from agent_r1.places import anchored
from agent_r1.runs.reader import latest_checkpoint
from agent_r1.runs.run_dir import RunDir
from agent_r1.runs.trajectories import trajectory_from_json
from agent_r1.types import TaskRow

PICTURES = "pictures"


class Run:
    """A training run on disk. `stopped` says that Ctrl-C ended it before its last step."""

    def __init__(self, directory: RunDir, config: RunConfig | None = None, *, stopped: bool = False) -> None:
        self._directory = directory
        self._config = config
        self.stopped = stopped

    @property
    def path(self) -> Path:
        return self._directory.path

    @property
    def config(self) -> RunConfig:
        return self._config or parse_config(self._directory.settings)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """All records of metrics.jsonl: of each step (`kind` "train") and each evaluation ("eval")."""
        return self._directory.read_metrics()

    @property
    def checkpoint(self) -> Path:
        """The newest checkpoint, a Hugging Face directory."""
        return latest_checkpoint(self._directory.checkpoints)[1]

    def plot(self) -> Picture:
        """Draw success over steps. A notebook shows the result; it is also a file, `RUN/curve.png`."""
        if not self.metrics:
            raise DataError(f"{self._directory} has no metrics yet: no step was finished")
        return Picture(draw_curve(self._directory, self.config))

    def transcript(self, index: int = 0, *, step: int | None = None, kind: str = "eval") -> Transcript:
        """Return an episode of the last evaluation or, with `kind="train"`, of the last training step; `step` chooses
        another."""
        files = self._directory.files(kind)
        if step is not None:
            wanted = self._directory.trajectories_file(kind, step).name
            files = [file for file in files if file.path.name == wanted]
        if not files:
            raise DataError(f"{self._directory} has no {kind} episodes{'' if step is None else f' of step {step}'}")
        file = files[-1]
        record = file[index]
        row = TaskRow(prompt=record["row"]["prompt"], row_id=record["row_id"])
        return Transcript(row, trajectory_from_json(record, file.path.parent / PICTURES))

    def evaluate(
        self,
        *,
        rows: Any = None,
        split: str | None = None,
        model: str | Path | None = None,
        name: str | None = None,
        quiet: bool = False,
        **sampling: Any,
    ) -> EvalResult:
        """Evaluate the newest checkpoint, or another `model`, on the held-out rows, or on `rows` (a list).

        `sampling` are settings of the section eval, such as `samples=4, temperature=1.0`; `limit=50` plays the first 50
        rows. The result is kept in `RUN/evals`, as by `agent-r1 eval`.
        """
        config = _for_evaluation(self.config, rows, split, sampling)
        given, console = None if model is None else str(model), screen(quiet=quiet)
        try:
            return EvalResult.of(apart(lambda: run_eval(config, self._directory, console, model=given, name=name)))
        except Interrupted:
            raise KeyboardInterrupt from None

    def agent(self) -> Agent:
        """Load the newest checkpoint as an agent: `await run.agent()("How many ...?")`."""
        return Agent(self.config, str(self.path))

    def view(self, *, port: int = 0) -> Viewer:
        """Start the viewer of this run in the background, as `agent-r1 view` does, and return its link.

        As the last line of a notebook's cell, it also shows the page as it is now, if the run is not too large.
        """
        return Viewer(self.path, port=port)

    def export(self, directory: str | Path, *, merge: bool = False, gguf: str | None = None) -> Path:
        """Write the newest checkpoint for others, as `agent-r1 export` does: weights, tokenizer, model card."""
        from agent_r1.share.folder import export_run

        return export_run(self._directory, anchored(directory), report=print, merge=merge, gguf=gguf)

    def push(self, hub_id: str, *, merge: bool = False, gguf: str | None = None, public: bool = False) -> str:
        """Upload what `export` writes to the Hugging Face hub, as `agent-r1 push` does."""
        from agent_r1.share.hub import push_run

        return push_run(self._directory, hub_id, report=print, merge=merge, gguf=gguf, public=public)

    def __repr__(self) -> str:
        evaluated = self._directory.read_metrics("eval")
        result = f", success {eval_summary(evaluated[-1])} at step {evaluated[-1]['step']}" if evaluated else ""
        return f"Run({str(self._directory)!r}{result}{', stopped' if self.stopped else ''})"


class Viewer:
    """A viewer that runs until the process ends."""

    def __init__(self, path: Path, *, port: int) -> None:
        from agent_r1.serve.view.library import Library
        from agent_r1.serve.view.server import serve

        self._path = path
        link: Future[str] = Future()

        def run() -> None:
            try:
                serve(Library([path]), host="127.0.0.1", port=port, announce=link.set_result)
            except BaseException as error:  # noqa: BLE001 (raised below, in the caller's thread)
                link.set_exception(error)

        threading.Thread(target=run, name="agent-r1 view", daemon=True).start()
        self.url = link.result()

    def __repr__(self) -> str:
        return self.url

    def _repr_html_(self) -> str:
        from agent_r1.serve.view.export import inline_frame
        from agent_r1.serve.view.library import Library

        frame = inline_frame(Library([self._path]))
        return f'{frame or ""}<p><a href="{self.url}" target="_blank">{self.url}</a> follows the run.</p>'


def load_run(path: str | Path, **keywords: Unpack[Settings]) -> Run:
    """Open a run. Numbers, plots and transcripts need nothing else.

    To evaluate or to talk to its agent, tools, rewards and rows that were defined in Python must be given again, with
    the keywords of `train`.
    """
    directory = RunDir.open(Path(path))
    config, _ = stored_config(directory, read_keywords(keywords))
    return Run(directory, config)


def _for_evaluation(config: RunConfig, rows: Any, split: str | None, sampling: Mapping[str, Any]) -> RunConfig:
    tree = config.model_dump()
    if rows is not None and split is not None:
        raise ConfigError(f"split={split!r} has no effect with rows: leave one of them out")
    if rows is not None:
        is_list = not callable(rows) and not isinstance(rows, str | Path | Mapping)
        tree["task"] |= {"rows": rows_name({config.task.test_split: rows} if is_list else rows)}
    if split is not None:
        tree["task"] |= {"test_split": split}
    given = {"rows" if name == "limit" else name: value for name, value in sampling.items()}
    tree["eval"] |= given
    return parse_config(tree)
