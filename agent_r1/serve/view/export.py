"""One self-contained HTML file: the page, its style and scripts, the curves, and some of the episodes.

It opens without a server and asks nobody for anything. Its Content-Security-Policy allows only the one script inside.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from agent_r1.disk import write_atomically
from agent_r1.errors import AgentR1Error, ConfigError
from agent_r1.serve.view.api import Api
from agent_r1.serve.view.index.episodes import wait_until_read
from agent_r1.serve.view.library import Library, OpenRun
from agent_r1.serve.view.server import static_files

READ_SECONDS = 3600.0
PROMPT_TOKENS = 600  # longer prompts are left out: every step repeats the one before
PICTURE_BYTES = 32 * 2**20  # of all pictures in a file, which has them in base64; others are left out
INLINE_BYTES = 2**21  # of a page in a notebook, which is saved with it
INLINE_EPISODES = (60, 16, 4)  # tried in turn
INLINE_SOURCE_BYTES = 2**28  # of the episodes of a run that is shown in a notebook
_IMPORT = re.compile(r'^import \{ ([^}]*) \} from "\./(\w+)\.js";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const|class) (\w+))", re.MULTILINE)


def export_page(library: Library, target: Path, *, episodes: int) -> dict[str, int]:
    """Write the file and return how many runs and episodes it holds."""
    text, counts = page_text(library, episodes=episodes)
    with write_atomically(target) as part:
        part.write_text(text, encoding="ascii")
    return {**counts, "bytes": len(text)}


def inline_frame(library: Library, *, most: int = INLINE_BYTES) -> str | None:
    """Return the page as a frame for a notebook, with as many episodes as have room; None if even a few are too large.

    The frame has no origin, so its scripts reach neither the notebook nor its server, and its page keeps the policy of
    an exported file.
    """
    files = [file for run in library.runs() for file in run.reader.files()]
    if sum(file.path.stat().st_size for file in files) > INLINE_SOURCE_BYTES:
        return None  # reading everything would take long
    for episodes in INLINE_EPISODES:
        text, _ = page_text(library, episodes=episodes)
        quoted = text.replace("&", "&amp;").replace("'", "&#39;")
        if len(quoted) <= most:
            return (
                f"<iframe sandbox='allow-scripts allow-downloads' srcdoc='{quoted}' title='agent-r1 view' "
                "style='width: 100%; height: 640px; border: 1px solid #8888'></iframe>"
            )
    return None


def page_text(library: Library, *, episodes: int) -> tuple[str, dict[str, int]]:
    """Return the file's content, and how many runs and episodes it holds."""
    runs = library.runs()
    if not runs:
        raise ConfigError(f"no runs to export in {', '.join(map(str, library.places))}: name a run directory")
    api = Api(library)
    data, total, pictures = {}, 0, dict[str, str]()
    for run in runs:
        wait_until_read(run.episodes, READ_SECONDS)
        total += run.episodes.progress["total"]
        data[run.name] = _run_data(api, run, max(1, episodes // len(runs)))
        _add_pictures(pictures, api, run.name, data[run.name]["episode"].values())
    kept = sum(len(one["episodes"]) for one in data.values())
    note = f"exported {time.strftime('%Y-%m-%d')}: {kept:,} of {total:,} episodes"
    store = {"runs": api.runs({})["runs"], "data": data, "pictures": pictures, "note": note}
    text = _page(json.dumps(store, ensure_ascii=True, allow_nan=False, default=str))
    return text, {"runs": len(runs), "episodes": kept, "total": total}


def _run_data(api: Api, run: OpenRun, episodes: int) -> dict[str, Any]:
    asked = {"run": run.name}
    rows = _choose(run, episodes)
    pages, tokens, dropped = {}, {}, {}
    for row in rows:
        where = {**asked, "file": row["file"], "n": str(row["n"])}
        try:
            page = api.episode(where)
        except AgentR1Error:
            continue  # it stays in the table, as a record that cannot be read
        pages[f"{row['file']}/{row['n']}"] = page
        for index, step in enumerate(page["steps"]):
            if step["prompt_tokens"] <= PROMPT_TOKENS:
                at = f"{row['file']}/{row['n']}/{index}/0"
                tokens[at] = api.tokens({**where, "step": str(index)})
                if not step["kept_all"]:
                    dropped[at] = api.dropped({**where, "step": str(index)})
    files = dict.fromkeys(row["file"] for row in rows)
    return {
        "batches": {name: api.batch({**asked, "file": name}) for name in files},
        "metrics": api.metrics(asked),
        "statistics": api.statistics(asked),
        "config": api.config(asked),
        "evaluations": api.evaluations(asked),
        "episodes": rows,
        "episode": pages,
        "tokens": tokens,
        "dropped": dropped,
        "success_reward": run.success_reward,
    }


def _add_pictures(found: dict[str, str], api: Api, run: str, pages: Iterable[Mapping[str, Any]]) -> None:
    """Add the pictures of episodes as data URLs, as long as there is room. Equal names mean equal pictures."""
    for page in pages:
        shown = [*page["messages"], *page["steps"], *(call for step in page["steps"] for call in step["calls"])]
        for name in (name for part in shown for name in part["pictures"] if name not in found):
            with suppress(AgentR1Error, OSError):  # the page says that it is missing
                content, media_type = api.picture(run, name)
                url = f"data:{media_type};base64,{base64.b64encode(content).decode()}"
                if sum(map(len, found.values())) + len(url) <= PICTURE_BYTES:
                    found[name] = url


def _choose(run: OpenRun, count: int) -> list[dict[str, Any]]:
    """Return beginnings of files: of the last and the first evaluation, the last and the first step, then others."""
    files = [file.path.name.split(".")[0] for file in run.reader.files()]
    order = list[str]()
    for kind in ("eval", "train"):
        names = [name for name in files if name.startswith(f"{kind}_")]
        order += [*names[-1:], *names[:1]]
    order += reversed(files)
    share = max(1, count // max(1, min(4, len(files))))
    chosen = list[dict[str, Any]]()
    for name in dict.fromkeys(order):
        kind, _, step = name.rpartition("_")
        wanted = min(share, count - len(chosen))
        if wanted > 0:
            chosen += run.episodes.find({"kind": kind, "step": str(int(step))}, offset=0, limit=wanted)["rows"]
    return chosen


def bundle(static: Mapping[str, bytes]) -> str:
    """Return the modules as one script. Each becomes a function, so that their names cannot collide."""
    done: dict[str, str] = {}

    def add(name: str) -> None:
        if name in done:
            return
        text = static[f"{name}.js"].decode()
        done[name] = ""  # marks it before its imports, which must not form a circle
        for _, needed in _IMPORT.findall(text):
            add(needed)
        exported = _EXPORT.findall(text)
        body = _EXPORT.sub("", _IMPORT.sub(r"const { \1 } = module_\2;\n", text))
        done[name] = f"const module_{name} = (() => {{\n{body}\nreturn {{ {', '.join(exported)} }};\n}})();\n"
        done[name] = done.pop(name)  # after its imports

    add("main")
    return "".join(done.values())


def _page(data: str) -> str:
    static = static_files()
    script, style = _ascii(bundle(static)), _ascii(static["style.css"].decode())
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    data = data.replace("<", "\\u003c")  # it could end the element; JSON may write it as an escape
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>agent-r1</title>\n'
        f"<style>{style}</style>\n</head>\n<body>\n"
        f'<script type="application/json" id="data">{data}</script>\n'
        f'<script type="module">{script}</script>\n</body>\n</html>\n'
    )


def _ascii(text: str) -> str:
    """Escape the few signs of our own files that are not ASCII; none of them is outside of a string or comment."""
    is_script = "module_main" in text
    return "".join(c if ord(c) < 128 else f"\\u{ord(c):04x}" if is_script else f"\\{ord(c):x} " for c in text)


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
