"""Take the screenshots of docs/view.md from runs on this machine.

    agent-r1 train quickstart --run runs/quickstart-seed0        (and some more runs)
    python -m benchmarks.view_pictures runs --run quickstart-seed0 --out docs
    python -m benchmarks.view_pictures runs --run planner_worker --out docs --only batch,batch-phone,roles

Needs playwright and an installed Chromium (see `browser.py`).
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks.browser import browser_or_none, why_no_browser
from benchmarks.view import serving

SIZE = {"width": 1200, "height": 760}
PHONE = {"width": 390, "height": 760}


def interesting_row(url: str, run: str) -> tuple[str, str, int]:
    """Return a row of an early training step whose attempts differ, its file, and its first success."""
    asked = {"run": run, "kind": "train", "step_max": "4", "sort": "step", "limit": "200"}
    with httpx.Client(base_url=url) as client:
        while (found := client.get("api/episodes", params=asked).json())["read"] < found["total"]:
            time.sleep(0.2)
        for row in found["rows"]:
            answer = client.get("api/group", params={"run": run, "file": row["file"], "row": row["row"]}).json()
            won = [one for one in answer["attempts"] if one["reward"] >= answer["success_reward"]]
            if 1 < len(won) < len(answer["attempts"]) - 1 and won[0]["steps"] > 3:
                return row["row"], row["file"], won[0]["n"]
    raise SystemExit(f"{run} has no group with both successes and failures in its first steps")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--run", required=True, help="the run whose episodes are shown")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", type=lambda text: text.split(","), help="names of pictures")
    args = parser.parse_args()
    if (reason := why_no_browser()) is not None:
        raise SystemExit(reason)
    with serving(args.runs) as (url, _), browser_or_none() as browser:
        row, file, n = interesting_row(url, args.run)
        place = f"#/run/{args.run}"
        shots: list[tuple[str, str, dict[str, Any]]] = [
            ("curves", "#/?smooth=0.5", {}),
            ("curves-dark", "#/?smooth=0.5", {"color_scheme": "dark"}),
            ("episodes", f"{place}/episodes?kind=train&sort=-bad_calls", {}),
            ("episode", f"{place}/episode/{file}/{n}", {}),
            ("tokens-dark", f"{place}/episode/{file}/{n}?view=tokens&color=logprob", {"color_scheme": "dark"}),
            ("group", f"{place}/group/{file}/{row}", {}),
            ("row-dark", f"{place}/row/test-0-0", {"color_scheme": "dark"}),
            ("batch", f"{place}/batch/{file}?sort=end", {}),
            ("batch-phone", f"{place}/batch/{file}?sort=end", {"color_scheme": "dark", "viewport": PHONE}),
            ("roles", f"{place}/episode/{file}/{n}", {}),
            ("settings", "#/settings", {}),
            ("phone", f"{place}/episodes", {"viewport": PHONE}),
        ]
        for name, address, options in shots:
            if args.only is not None and name not in args.only:
                continue
            context = browser.new_context(**{"viewport": SIZE, "color_scheme": "light", **options})
            page = context.new_page()
            page.goto(url + address)
            page.wait_for_load_state("networkidle")
            page.wait_for_timeout(6000)  # three polls: everything is read by then
            if name == "curves":
                page.locator(".chart:visible canvas").nth(1).hover(position={"x": 220, "y": 80})
            if name == "batch":
                page.locator(".batch canvas").nth(2).hover(position={"x": 420, "y": 8})
            if name == "tokens-dark":
                page.locator(".token").nth(3).hover()
            page.screenshot(path=str(args.out / f"view-{name}.png"))
            context.close()


if __name__ == "__main__":
    main()
