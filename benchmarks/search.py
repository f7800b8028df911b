"""Search over the corpus of the recipe hotpotqa: recall, speed, and speed under concurrent load.

    agent-r1 data recipe hotpotqa
    python -m benchmarks.search                              # writes results/search.json
    python -m benchmarks.search --encoder DIR                # with dense and hybrid search on a slice of the corpus

For recall, the question is the query. `any` and `all` are the shares of questions with at least one, or all, of their
gold pages among the first k; an agent can find the rest with further searches. The load test runs on the same cores as
the server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import socket
import tempfile
import time
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from agent_r1.data.downloads import data_dir
from agent_r1.recipes.hotpotqa.data import FOLDER, INDEX, SPLITS, Question, questions
from agent_r1.serve.search_load import load
from agent_r1.serve.search_server import ServerLimits, serve
from agent_r1.tools.search.corpus import Passage
from agent_r1.tools.search.dense import ENCODERS, DenseSettings
from agent_r1.tools.search.index import Index, Kind
from agent_r1.tools.search.lexical import LexicalSettings
from benchmarks.machine import RESULTS, machine

BUILD_PASSAGES = 100_000
DENSE_PASSAGES = 3_000
DENSE_QUESTIONS = 200
BATCH = 128
CLIENTS, REQUESTS = 200, 10_000


def recall(index: Index, asked: list[Question], kind: Kind) -> dict[str, Any]:
    found = index.search([question.text for question in asked], 10, kind)
    result: dict[str, Any] = {"questions": len(asked)}
    for k in (5, 10):
        shown = [{hit.passage.title for hit in hits[:k]} for hits in found]
        pairs = [(set(question.gold), titles) for question, titles in zip(asked, shown, strict=True)]
        result[f"any@{k}"] = round(float(np.mean([bool(gold & titles) for gold, titles in pairs])), 4)
        result[f"all@{k}"] = round(float(np.mean([gold <= titles for gold, titles in pairs])), 4)
    return result


def speed(index: Index, asked: list[str], kind: Kind) -> dict[str, float]:
    index.search(asked[:1], 5, kind)
    alone = []
    for query in asked[:1000]:
        began = time.perf_counter()
        index.search([query], 5, kind)
        alone.append(time.perf_counter() - began)
    began = time.perf_counter()
    for start in range(0, len(asked), BATCH):
        index.search(asked[start : start + BATCH], 5, kind)
    return {
        "one_by_one_p50_ms": round(1000 * float(np.percentile(alone, 50)), 3),
        "one_by_one_p95_ms": round(1000 * float(np.percentile(alone, 95)), 3),
        f"batches_of_{BATCH}_ms_per_query": round(1000 * (time.perf_counter() - began) / len(asked), 3),
    }


def build(index: Index, folder: Path) -> dict[str, Any]:
    """Index the first passages again, with progress output."""
    said: list[str] = []
    began = time.perf_counter()
    first = islice(index.corpus, BUILD_PASSAGES)
    built = Index.build(first, folder / "build", lexical=LexicalSettings(), report=said.append)
    seconds = time.perf_counter() - began
    size = sum(built.manifest.files.values())
    return {
        "passages": built.manifest.num_passages,
        "seconds": round(seconds, 1),
        "megabytes": round(size / 1e6),
        "reports": len(said),
        "one_of_them": said[len(said) // 2],
    }


def dense(index: Index, asked: list[Question], encoder: str, folder: Path) -> dict[str, Any]:
    """Lexical, dense and hybrid on one slice: the gold pages of some questions, and other passages."""
    chosen = asked[:DENSE_QUESTIONS]
    gold = {title for question in chosen for title in question.gold}
    needed = [passage for passage in index.corpus if passage.title in gold]
    others = islice((p for p in index.corpus if p.title not in gold), 0, None, len(index.corpus) // DENSE_PASSAGES)
    corpus: list[Passage] = [*needed, *others][:DENSE_PASSAGES]
    settings = DenseSettings(encoder=replace(ENCODERS["minilm"], model=encoder))
    began = time.perf_counter()
    built = Index.build(corpus, folder / "dense", lexical=LexicalSettings(), dense=settings)
    result: dict[str, Any] = {
        "encoder": "all-MiniLM-L6-v2",
        "passages": len(corpus),
        "build_seconds": round(time.perf_counter() - began, 1),
    }
    for kind in built.manifest.kinds:
        result[kind] = recall(built, chosen, kind)
    return result


def _serve(directory: Path, port: int) -> None:
    serve(Index.open(directory), host="127.0.0.1", port=port, limits=ServerLimits())


def under_load(index: Index, asked: list[str]) -> list[dict[str, Any]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = multiprocessing.get_context("spawn").Process(target=_serve, args=(index.directory, port), daemon=True)
    server.start()
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                httpx.get(f"{url}/health")
                break
            except httpx.ConnectError:
                time.sleep(0.1)
        results = []
        for per_request, requests in ((1, REQUESTS), (8, REQUESTS // 8)):
            result = asyncio.run(
                load(url, clients=CLIENTS, requests=requests, queries=asked, queries_per_request=per_request)
            )
            print(f"{per_request} per request: {result}")
            rate = round(per_request * result.per_second)
            results.append({"queries_per_request": per_request, "queries_per_second": rate, **_rounded(asdict(result))})
        return results
    finally:
        server.terminate()  # SIGTERM, on which the server exits cleanly
        server.join(timeout=30)


def _rounded(values: dict[str, Any]) -> dict[str, Any]:
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in values.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=data_dir(FOLDER), help="folder that agent-r1 data recipe made")
    parser.add_argument("--encoder", help="Hugging Face directory of all-MiniLM-L6-v2, for dense search")
    parser.add_argument("--to", type=Path, default=RESULTS / "search.json")
    arguments = parser.parse_args()
    index = Index.open(arguments.data / INDEX)
    asked = {split: questions(split, arguments.data) for split in SPLITS}
    texts = [question.text for group in asked.values() for question in group]
    command = f"python -m benchmarks.search{' --encoder DIR' if arguments.encoder else ''}"
    result: dict[str, Any] = {"command": command, **machine()}
    result["passages"] = index.manifest.num_passages
    groups = {name: asked[f"{name}_train"] + asked[name] for name in ("2wiki", "musique")}
    groups["hotpotqa"] = asked["train"] + asked["test"]
    result["recall"] = {name: recall(index, group, "lexical") for name, group in groups.items()}
    print(json.dumps(result["recall"], indent=1))
    result["speed"] = speed(index, texts, "lexical")
    print(json.dumps(result["speed"], indent=1))
    with tempfile.TemporaryDirectory() as folder:
        result["build"] = build(index, Path(folder))
        print(json.dumps(result["build"], indent=1))
        if arguments.encoder:
            result["dense"] = dense(index, groups["hotpotqa"], arguments.encoder, Path(folder))
            print(json.dumps(result["dense"], indent=1))
    result["load"] = under_load(index, texts)
    arguments.to.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
