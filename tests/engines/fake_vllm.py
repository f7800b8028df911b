"""An HTTP server that answers like vLLM and fails on demand, in ways that a real server cannot be made to."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

MODEL_CONFIG = {
    "max_model_len": 64,
    "logprobs_mode": "processed_logprobs",
    "max_logprobs": 28,
    "hf_overrides": {"tie_word_embeddings": False},
}


def answer(ids: list[int], **changes: Any) -> dict[str, Any]:
    """An answer in vLLM's form; every token has log-prob -1."""
    content = [{"token_id": i, "logprob": -1.0, "top_logprobs": [{"token_id": i, "logprob": -1.0}]} for i in ids]
    return {"choices": [{"token_ids": ids, "finish_reason": "length", "logprobs": {"content": content}} | changes]}


class FakeVLLM:
    """Responses continue the last id of the prompt. `calls` lists the paths of all posts but `generate`."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.bodies: list[dict[str, Any]] = []  # of `generate`
        self.healthy = True
        self.version = "0.32.0"
        self.dev_mode = True
        self.model_config: dict[str, Any] = dict(MODEL_CONFIG)
        self.max_lora_rank = 0  # 0: started without adapters
        self.refuses_adapters = False  # VLLM_ALLOW_RUNTIME_LORA_UPDATING is not set
        self.levels: list[str] = []  # of `sleep`
        self.updates: list[dict[str, Any]] = []  # bodies about weights that come without a file
        self.adapters: dict[str, str] = {}  # the loaded ones: their folders by name
        self.drop: Callable[[str], bool] = lambda path: False  # close the connection instead of answering this path
        self.release = threading.Event()  # `generate` waits for it
        self.release.set()
        self._aborted: set[str] = set()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._answer(fake.get(urlsplit(self.path).path))

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                parts = urlsplit(self.path)
                given = {"body": json.loads(body) if body else {}, "query": parse_qs(parts.query)}
                self._answer(fake.post(parts.path, **given))

            def _answer(self, result: tuple[int, Any] | None) -> None:
                if result is None or fake.drop(urlsplit(self.path).path):
                    self.close_connection = True
                    return
                code, content = result
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the client has given up
                    self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    def get(self, path: str) -> tuple[int, Any]:
        if path == "/health":
            return (200 if self.healthy else 503), {}
        if path == "/version":
            return 200, {"version": self.version}
        if path == "/server_info" and self.dev_mode:
            lora = {"max_lora_rank": self.max_lora_rank} if self.max_lora_rank else None
            return 200, {"vllm_config": {"model_config": self.model_config, "lora_config": lora}}
        return 404, {}

    def post(self, path: str, *, body: dict[str, Any], query: dict[str, Any]) -> tuple[int, Any] | None:
        if path != "/inference/v1/generate":
            self.calls.append(path)
            self._aborted.update(body.get("request_ids", []))
            self.levels += query.get("level", [])
            if "init_info" in body or "update_info" in body:
                self.updates.append(body)
            if path == "/v1/load_lora_adapter":
                if self.refuses_adapters:
                    return 404, {}
                self.adapters[body["lora_name"]] = body["lora_path"]
            elif path == "/v1/unload_lora_adapter":
                del self.adapters[body["lora_name"]]
            return 200, {} if "lora" not in path else b"Success"
        self.bodies.append(body)
        count, start = body["sampling_params"]["max_tokens"], body["token_ids"][-1]
        ids = [(start + 1 + i) % 97 for i in range(count)]
        while not self.release.wait(0.01):
            if not self.healthy:
                return None
            if f"generate-tokens-{body['request_id']}" in self._aborted:
                return 200, answer(ids[:2], finish_reason="abort")
        return 200, answer(ids)

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def fakes(count: int) -> Iterator[list[FakeVLLM]]:
    servers = [FakeVLLM() for _ in range(count)]
    try:
        yield servers
    finally:
        for server in servers:
            server.stop()
