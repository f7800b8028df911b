"""What a step no longer saw of the prompt and response before it: a difference of two lists of token ids.

A context policy leaves out messages, a chat template strips thinking, a summary replaces exchanges. Whatever it was,
the ids tell: those of the last step of the same role that are not in this prompt, in the same order. The work is close
to linear in the number of ids, and done only for the step that is asked for.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from agent_r1.runs.reader import RunReader
from agent_r1.serve.view.detail import TOKENS, common, read_record, seen_before, token_texts
from agent_r1.serve.view.library import NotFound

GRAM = 6  # ids in a row that must agree: longer than what chat templates repeat between messages
DEEPEST = 12  # levels of the search inside the gaps that the level above has left


class Kept(NamedTuple):
    """Ids that both lists have, in the same order."""

    before: int  # position in the older list
    after: int  # position in the newer one
    length: int


def dropped_page(run: RunReader, name: str, position: int, *, step: int, start: int) -> dict[str, Any]:
    """Return the ids that step `step` no longer saw, from the `start`-th of them on, in `parts` that stood together;
    and `kept`, the [position, length] of what it still saw."""
    record, _ = read_record(run, name, position)
    steps = record["steps"]
    if not 0 <= step < len(steps):
        raise NotFound(f"there is no step {step} in episode {position} of {name}")
    before, sampled_from = seen_before(steps, step)
    kept = kept_spans(before, steps[step]["prompt_ids"])
    gaps = list(_gaps(kept, len(before), sampled_from))
    return {
        "start": start,
        "total": sum(end - begin for begin, end, _ in gaps),
        "kept": [[span.after, span.length] for span in kept],
        "parts": [
            {
                "at": at,
                "position": begin,
                "was_sampled": begin >= sampled_from,
                "ids": before[begin:end],
                "texts": token_texts(run, before[begin:end]),
            }
            for begin, end, at in _slice(gaps, start, start + TOKENS)
        ],
    }


def _gaps(kept: Sequence[Kept], length: int, sampled_from: int) -> Iterator[tuple[int, int, int]]:
    """Yield (begin, end) in the older list of what is between kept spans, and where it would stand in the newer one.

    The old prompt and the response to it are apart.
    """
    begin = at = 0
    for span in (*kept, Kept(length, -1, 0)):
        for left, right in ((begin, min(span.before, sampled_from)), (max(begin, sampled_from), span.before)):
            if left < right:
                yield left, right, at
        begin, at = span.before + span.length, span.after + span.length


def _slice(gaps: Sequence[tuple[int, int, int]], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Cut the gaps to their ids number `start` to `stop`, counted over all gaps."""
    seen = 0
    for begin, end, at in gaps:
        left, right = max(begin, begin + start - seen), min(end, begin + stop - seen)
        if left < right:
            yield left, right, at
        seen += end - begin


def kept_spans(before: Sequence[int], after: Sequence[int]) -> list[Kept]:
    """Return what both lists have, in order: a patience diff.

    Rows of GRAM ids that occur once in each list are anchors; each is extended as far as the lists agree, and the gaps
    between them are searched in the same way.
    """
    head = common(before, after)
    middle = _search(before, after, (head, len(before)), (head, len(after)), 0)
    found = list[Kept]()
    for span in (Kept(0, 0, head), *middle):
        if (
            found
            and found[-1].before + found[-1].length == span.before
            and found[-1].after + found[-1].length == span.after
        ):
            found[-1] = Kept(found[-1].before, found[-1].after, found[-1].length + span.length)
        elif span.length:
            found.append(span)
    return found


def _search(
    before: Sequence[int], after: Sequence[int], old: tuple[int, int], new: tuple[int, int], level: int
) -> Iterator[Kept]:
    """Yield what before[old] and after[new] share. Ranges, because copies for each anchor would take quadratic time."""
    (b, b_end), (a, a_end) = old, new
    for offset_b, offset_a in _anchors(before[b:b_end], after[a:a_end]) if level < DEEPEST else ():
        left, right = old[0] + offset_b, new[0] + offset_a
        skip = max(b - left, a - right, 0)  # the span before goes on into this anchor
        if skip >= GRAM:
            continue
        left, right = left + skip, right + skip
        end, end_a = left + GRAM - skip, right + GRAM - skip
        while left > b and right > a and before[left - 1] == after[right - 1]:
            left, right = left - 1, right - 1
        while end < b_end and end_a < a_end and before[end] == after[end_a]:
            end, end_a = end + 1, end_a + 1
        yield from _search(before, after, (b, left), (a, right), level + 1)
        yield Kept(left, right, end - left)
        b, a = end, end_a
    if b > old[0]:
        yield from _search(before, after, (b, b_end), (a, a_end), level + 1)
        return
    tail = common(before[b:b_end][::-1], after[a:a_end][::-1])
    if tail >= GRAM:  # repetitions, which have no anchors
        yield Kept(b_end - tail, a_end - tail, tail)


def _anchors(before: Sequence[int], after: Sequence[int]) -> list[tuple[int, int]]:
    """Return the positions of rows of ids that occur once in each list, as many as are in the same order in both."""
    places = _once(after)
    found = [(b, places[gram]) for gram, b in _once(before).items() if gram in places]
    # The longest increasing subsequence of the positions in `after`.
    lasts, chosen, previous = list[int](), list[int](), dict[int, int]()
    for index, (_, a) in enumerate(found):
        length = bisect_left(lasts, a)
        lasts[length : length + 1] = [a]
        chosen[length : length + 1] = [index]
        if length:
            previous[index] = chosen[length - 1]
    result = list[tuple[int, int]]()
    at = chosen[-1] if chosen else None
    while at is not None:
        result.append(found[at])
        at = previous.get(at)
    return result[::-1]


def _once(ids: Sequence[int]) -> Mapping[tuple[int, ...], int]:
    """Return the rows of GRAM ids that occur exactly once, with their positions, in order."""
    grams = zip(*(islice(ids, offset, None) for offset in range(GRAM)), strict=False)
    places = dict[tuple[int, ...], int]()
    for position, gram in enumerate(grams):
        places[gram] = -1 if gram in places else position
    return {gram: position for gram, position in places.items() if position >= 0}
