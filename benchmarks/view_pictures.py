"""Take the screenshots of docs/view.md, each in light and in dark, from runs on this machine.

    agent-r1 train quickstart --run runs/quickstart-seed0
    agent-r1 eval runs/quickstart-seed0
    agent-r1 train quickstart seed=1 learner.lr=1e-4 --run runs/quickstart-lr1e-4
    agent-r1 train quickstart/thinking context.reasoning=strip learner.num_minibatches=4 --run runs/thinking-strip
    agent-r1 train planner_worker/tiny --run runs/planner-worker
    python -m benchmarks.view_pictures runs --out docs

The files are PNG with a palette. Needs playwright, an installed Chromium (see `browser.py`) and
Pillow.
"""

from __future__ import annotations

import argparse
import io
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from PIL import Image

from benchmarks.browser import browser_or_none, why_no_browser
from benchmarks.view import serving

MAIN, THINKING, ROLES = "quickstart-seed0", "thinking-strip", "planner-worker"
WIDE = {"width": 1100, "height": 700}
PHONE = {"width": 390, "height": 700}
EXACT = 200  # colours of a palette that are those of the picture
SETTLED_MS = 5000  # two polls: everything is read and drawn by then
THEMES = ("light", "dark")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shot:
    """A page, what is done on it, and which part of the window is kept."""

    address: str
    prepare: Callable[[Any], object] = lambda page: None
    size: dict[str, int] = field(default_factory=lambda: WIDE)


class Asking:
    """Finds the episodes to show."""

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=60)

    def episodes(self, run: str, **asked: str) -> list[dict[str, Any]]:
        while True:
            found = self._client.get("api/episodes", params={"run": run, "limit": "200", **asked}).json()
            if found["read"] == found["total"]:
                rows: list[dict[str, Any]] = found["rows"]
                return rows
            time.sleep(0.2)

    def mixed_group(self, run: str) -> tuple[str, str, int]:
        """Return a row of an early step whose attempts differ, its file, and its first success of several steps."""
        for row in self.episodes(run, kind="train", step_max="4", sort="step"):
            asked = {"run": run, "file": row["file"], "row": row["row"]}
            answer = self._client.get("api/group", params=asked).json()
            won = [one for one in answer["attempts"] if one["reward"] >= answer["success_reward"]]
            if 1 < len(won) < len(answer["attempts"]) - 1 and won[0]["steps"] > 3:
                return row["row"], row["file"], won[0]["n"]
        raise SystemExit(f"{run} has no group with both successes and failures in its first steps")

    def most_coloured(self, run: str, colour: str, neutral: float) -> str:
        """Return the address of the training episode whose tokens are furthest from a value, of those of some steps."""

        def distance(row: dict[str, Any]) -> float:
            asked = {"run": run, "file": row["file"], "n": row["n"]}
            steps = self._client.get("api/episode", params=asked).json()["steps"]
            values = [value for step in steps for value in step["tokens"]["values"].get(colour, [])]
            return sum(abs(value - neutral) for value in values if isinstance(value, int | float))

        best = max(self.episodes(run, kind="train", sort="step")[:120], key=distance)
        return f"#/run/{run}/episode/{best['file']}/{best['n']}?view=tokens&color={colour}"


def shots(asking: Asking) -> Iterator[tuple[str, Shot]]:
    row, file, n = asking.mixed_group(MAIN)
    main, episode = f"#/run/{MAIN}", f"#/run/{MAIN}/episode/{file}/{n}"
    low = {"width": 1100, "height": 480}
    runs = f"runs={MAIN},quickstart-lr1e-4,{THINKING}"
    yield "curves", Shot(address=f"#/?smooth=0.5&{runs}", prepare=hover(".chart:visible canvas", 1, 220, 80))
    yield "settings", Shot(address=f"#/settings?runs={MAIN},quickstart-lr1e-4", size={"width": 1100, "height": 330})
    yield "evaluations", Shot(address=f"{main}/evaluations", size={"width": 1100, "height": 250})
    yield "episodes", Shot(address=f"{main}/episodes?kind=train&sort=-bad_calls")
    yield "episode", Shot(address=episode)
    for colour, neutral in (("logprob", 0.0), ("ratio", 1.0), ("entropy", 0.0)):
        address = asking.most_coloured(THINKING, colour, neutral)
        yield colour, Shot(address=address, prepare=point_at_token if colour == "logprob" else to_colours, size=low)
    stripped = next(one for one in asking.episodes(THINKING, kind="eval") if one["steps"] > 2)
    address = f"#/run/{THINKING}/episode/{stripped['file']}/{stripped['n']}"
    yield "left-out", Shot(address=address, prepare=open_left_out, size=low)
    yield "group", Shot(address=f"{main}/group/{file}/{row}")
    yield "row", Shot(address=f"{main}/row/{asking.episodes(MAIN, kind='eval')[0]['row']}")
    yield "batch", Shot(address=f"{main}/batch/{file}?sort=end", prepare=hover(".batch canvas", 2, 420, 8))
    yield "batch-phone", Shot(address=f"{main}/batch/{file}?sort=end", size=PHONE)
    yield "phone", Shot(address=f"{main}/episodes", size=PHONE)
    acted = next(one for one in asking.episodes(ROLES) if len(one["roles"]) > 1)
    yield "roles", Shot(address=f"#/run/{ROLES}/episode/{acted['file']}/{acted['n']}")


def hover(selector: str, number: int, x: int, y: int) -> Callable[[Any], object]:
    return lambda page: page.locator(selector).nth(number).hover(position={"x": x, "y": y})


def to_colours(page: Any) -> int:
    """Scroll so that the step with the strongest colours is in sight, and return the number of its strongest token."""
    number: int = page.evaluate("""() => {
      const strength = (one) => Number(/ (\\d+)%/.exec(one.style.backgroundColor)?.[1] ?? 0);
      const most = (list, size) => list.reduce((best, one) => (size(one) > size(best) ? one : best));
      const tokens = (step) => [...step.querySelectorAll(".message.agent .token")];
      const total = (step) => tokens(step).reduce((sum, one) => sum + strength(one), 0);
      const step = most([...document.querySelectorAll(".step")], total);
      scrollTo(0, step.getBoundingClientRect().top + scrollY - 90);
      return [...document.querySelectorAll(".message.agent .token")].indexOf(most(tokens(step), strength));
    }""")
    return number


def point_at_token(page: Any) -> None:
    page.locator(".message.agent .token").nth(to_colours(page)).hover()


def open_left_out(page: Any) -> None:
    page.locator(".left-out summary").last.click()
    page.locator(".left-out del").first.wait_for()
    page.evaluate("scrollTo(0, document.querySelector('.left-out[open]').getBoundingClientRect().top + scrollY - 100)")


def save(picture: bytes, path: Path) -> None:
    """Write a PNG with a palette, which is a third of the size: the frequent colours exactly, and some for the others.

    Without dithering, which would blur text.
    """
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    found: list[Any] = list(image.getcolors(image.width * image.height) or [])
    exact = [part for _, colour in sorted(found, reverse=True)[:EXACT] for part in colour]
    rest = image.quantize(256 - EXACT, Image.Quantize.MAXCOVERAGE).getpalette() or []
    palette = Image.new("P", (1, 1))
    palette.putpalette(exact + rest[: 3 * (256 - EXACT)])
    image.quantize(palette=palette, dither=Image.Dither.NONE).save(path, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="the folder with the runs named above")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", type=lambda text: text.split(","), help="names of pictures")
    args = parser.parse_args()
    if (reason := why_no_browser()) is not None:
        raise SystemExit(reason)
    with serving(args.runs) as (url, _), browser_or_none() as browser:
        for name, shot in shots(Asking(url)):
            for theme in THEMES if args.only is None or name in args.only else ():
                context = browser.new_context(viewport=shot.size, color_scheme=theme)
                page = context.new_page()
                page.goto(url + shot.address)
                page.wait_for_load_state("networkidle")
                page.wait_for_timeout(SETTLED_MS)
                shot.prepare(page)
                page.wait_for_timeout(300)
                save(page.screenshot(), args.out / f"view-{name}-{theme}.png")
                context.close()


if __name__ == "__main__":
    main()
