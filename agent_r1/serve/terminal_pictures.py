"""Pictures in a terminal, where it can show them: with kitty's protocol or iTerm2's. Elsewhere, a mark stands for them.

What a terminal can do is read from the environment; the answer of the terminal itself would arrive as keyboard input.
No pictures are shown inside tmux and screen, which do not pass them through.

https://sw.kovidgoyal.net/kitty/graphics-protocol, https://iterm2.com/documentation-images.html
"""

from __future__ import annotations

import io
import os
from base64 import b64encode
from collections.abc import Iterable, Mapping
from typing import Literal

from rich.console import Console
from rich.text import Text

from agent_r1.errors import DataError
from agent_r1.vision.contents import picture_mark
from agent_r1.vision.pictures import Picture

Protocol = Literal["kitty", "iterm2"]

CHUNK = 4096  # characters per command of kitty's protocol
PIXELS_PER_LINE = 20  # roughly; terminals differ
LINES = (5, 16)  # height of a picture: tiny ones are enlarged, large ones scaled down


def protocol_of(environment: Mapping[str, str]) -> Protocol | None:
    """How the terminal takes pictures; None if it does not."""
    term, program = environment.get("TERM", ""), environment.get("TERM_PROGRAM", "")
    if environment.get("TMUX") or term.startswith(("screen", "tmux", "dumb")):
        return None
    if environment.get("KITTY_WINDOW_ID") or "kitty" in term or program == "ghostty":
        return "kitty"
    if program in ("iTerm.app", "WezTerm", "mintty") or environment.get("LC_TERMINAL") == "iTerm2":
        return "iterm2"
    return None


def show_pictures(pictures: Iterable[Picture], console: Console) -> None:
    """Print a line with the mark of each picture, and the picture below it if the terminal can show it."""
    protocol = protocol_of(os.environ) if console.is_terminal else None
    for picture in pictures:
        console.print(Text(picture_mark(picture), style="dim"))
        if protocol is not None:
            console.file.write(escapes(picture, protocol) + "\n")
            console.file.flush()


def escapes(picture: Picture, protocol: Protocol) -> str:
    """The escape sequence that shows a picture. It holds only base64 of pixels that we encoded ourselves."""
    low, high = LINES
    lines = min(high, max(low, round(picture.height / PIXELS_PER_LINE)))
    try:
        data = b64encode(_png(picture)).decode()
    except DataError:
        return "(it cannot be decoded)"
    if protocol == "iterm2":
        return f"\x1b]1337;File=inline=1;height={lines};preserveAspectRatio=1:{data}\x07"
    chunks = [data[start : start + CHUNK] for start in range(0, len(data), CHUNK)]
    first = f"a=T,f=100,q=2,r={lines},"  # q: the terminal does not answer
    return "".join(
        f"\x1b_G{first if index == 0 else ''}m={int(index + 1 < len(chunks))};{chunk}\x1b\\"
        for index, chunk in enumerate(chunks)
    )


def _png(picture: Picture) -> bytes:
    file = io.BytesIO()
    picture.image().save(file, "PNG")
    return file.getvalue()
