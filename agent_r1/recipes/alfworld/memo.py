"""The summary an expert would write: what it saw where, and what it holds.

Used in demonstrations for policies that summarise their own conversation (`context.demo_summary`). It reads only the
answers, which the agent has seen too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from agent_r1.types import Message

CONTENTS = re.compile(r"(?:On the (?P<on>[\w ]+?)|The (?P<in>[\w ]+?) is open\. In it), you see (?P<things>[^.]*)\.")
TAKEN = re.compile(r"You pick up the ([\w ]+?) from the ([\w ]+?)\.")
MOVED = re.compile(r"You move the ([\w ]+?) to the ([\w ]+?)\.")
TREATED = re.compile(r"You (clean|heat|cool) the ([\w ]+?) using the")
DONE = {"clean": "clean", "heat": "hot", "cool": "cool"}
NOTHING = "nothing"
MAX_PLACES = 8  # non-empty receptacles, most recently seen


def memo(messages: Sequence[Message]) -> str:
    seen: dict[str, list[str]] = {}
    held = state = ""
    for text in (str(message["content"]) for message in messages if message["role"] == "user"):
        if taken := TAKEN.search(text):
            held, state = taken[1], ""
            seen[taken[2]] = [thing for thing in seen.get(taken[2], []) if thing != held]
        elif moved := MOVED.search(text):
            held = state = ""
            seen.setdefault(moved[2], []).append(moved[1])
        elif treated := TREATED.search(text):
            state = DONE[treated[1]]
        for found in CONTENTS.finditer(text):
            place = found["on"] or found["in"]
            seen.pop(place, None)  # most recent last
            seen[place] = [] if found["things"] == NOTHING else re.findall(r"a ([\w ]+?)(?:, |$)", found["things"])
    empty = sorted(place for place, things in seen.items() if not things)
    full = [(place, things) for place, things in seen.items() if things][-MAX_PLACES:]
    lines = [f"{place}: {', '.join(things)}." for place, things in full]
    lines += [f"Empty: {', '.join(empty)}."] if empty else []
    lines.append(f"I hold: {held}{f', {state}' if state else ''}." if held else "I hold nothing.")
    return "\n".join(lines)
