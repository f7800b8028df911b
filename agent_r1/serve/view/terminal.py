"""The viewer in the terminal: a run with its curves and episodes, or one episode with its tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from agent_r1.errors import ConfigError, DataError, did_you_mean
from agent_r1.runs.reader import RunReader
from agent_r1.serve.terminal_pictures import show_pictures
from agent_r1.serve.view.detail import episode_page
from agent_r1.serve.view.index.columns import thin
from agent_r1.serve.view.index.episodes import wait_until_read
from agent_r1.serve.view.library import OpenRun
from agent_r1.types import StopReason
from agent_r1.vision.contents import picture_mark
from agent_r1.vision.picture_store import PICTURES, load_picture

READ_SECONDS = 3600.0
BARS = "▁▂▃▄▅▆▇█"
CURVE_WIDTH = 24
TEXT_CHARS = 4_000  # of a message; the page of `agent-r1 view` shows all
CURVES = (
    ("eval", "success"), ("train", "reward/mean"), ("train", "success"), ("train", "episode/steps"),
    ("train", "episode/tool_calls"), ("train", "episode/response_tokens"), ("train", "entropy"),
    ("train", "kl_to_reference"), ("train", "mismatch_kl"), ("train", "grad_norm"), ("sft", "loss"),
)  # fmt: skip


def open_run(path: Path) -> OpenRun:
    reader = RunReader.open(path)  # refuses what is not a run
    return OpenRun(reader.path.name, reader.path)


def show_run(path: Path, console: Console, *, filters: Mapping[str, str], limit: int) -> None:
    """Print what the run is, its curves, and a list of episodes."""
    run = open_run(path)
    about = run.describe()
    facts = [about["recipe"], about["algorithm"], f"seed {about['seed']}", f"step {about['steps']}", about["status"]]
    console.print(Text.assemble((run.name, "bold"), "  ", (", ".join(str(fact) for fact in facts if fact), "dim")))
    records = run.tail.update()
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("metric", no_wrap=True)
    for name in ("first", "last"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for kind, key in CURVES:
        values = [float(r[key]) for r in records if r["kind"] == kind and isinstance(r.get(key), int | float)]
        if values:
            curve = Text(_spark(values), "cyan")
            table.add_row(f"{kind} {key}", _number(values[0]), _number(values[-1]), curve)
    console.print(table if table.row_count else Text("no metrics yet", "dim"))
    wait_until_read(run.episodes, READ_SECONDS)
    found = run.episodes.find(filters, offset=0, limit=limit)
    console.print()
    if not found["rows"]:
        console.print(Text("no episode matches" if run.episodes.progress["total"] else "no episodes were kept", "dim"))
        return
    console.print(_episode_table(found["rows"], run.success_reward, console.width))
    first = found["rows"][0]
    hint = f"{found['matches']:,} episodes match; read one: agent-r1 show {run.reader} {first['file']}/{first['n']}"
    console.print(Text(hint, "dim"), soft_wrap=True)


def _episode_table(rows: Sequence[Mapping[str, Any]], success_reward: float, width: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    names = [f"{row['file']}/{row['n']}" for row in rows]
    table.add_column("episode", no_wrap=True)
    for name in ("reward", "stop", "steps", "calls", "tokens"):
        table.add_column(name, justify="left" if name in ("reward", "stop") else "right", no_wrap=True)
    left = max(24, width - max(map(len, names)) - 52)  # for the texts; rich would shrink the numbers instead
    table.add_column("question", overflow="ellipsis", no_wrap=True, max_width=left * 3 // 5)
    table.add_column("answer", overflow="ellipsis", no_wrap=True, max_width=left * 2 // 5)
    for name, row in zip(names, rows, strict=True):
        table.add_row(
            name,
            _reward(row["reward"], row["outcome"], row["stop"], success_reward),
            row["stop"],
            *(str(row[key]) for key in ("steps", "calls", "tokens")),
            Text(row["question"]),
            Text(row["answer"]),
        )
    return table


def show_episode(path: Path, name: str, console: Console, *, tokens: str | None) -> None:
    """Print one episode. `name` is FILE/N, as the list prints it, or a trajectory id."""
    run = open_run(path)
    file, _, position = name.rpartition("/")
    if not file or not position.isdecimal():
        file, position = _find(run, name)
    page = episode_page(run.reader, file, int(position))
    known = {key for step in page["steps"] for key in step["tokens"]["values"]}
    if tokens is not None and tokens not in known:
        raise ConfigError(f"--tokens {tokens}: not recorded for these tokens.{did_you_mean(tokens, known)}")
    for message in page["messages"]:
        console.print(_panel(message["role"], _clipped(message["text"]), "dim"))
        _show_pictures(run, message["pictures"], console)
    values = [value for step in page["steps"] for value in _numbers(step["tokens"]["values"].get(tokens))]
    scale = math.log(2) if tokens == "ratio" else max(map(abs, values), default=0.0)
    for index, step in enumerate(page["steps"]):
        console.print(_step_panel(step, index, tokens, scale))
        _show_pictures(run, [name for call in step["calls"] for name in call["pictures"]], console)
        if step["feedback"]["text"] and not step["calls"]:
            console.print(_panel("environment", _clipped(step["feedback"]), "dim"))
        _show_pictures(run, step["pictures"], console)
    if page["log"]["text"]:
        console.print(_panel("log", _clipped(page["log"]), "dim"))
    if page["error"]:
        console.print(_panel("failure", Text(page["error"]), "red"))
    result = _reward(page["reward"], page["outcome"], page["stop"], run.success_reward)
    parts = "".join(f", {key} {_number(value)}" for key, value in page["components"].items() if key != "reward")
    truth = page["ground_truth"]["text"]
    console.print(Text.assemble("reward ", result, f"{parts}, {page['stop']}, {page['seconds']:.2f} s"))
    if truth:
        console.print(Text(f"expected {truth[:TEXT_CHARS]}", "dim"))


def _show_pictures(run: OpenRun, names: Sequence[str], console: Console) -> None:
    folder = run.reader.path / "trajectories" / PICTURES
    for name in names:
        try:
            show_pictures([load_picture(folder, name)], console)
        except (DataError, OSError):
            console.print(Text(f"{picture_mark(name)} is missing", "dim"))


def _find(run: OpenRun, identity: str) -> tuple[str, str]:
    wait_until_read(run.episodes, READ_SECONDS)
    found = run.episodes.find({"text": identity}, offset=0, limit=200)["rows"]
    for row in found:
        if identity in (row["id"], row["row"]):
            return row["file"], str(row["n"])
    raise ConfigError(f"{run.reader} has no episode {identity!r}: name one as the list does, such as eval_000010/0")


def _step_panel(step: Mapping[str, Any], index: int, tokens: str | None, scale: float) -> Panel:
    parts: list[RenderableType] = [_clipped(step["text"]) if tokens is None else _coloured(step, tokens, scale)]
    for call in step["calls"]:
        arguments = ", ".join(f"{one['name']}={one['value']['text'][:200]!r}" for one in call["arguments"])
        answer = call["result"] if call["error"] is None else call["error"]
        style = "cyan" if call["error"] is None else "yellow"
        reward = f", reward {_number(call['reward'])}" if call["reward"] else ""
        took = (f"{call['seconds']:.3f} s{reward}", "dim")
        head = Text.assemble((call["name"], f"bold {style}"), f"({arguments})  ", took)
        parts += [head, Text.assemble(("-> " if call["error"] is None else "failed: ", style), _clipped(answer))]
    named = f"step {index + 1} ({step['role']})" if step["role"] else f"step {index + 1}"
    facts = [named, f"saw {step['prompt_tokens']} tokens", f"sampled {step['sampled_tokens']}",
             f"{step['sampling']:.2f} s", f"reward {_number(step['reward'])}" if step["reward"] else ""]  # fmt: skip
    return _panel(", ".join(filter(None, facts)), Group(*parts), "blue")


def _coloured(step: Mapping[str, Any], name: str, scale: float) -> Text:
    """Colour tokens by a value: blue above zero, orange below, stronger for larger values. Ratios: above or below 1."""
    page, text = step["tokens"], Text()
    texts = page["texts"] or [f"#{token} " for token in page["ids"]]
    for piece, value in zip(texts, page["values"].get(name, [None] * len(texts)), strict=True):
        if not isinstance(value, int | float):
            text.append(piece)
            continue
        size = _signed_size(name, value)
        strength = min(1.0, -value / 4.6 if name == "logprob" else abs(size) / scale if scale else 0.0)
        tone = (240, 147, 63) if size < 0 else (86, 180, 233)
        mixed = ",".join(str(round(40 + strength * (part - 40))) for part in tone)
        text.append(piece, f"rgb(255,255,255) on rgb({mixed})")
    return text


def _signed_size(name: str | None, value: float) -> float:
    return math.log(max(value, 1e-9)) if name == "ratio" else value


def _panel(title: str, content: RenderableType, style: str) -> Panel:
    return Panel(content, title=Text(title), title_align="left", border_style=style)


def _clipped(clip: Mapping[str, Any]) -> Text:
    text = clip["text"][:TEXT_CHARS]
    more = clip["length"] - len(text)
    return Text.assemble(text, (f"\n... {more:,} more characters" if more > 0 else "", "dim"))


def _reward(reward: Any, outcome: Any, stop: str, success_reward: float) -> Text:
    failed = stop in [reason.value for reason in StopReason if reason.is_failure]
    won = not failed and isinstance(outcome, int | float) and outcome >= success_reward
    return Text(f"{'✓' if won else '!' if failed else '✗'} {_number(reward)}", "cyan" if won else "yellow")


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else str(value)


def _numbers(values: Sequence[Any] | None) -> list[float]:
    return [value for value in values or [] if isinstance(value, int | float)]


def _spark(values: Sequence[float]) -> str:
    shown = [value for value in thin(values, CURVE_WIDTH) if math.isfinite(value)]
    low, high = min(shown, default=0.0), max(shown, default=0.0)
    step = (high - low) / (len(BARS) - 1) or 1.0
    return "".join(BARS[round((value - low) / step)] for value in shown)
