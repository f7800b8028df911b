"""agent-r1 search: build | ask | serve | load | papers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.text import Text
from typer import Argument, Option

from agent_r1.cli.options import Port
from agent_r1.cli.terminal import say, tell
from agent_r1.errors import ConfigError, did_you_mean
from agent_r1.serve.paper_server import papers_command

app = typer.Typer(help="Build, search and serve indexes of passages.", no_args_is_help=True)
app.command("papers")(papers_command)

Method = Literal["flat", "ivf"]
EncoderName = Literal["minilm", "bge-small", "bge-base", "bge-large"]  # see `ENCODERS` in dense.py
IndexArg = Annotated[Path, Argument(help="The folder of an index.")]
KIND_HELP = "lexical, dense or hybrid; by default hybrid if the index has both, else the one it has."
KindOption = Annotated[str | None, Option(help=KIND_HELP)]
TopK = Annotated[int, Option(min=1, help="Passages per query.")]


@app.command("build")
def build_command(
    corpus: Annotated[list[Path], Argument(help="Files of passages: .jsonl, .jsonl.gz or .parquet.")],
    to: Annotated[Path, Option("--to", help="The folder of the index; an existing index is replaced.")],
    kind: Annotated[str, Option(help="What to build: lexical, dense, or lexical,dense.")] = "lexical",
    encoder: Annotated[EncoderName | None, Option(help="For dense; minilm by default.")] = None,
    encoder_path: Annotated[str | None, Option(help="Folder of the encoder's weights, if not the hub.")] = None,
    method: Annotated[Method | None, Option(help="For dense: flat (exact; the default) or ivf (faiss).")] = None,
    stem: Annotated[bool | None, Option("--stem/--no-stem", help="For lexical: reduce words to their stems.")] = None,
) -> None:
    """Build an index from files of passages (title, text, optionally id)."""
    from agent_r1.tools.search.corpus import read_passages
    from agent_r1.tools.search.dense import DenseSettings, encoder_settings
    from agent_r1.tools.search.index import RANKERS, Index
    from agent_r1.tools.search.lexical import LexicalSettings

    kinds = kind.split(",")
    for name in kinds:
        if name not in RANKERS:
            raise ConfigError(f"--kind {kind}: cannot build {name!r}.{did_you_mean(name, RANKERS)}")
    needs = {"encoder": "dense", "encoder_path": "dense", "method": "dense", "stem": "lexical"}
    given = {"encoder": encoder, "encoder_path": encoder_path, "method": method, "stem": stem}
    for name, value in given.items():
        if value is not None and needs[name] not in kinds:
            raise ConfigError(f"--{name.replace('_', '-')} has no effect with --kind {kind}: add {needs[name]}")
    dense = DenseSettings(encoder=encoder_settings(encoder, encoder_path), method=method or "flat")
    index = Index.build(
        read_passages(corpus),
        to,
        lexical=LexicalSettings(stem=stem is not False) if "lexical" in kinds else None,
        dense=dense if "dense" in kinds else None,
        report=say,
    )
    say(f"{to}: {index.manifest.num_passages:,} passages; {', '.join(index.manifest.kinds)}")


@app.command("ask")
def ask_command(
    index: IndexArg,
    query: Annotated[str, Argument(help="What to search for.")],
    top_k: TopK = 5,
    kind: KindOption = None,
) -> None:
    """Search an index once and print the passages found."""
    from agent_r1.tools.search.index import Index, check_kind
    from agent_r1.tools.search.tool import find_index

    opened = Index.open(find_index(index))
    chosen = check_kind(kind or opened.default_kind, opened.manifest, opened.directory)
    found = opened.search([query], top_k, chosen)[0]
    if not found:
        tell(Text(f"nothing found in {len(opened.corpus)} passages"))
    for number, hit in enumerate(found, start=1):
        say(f"[{number}] {hit.score:.3f} {hit.passage.title}: {hit.passage.text}")


@app.command("serve")
def serve_command(
    index: IndexArg,
    host: Annotated[str, Option(help="Address to listen on; 0.0.0.0 for the whole network.")] = "127.0.0.1",
    port: Port = 8100,
    max_waiting: Annotated[int, Option(help="Queries that may wait; more are refused with 503.")] = 4096,
    seconds: Annotated[float, Option(help="Time limit of a request.")] = 20.0,
) -> None:
    """Serve an index over HTTP until interrupted."""
    from agent_r1.serve.search_server import ServerLimits, serve
    from agent_r1.tools.search.index import Index
    from agent_r1.tools.search.tool import find_index

    limits = ServerLimits(max_waiting=max_waiting, seconds=seconds)
    opened = Index.open(find_index(index))
    passages = f"{opened.manifest.num_passages:,} passages"
    serve(opened, host=host, port=port, limits=limits, announce=lambda url: say(f"{passages} at {url}/search"))


@app.command("load")
def load_command(
    url: Annotated[str, Argument(help="Address of a search server, such as http://localhost:8100.")],
    clients: Annotated[int, Option(min=1, help="Concurrent clients.")] = 200,
    requests: Annotated[int, Option(min=1, help="Requests of all clients together.")] = 5000,
    queries: Annotated[Path | None, Option(help="One query per line.", exists=True, dir_okay=False)] = None,
    per_request: Annotated[int, Option(min=1, help="Queries in one request.")] = 1,
    top_k: TopK = 5,
    kind: KindOption = None,
) -> None:
    """Load-test a server and report errors, throughput and latency. Exit code 1 if any request failed."""
    from agent_r1.serve.search_load import QUERIES, load

    asked = [line for line in queries.read_text(encoding="utf-8").splitlines() if line] if queries else QUERIES
    if not asked:
        raise ConfigError(f"{queries} has no queries")
    loading = load(
        url, clients=clients, requests=requests, queries=asked, queries_per_request=per_request, top_k=top_k, kind=kind
    )
    result = asyncio.run(loading)
    say(str(result))
    if result.errors:
        raise typer.Exit(1)
