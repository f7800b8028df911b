"""The memo that demonstrations write for a context policy that summarises."""

from __future__ import annotations

from agent_r1.config import load_config
from agent_r1.recipes.alfworld.memo import MAX_PLACES, memo
from agent_r1.types import Message


def answered(*texts: str) -> list[Message]:
    talk: list[Message] = [{"role": "user", "content": "You see a desk 1. Your task is to: put a mug in desk."}]
    for text in texts:
        talk += [
            {"role": "assistant", "content": "On the moon, you see a cd 1."},
            {"role": "user", "content": text},
        ]
    return talk


def test_the_latest_contents_of_every_place_and_what_is_held() -> None:
    play = [
        "You arrive at desk 1. On the desk 1, you see a pen 1, a creditcard 2, and a mug 2.",
        "You arrive at drawer 1. The drawer 1 is closed.",
        "You open the drawer 1. The drawer 1 is open. In it, you see nothing.",
        "You pick up the mug 2 from the desk 1.",
        "Nothing happens.",
        "You clean the mug 2 using the sinkbasin 1.",
    ]
    seen = "desk 1: pen 1, creditcard 2.\nEmpty: drawer 1.\n"
    assert memo(answered(*play)) == f"{seen}I hold: mug 2, clean."
    put = "You move the mug 2 to the drawer 1."
    assert memo(answered(*play, put)) == "desk 1: pen 1, creditcard 2.\ndrawer 1: mug 2.\nI hold nothing."
    again = "You arrive at desk 1. On the desk 1, you see a book 1."
    assert memo(answered(*play, put, again)) == "drawer 1: mug 2.\ndesk 1: book 1.\nI hold nothing."


def test_the_first_memo_is_empty() -> None:
    assert memo(answered()) == "I hold nothing."


def test_only_the_latest_places_are_kept() -> None:
    visits = [f"You arrive at shelf {n}. On the shelf {n}, you see a cd {n}." for n in range(1, MAX_PLACES + 4)]
    lines = memo(answered(*visits)).splitlines()
    assert lines == [*(f"shelf {n}: cd {n}." for n in range(4, MAX_PLACES + 4)), "I hold nothing."]


def test_the_preset_uses_the_memo() -> None:
    context = load_config("alfworld/summary").context
    assert context.model_dump()["demo_summary"] == "memo.memo"
