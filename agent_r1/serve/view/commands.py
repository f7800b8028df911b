"""What `agent-r1 view` and `agent-r1 show` do, after their arguments were parsed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from agent_r1.errors import ConfigError, did_you_mean
from agent_r1.places import shown
from agent_r1.serve.view.index.columns import NUMBERS
from agent_r1.serve.view.library import Library, check_places
from agent_r1.serve.view.terminal import show_episode, show_run

DEFAULT_PLACE = Path("runs")
RANGES = [f"{name}_{end}" for name in ("step", *NUMBERS) for end in ("min", "max")]
FILTERS = ("kind", "step", "stop", "tool", "role", "row", "text", *RANGES)


def run_view(
    places: Sequence[Path] | None, console: Console, *, host: str, port: int, export: Path | None, episodes: int
) -> None:
    """Serve the page until interrupted, or write it to a file."""
    check_places(places or [])  # the default folder may not exist yet: the page says how to make a run
    library = Library(places or [DEFAULT_PLACE])
    if export is not None:
        from agent_r1.serve.view.export import export_page

        kept = export_page(library, export, episodes=episodes)
        runs, size = f"{kept['runs']} run{'s' * (kept['runs'] != 1)}", f"{kept['bytes'] / 1e6:.1f} MB"
        _say(console, f"{shown(export)}: {runs}, {kept['episodes']} of {kept['total']} episodes, {size}")
        return

    from agent_r1.serve.listening import is_loopback
    from agent_r1.serve.view.server import serve

    def announce(link: str) -> None:
        count = len(library.runs())
        _say(console, f"{count} run{'s' * (count != 1)} at {link}  (Ctrl-C ends it)")
        if not is_loopback(host):
            _say(console, "anyone with this link can read these runs; the connection is not encrypted")

    serve(library, host=host, port=port, announce=announce)


def run_show(
    run: Path, episode: str | None, console: Console, *, find: Sequence[str], sort: str, limit: int, tokens: str | None
) -> None:
    if episode is not None:
        if find:
            raise ConfigError(f"--find {find[0]} filters the list of episodes: leave it out, or leave out {episode}")
        show_episode(run, episode, console, tokens=tokens)
        return
    if tokens is not None:
        raise ConfigError(f"--tokens {tokens} colours one episode: name it, such as agent-r1 show {run} eval_000010/0")
    filters = {}
    for word in find:
        name, equals, value = word.partition("=")
        if not equals or name not in FILTERS:
            raise ConfigError(f"--find {word}: write NAME=VALUE.{did_you_mean(name, FILTERS)}")
        filters[name] = value
    show_run(run, console, filters={**filters, "sort": sort}, limit=limit)


def _say(console: Console, line: str) -> None:
    console.print(Text(line), soft_wrap=True)
