"""The environment: every observation is written anew from the question and the list of papers found so far.

So a prompt does not grow with the episode, the policy sees its own earlier words only as the calls it made, and every
step is a segment of its own. Text without a call ends the episode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from agent_r1.envs.tool_env import ToolEnv
from agent_r1.errors import ConfigError
from agent_r1.recipes.paper_search.pool import Entry, Library, Pool
from agent_r1.recipes.paper_search.tools import Search
from agent_r1.tokens.formats.base import ToolCallFormat
from agent_r1.tokens.formats.table import AUTO
from agent_r1.tools.base import BaseTool, ToolSet, list_tools
from agent_r1.types import Action, Observation, TaskRow, ToolCallRecord, Transition

MAX_CALLS = 5  # calls of a response
SHOWN_NEW, SHOWN_EXPANDED, ABSTRACT_CHARS = 8, 4, 160
MAX_ARGUMENT = 80  # characters of a call's argument that are shown again
INSTRUCTION = (
    "Find all papers that answer the question. search(query) finds papers by words, expand(paper_id) those related to "
    "one of the list. Make up to {calls} calls at once, never the same twice. When nothing is missing, say: done"
)


class PaperSearch(ToolEnv):
    """`shown_new` and `shown_expanded` limit how many papers of each kind are shown, best first; `abstract_chars` how
    much of an abstract; `shown_calls` how many of the last calls."""

    def __init__(  # noqa: PLR0913 (what the policy sees, and the limits of its calls)
        self,
        *,
        tools: Sequence[str | BaseTool | ToolSet],
        tool_format: str | ToolCallFormat = AUTO,
        max_bad_calls: int = 5,
        max_calls: int = MAX_CALLS,
        shown_new: int = SHOWN_NEW,
        shown_expanded: int = SHOWN_EXPANDED,
        shown_calls: int = 12,
        abstract_chars: int = ABSTRACT_CHARS,
    ) -> None:
        limits = {"shown_new": shown_new, "shown_calls": shown_calls}
        for name, limit in limits.items():
            if limit < 1:
                raise ConfigError(f"env_kwargs.{name} must be at least 1, got {limit}")
        if shown_expanded < 0 or abstract_chars < 0:
            raise ConfigError(
                f"env_kwargs.shown_expanded and abstract_chars must not be negative, got {shown_expanded} and "
                f"{abstract_chars}"
            )
        self.pool = Pool(_library_of(tools))
        super().__init__(
            tools=tools,
            tool_format=tool_format,
            tools_kwargs={"pool": self.pool},
            max_bad_calls=max_bad_calls,
            max_calls=max_calls,
        )
        self._shown_new, self._shown_expanded = shown_new, shown_expanded
        self._shown_calls, self._abstract_chars, self._max_calls = shown_calls, abstract_chars, max_calls

    async def reset(self, row: TaskRow) -> Observation:
        await super().reset(row)
        self.pool.begin(str(row.prompt[-1]["content"]))
        self._calls: list[str] = []  # one line for each call
        self._problems: list[str] = []  # problems of the last step
        return self._observe()

    async def step(self, action: Action) -> Transition:
        transition = await super().step(action)
        self._problems = []
        for call in transition.calls:
            is_problem = call.error is not None or "problem" in call.info
            (self._problems if is_problem else self._calls).append(_describe(call))
        return transition if transition.terminated else replace(transition, observation=self._observe())

    def _observe(self) -> Observation:
        shown = self.pool.show(new=self._shown_new, expanded=self._shown_expanded)
        sections = {
            "Question": [self.pool.question],
            "Calls so far": self._calls[-self._shown_calls :],
            f"Papers ({len(self.pool.papers.entries)} found)": [
                paper_line(entry, self._abstract_chars) for entry in shown
            ],
            "Problems": self._problems,
        }
        text = "\n".join(f"### {name}\n" + "\n".join(lines) for name, lines in sections.items() if lines)
        system = INSTRUCTION.format(calls=self._max_calls)
        return Observation(messages=[{"role": "system", "content": system}, {"role": "user", "content": text}])


def paper_line(entry: Entry, abstract_chars: int) -> str:
    abstract = entry.paper.abstract
    if len(abstract) > abstract_chars:
        abstract = abstract[:abstract_chars].rpartition(" ")[0]
    text = f"{entry.paper.title}: {abstract}" if abstract else entry.paper.title
    return f"[{entry.number}] ({entry.score:.2f}) [{'EXP' if entry.expanded else 'NEW'}] {text}"


def _describe(call: ToolCallRecord) -> str:
    """Return the call and its result on one line; a malformed call has no arguments."""
    said = " ".join([call.name or "unreadable call", *(str(value)[:MAX_ARGUMENT] for value in call.arguments.values())])
    return " ".join(f"{said}: {call.result}".split())


def _library_of(tools: Sequence[str | BaseTool | ToolSet]) -> Library:
    for tool in list_tools(tools):
        if isinstance(tool, Search):
            return tool.library
    raise ConfigError("PaperSearch needs the tool tools.Search, which says where papers come from")
