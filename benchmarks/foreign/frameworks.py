"""The quickstart's agent, written as each framework's documentation would. None of this knows what agent-r1 trains.

Install the frameworks with `bash .ci/agents`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from agent_r1.recipes.quickstart.task import evaluate
from agent_r1.types import TaskRow

if TYPE_CHECKING:
    from agent_r1.serve.gateway.client import ClientSettings

MAX_TURNS = 8


def tools_for(row: TaskRow) -> tuple[Callable[..., str], Callable[..., str]]:
    """The two tools, around the row's table."""
    table = row.env_kwargs["tools_kwargs"]["lookup"]["table"]

    def lookup(name: str) -> str:
        """How many coins a person has, by full name."""
        return str(table[name]) if name in table else f"nobody is called {name!r}"

    def calculate(expression: str) -> str:
        """The value of a + b, a - b or a * b for two integers."""
        try:
            return str(evaluate(expression))
        except ValueError as error:
            return str(error)

    return lookup, calculate


def question(row: TaskRow) -> str:
    return str(row.prompt[-1]["content"])


async def openai_agents(row: TaskRow, client: ClientSettings) -> str:
    """The OpenAI Agents SDK."""
    from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    async with AsyncOpenAI(base_url=client.base_url, api_key=client.api_key) as api:
        agent = Agent(
            name="accountant",
            model=OpenAIChatCompletionsModel(model=client.model, openai_client=api),
            tools=[function_tool(each) for each in tools_for(row)],
        )
        result = await Runner.run(agent, question(row), max_turns=MAX_TURNS)
    return str(result.final_output)


async def langgraph(row: TaskRow, client: ClientSettings) -> str:
    """LangGraph's prebuilt agent with LangChain's OpenAI client."""
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    model = ChatOpenAI(model=client.model, base_url=client.base_url, api_key=client.api_key)
    agent = create_react_agent(model, list(tools_for(row)))
    state = await agent.ainvoke({"messages": [("user", question(row))]}, {"recursion_limit": 2 * MAX_TURNS + 1})
    return str(state["messages"][-1].content)


async def pydantic_ai(row: TaskRow, client: ClientSettings) -> str:
    """Pydantic AI."""
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=client.base_url, api_key=client.api_key)
    agent: Any = Agent(OpenAIChatModel(client.model, provider=provider), tools=list(tools_for(row)))
    return str((await agent.run(question(row))).output)
