"""The expert of the warm start: it knows the gold pages but only searches for what it has read.

Each search is for a gold page whose name appears in the question or in earlier results, or else for the question
itself, and must find a missing gold page. When all are found and the answer appears in the results, the expert answers.
If that fails, there is no demonstration: every demonstration is something a policy could have done with this index.
"""

from __future__ import annotations

import re

from agent_r1.recipes.hotpotqa.data import Question
from agent_r1.recipes.hotpotqa.scores import contains, normalized
from agent_r1.tokens.formats.table import FORMATS
from agent_r1.tools.search.tool import SearchTool

MAX_SEARCHES = 3  # one step of the episode is for the answer
MAX_QUERY_CHARS = 160  # a call must fit into a step
MAX_ANSWER_CHARS = 80  # longer ones are sentences, which are never worded the same way twice
YES_NO = ("yes", "no")

_IN_BRACKETS = re.compile(r" *\([^)]*\)$")  # Winner (band)


def demonstrate(question: Question, tool: SearchTool) -> list[str] | None:
    """Return the expert's responses step by step, or None if it cannot answer."""
    answer = question.answers[0]
    if len(answer) > MAX_ANSWER_CHARS:
        return None
    shown, said, missing = "", list[str](), set(question.gold)
    while missing:
        query = _next_query(question, shown, missing, tool) if len(said) < MAX_SEARCHES else None
        if query is None:
            return None
        hits = tool.look(query)
        missing -= {hit.passage.title for hit in hits}
        shown += f"\n{tool.show(hits)}"
        said.append(FORMATS["hermes"].write_call(tool.name, {"query": query}))
    if normalized(answer) not in YES_NO and not contains(shown, answer):
        return None
    return [*said, f"<answer>{answer}</answer>"]


def _next_query(question: Question, shown: str, missing: set[str], tool: SearchTool) -> str | None:
    """Return the first query that uses only visible names and finds a missing page."""
    visible = f"{question.text}\n{shown}"
    readable = [title for title in question.gold if title in missing and contains(visible, _name(title))]
    readable.sort(key=lambda title: normalized(visible).find(normalized(_name(title))))  # in order of appearance
    queries = [query for title in readable for query in ([title] if title in visible else []) + [_name(title)]]
    for query in dict.fromkeys([*queries, question.text]):
        if len(query) <= MAX_QUERY_CHARS and missing & {hit.passage.title for hit in tool.look(query)}:
            return query
    return None


def _name(title: str) -> str:
    return _IN_BRACKETS.sub("", title)
