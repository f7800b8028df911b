"""The server of the viewer: what it answers and what it refuses. Agents and other web pages are hostile."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from starlette.testclient import TestClient

from agent_r1.runs.outcomes import EvalRecord, Subject
from agent_r1.runs.run_dir import RunDir
from agent_r1.serve.listening import is_loopback
from agent_r1.serve.view.library import Library
from agent_r1.serve.view.server import COOKIE, HEADERS, make_app, static_files
from agent_r1.types import Step
from tests.serve.small_runs import HOSTILE, LONG, group, make_episode, make_groups, make_run, make_step

STATIC = Path(__file__).parents[2] / "agent_r1" / "serve" / "view" / "static"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path / "runs" / "shop")


@pytest.fixture
def client(run: RunDir) -> TestClient:
    return TestClient(make_app(Library([run.path.parent])), base_url="http://localhost:8200")


def all_episodes(client: TestClient) -> list[dict[str, Any]]:
    """Ask until everything is read, as the page does."""
    while (answer := client.get("/api/episodes", params={"run": "shop"}).json())["read"] < answer["total"]:
        pass
    rows: list[dict[str, Any]] = answer["rows"]
    return rows


def test_every_answer_has_the_security_headers(client: TestClient) -> None:
    for address in ("/", "/static/main.js", "/api/runs", "/api/unknown", "/nothing", "/static/unknown.js"):
        answer = client.get(address)
        for name, value in HEADERS.items():
            assert answer.headers.get_list(name) == [value], (address, name)
    policy = client.get("/").headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert client.get("/").headers["x-frame-options"] == "DENY"
    assert "access-control-allow-origin" not in client.get("/api/runs", headers={"origin": "http://evil.test"}).headers


def test_the_page_has_no_inline_code_and_asks_nobody_else() -> None:
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<script(?![^>]*\ssrc=)|\son\w+=|style=", page)
    for path in STATIC.iterdir():
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert "http" not in text.replace("http-equiv", ""), path.name
        assert not re.search(
            r"innerHTML|outerHTML|AdjacentHTML|document\.write|\beval\(|Function\(|Parser|srcdoc", text
        )


def test_only_loopback_names_are_answered(client: TestClient) -> None:
    for host in ("localhost", "localhost:8200", "127.0.0.1:1", "[::1]:8200", "[::1]", "LOCALHOST:1"):
        assert client.get("/api/runs", headers={"host": host}).status_code == 200, host
    for host in (
        "evil.test",
        "evil.test:8200",
        "localhost.evil.test",
        "127.0.0.1.evil.test:8200",
        "",
        "evil.test:localhost",
    ):
        answer = client.get("/api/runs", headers={"host": host})
        assert answer.status_code == 403, host
        assert "shop" not in answer.text


def test_with_a_token_nothing_is_answered_without_it(run: RunDir) -> None:
    client = TestClient(make_app(Library([run.path]), token="right"), base_url="http://somewhere.test")
    for address in ("/", "/api/runs", "/static/main.js", "/?token=wrong", "/?token=", "/api/runs?token=right"):
        answer = client.get(address, follow_redirects=False)
        assert answer.status_code == 401, address
        assert "shop" not in answer.text
    assert client.get("/api/runs", headers={"cookie": f"{COOKIE}=wrong"}).status_code == 401
    opened = client.get("/?token=right", follow_redirects=False)
    assert (opened.status_code, opened.headers["location"]) == (303, "/")
    cookie = opened.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert client.get("/api/runs").json()["runs"][0]["id"] == "shop"


@pytest.mark.parametrize(
    "address",
    [
        "/static/../server.py", "/static/..%2fserver.py", "/static/%2e%2e/server.py", "/static/....//server.py",
        "/static//etc/passwd", "/../../etc/passwd", "/static/main.js/../../server.py", "/static/", "/static",
        "/api/episode?run=shop&file=../config&n=0", "/api/episode?run=shop&file=%2e%2e%2fconfig&n=0",
        "/api/episode?run=../shop&file=eval_000000&n=0", "/api/episode?run=/etc&file=passwd&n=0",
        "/api/config?run=..", "/api/metrics?run=shop/../shop", "/api/group?run=shop&file=../../secret&row=tea",
        "/api/tokens?run=shop&file=/etc/passwd&n=0&step=0", "/api/text?run=shop&file=eval_000000&n=0&at=../../config",
        "/api/text?run=shop&file=eval_000000&n=0&at=__class__", "/api/episode?run=shop&file=eval_000000.jsonl&n=0",
    ],
)  # fmt: skip
def test_no_request_leads_out_of_the_runs(run: RunDir, client: TestClient, address: str) -> None:
    (run.path.parent / "secret.jsonl").write_text('{"secret": 1}\n')
    (run.path / "config.jsonl").write_text('{"secret": 1}\n')
    answer = client.get(address)
    assert answer.status_code in (400, 404), answer.text
    assert 'secret":' not in answer.text
    assert "root:" not in answer.text


def test_only_get_is_answered(client: TestClient) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert client.request(method, "/api/runs").status_code == 405


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("/api/nothing", "unknown question"),
        ("/api/metrics", "run is missing"),
        ("/api/metrics?run=shop&since=-1", "since must be an integer"),
        ("/api/episodes?run=shop&limit=many", "limit must be an integer"),
        ("/api/episodes?run=shop&sort=color", "cannot sort by 'color'"),
        ("/api/episode?run=shop&file=eval_000000&n=99", "no episode 99 in eval_000000"),
        ("/api/tokens?run=shop&file=eval_000000&n=0&step=9", "step 9 of episode 0"),
        ("/api/tokens?run=shop&file=eval_000000&n=0&part=steps", "has no 'steps'"),
        ("/api/group?run=shop&file=eval_000000&row=milk", "has no row 'milk'"),
        ("/api/episodes?run=other", "there is no run 'other'"),
    ],
)  # fmt: skip
def test_a_wrong_question_is_answered_with_the_reason(client: TestClient, address: str, problem: str) -> None:
    answer = client.get(address)
    assert answer.status_code in (400, 404)
    assert problem in answer.json()["error"]


def test_hostile_text_arrives_as_text_and_in_parts(client: TestClient) -> None:
    where = {"run": "shop", "file": "train_000001", "n": "2"}
    answer = client.get("/api/episode", params=where)
    assert answer.headers["content-type"] == "application/json"
    [step] = answer.json()["steps"]
    [call] = step["calls"]
    assert call["arguments"][0]["name"] == call["arguments"][0]["value"]["text"] == HOSTILE
    result, whole = call["result"], HOSTILE + LONG
    assert result["length"] == len(whole)
    text = result["text"]
    while len(text) < len(whole):
        part = client.get("/api/text", params={**where, "at": result["at"], "start": str(len(text))}).json()
        text += part["text"]
    assert text == whole
    assert part["end"] == len(whole)
    key = call["arguments"][0]["value"]["at"]
    assert client.get("/api/text", params={**where, "at": key}).json()["text"] == HOSTILE


def test_an_episode_has_its_tokens_and_what_was_recorded_for_them(client: TestClient) -> None:
    page = client.get("/api/episode", params={"run": "shop", "file": "train_000002", "n": "0"}).json()
    first, second = page["steps"]
    assert first["tokens"]["ids"] == [1, 2, 5, 4]
    # Token 4 is two bytes of a three-byte character.
    assert first["tokens"]["texts"] == ["one", " two", "</script><b>x</b>", "\u2039e2\u203a\u203982\u203a"]
    assert first["tokens"]["values"] == {
        "logprob": [-0.01, -0.5, -2.0, -5.0],
        "advantage": [0.5, 0.25, -0.25, -0.5],
        "ratio": [1.0, 0.5, 1.0, 2.0],
        "entropy": [0.0, 0.1, 0.2, 0.4],
    }
    # The first prompt is 0 1 2 and its response 1 2 5 4; the second prompt is 0 1 2 3 4 5 6: three tokens are shared.
    assert (second["prompt_tokens"], second["shared_tokens"], second["kept_all"]) == (7, 3, False)
    prompt = client.get("/api/tokens", params={"run": "shop", "file": "train_000002", "n": "0", "step": "1"}).json()
    assert prompt["ids"] == [0, 1, 2, 3, 4, 5, 6]
    assert prompt["values"] == {}  # not sampled: no values
    evaluated = client.get("/api/episode", params={"run": "shop", "file": "eval_000003", "n": "0"}).json()
    assert set(evaluated["steps"][0]["tokens"]["values"]) == {"logprob"}


def test_every_number_that_was_recorded_per_token_is_offered(run: RunDir, client: TestClient) -> None:
    path = run.trajectories_file("train", 1)
    record = json.loads(path.read_text(encoding="utf-8").splitlines()[0])
    record["steps"][0] |= {"novelty": [0.1, 0.2, 0.3, 0.4], "other": [1, 2]}
    path.write_text(json.dumps(record) + "\n", encoding="utf-8")
    step = client.get("/api/episode", params={"run": "shop", "file": "train_000001", "n": "0"}).json()["steps"][0]
    assert list(step["tokens"]["values"]) == ["logprob", "advantage", "ratio", "entropy", "novelty"]
    assert step["tokens"]["values"]["novelty"] == [0.1, 0.2, 0.3, 0.4]


def test_texts_are_cut_by_code_points(run: RunDir, client: TestClient) -> None:
    text = "\U0001f600" * 20_000  # two UTF-16 units each
    episode = make_episode("tea", 0, 1.0, make_step(text=text))
    groups = make_groups(8)
    run.write_trajectories("train", 8, [replace(groups[0], trajectories=[episode])])
    where = {"run": "shop", "file": "train_000008", "n": "0"}
    cut = client.get("/api/episode", params=where).json()["steps"][0]["text"]
    assert (cut["end"], cut["length"]) == (16_000, 20_000)
    rest = client.get("/api/text", params={**where, "at": cut["at"], "start": str(cut["end"])}).json()
    assert cut["text"] + rest["text"] == text


def test_an_episode_of_an_older_version_is_shown(run: RunDir, client: TestClient) -> None:
    record = json.loads(run.trajectories_file("train", 1).read_text(encoding="utf-8").splitlines()[0])
    old = {
        key: value for key, value in record.items() if key not in ("format", "opening", "failure", "next_prompt_ids")
    }
    for step in old["steps"]:
        for name in ("versions", "summary", "hidden_messages", "temperature", "top_p", "top_k", "support"):
            del step[name]
        step["policy_version"] = 5
    with gzip.open(run.path / "trajectories" / "train_000009.jsonl.gz", "wt") as file:
        file.write(json.dumps(old) + "\n" + json.dumps({**old, "format": 99}) + "\n" + json.dumps({"steps": 3}) + "\n")
    where = {"run": "shop", "file": "train_000009"}
    page = client.get("/api/episode", params={**where, "n": "0"}).json()
    assert [message["text"]["text"] for message in page["messages"]] == ["You sell tea.", "What does tea cost?"]
    assert page["steps"][0]["versions"] == [[5, 4]]
    assert "reads up to" in client.get("/api/episode", params={**where, "n": "1"}).json()["error"]
    assert "is damaged" in client.get("/api/episode", params={**where, "n": "2"}).json()["error"]


def test_the_times_of_a_batch_are_on_one_clock(client: TestClient) -> None:
    batch = client.get("/api/batch", params={"run": "shop", "file": "train_000002"}).json()
    assert (batch["kind"], batch["step"], batch["recorded"]) == ("train", 2, True)
    assert (batch["before"], batch["after"]) == ("train_000001", "train_000003")
    assert [(one["row"], one["start"], one["seconds"]) for one in batch["episodes"]] == [
        ("tea", 0.0, 2.0), ("tea", 1.0, 2.0), ("hostile", 0.0, 2.0), ("broken", 0.0, 2.0),
    ]  # fmt: skip
    assert batch["seconds"] == 3.0  # the second attempt began one second later
    names = batch["names"]
    won = [(*step[:3], names[step[3]], names[step[4]]) for step in batch["episodes"][0]["steps"]]
    assert won == [(0.125, 0.5, 0.25, "price", "buyer"), (1.25, 0.5, 0.25, "environment", "buyer")]
    # five steps in all; the rest of the 4 * 2 s is something else; three of four ended a second before the batch
    assert batch["spent"] == {
        "sampling": 2.5, "price": 0.75, "environment": 0.25, "stock": 0.25, "\0other": 4.25, "\0ended": 3.0,
    }  # fmt: skip
    newest = client.get("/api/batch", params={"run": "shop"}).json()
    assert (newest["file"], newest["after"]) == ("train_000003", None)


def test_a_batch_of_an_older_run_is_drawn_without_a_clock(run: RunDir, client: TestClient) -> None:
    lines = run.trajectories_file("train", 1).read_text(encoding="utf-8").splitlines()
    older = [{key: value for key, value in json.loads(line).items() if key != "started"} for line in lines]
    for record in older:
        record["format"] = 2
        for step in record["steps"]:
            del step["start_seconds"]
    text = "".join(json.dumps(record) + "\n" for record in older) + '{"steps": 3}\n'  # and a damaged one
    (run.path / "trajectories" / "train_000008.jsonl").write_text(text, encoding="utf-8")
    batch = client.get("/api/batch", params={"run": "shop", "file": "train_000008"}).json()
    assert not batch["recorded"]
    assert [step[0] for step in batch["episodes"][0]["steps"]] == [0.0, 0.75]  # one after the other
    assert {one["start"] for one in batch["episodes"]} == {0.0}
    assert (len(batch["episodes"]), batch["episodes"][4]["steps"]) == (5, [])


@pytest.mark.parametrize(
    "change",
    [
        {"steps": 3},
        {"format": 99},
        {"started": "yesterday"},
        {"seconds": float("nan")},
        {"steps": [{"calls": [], "start_seconds": float("inf")}]},
    ],
)
def test_an_episode_without_readable_times_does_not_change_those_of_the_others(
    run: RunDir, client: TestClient, change: dict[str, Any]
) -> None:
    lines = run.trajectories_file("train", 1).read_text(encoding="utf-8").splitlines()
    damaged = {**json.loads(lines[3]), **change}
    text = "\n".join([*lines[:3], json.dumps(damaged)])
    (run.path / "trajectories" / "train_000008.jsonl").write_text(f"{text}\n", encoding="utf-8")
    batch = client.get("/api/batch", params={"run": "shop", "file": "train_000008"}).json()
    assert (batch["recorded"], batch["seconds"]) == (True, 3.0)
    assert [(one["start"], one["seconds"], len(one["steps"])) for one in batch["episodes"]] == [
        (0.0, 2.0, 2), (1.0, 2.0, 1), (0.0, 2.0, 1), (0.0, 0.0, 0),
    ]  # fmt: skip
    assert batch["spent"]["\0ended"] == 2.0  # of the two that ended a second before the third


def test_a_run_without_episodes_has_no_time_line(run: RunDir, client: TestClient) -> None:
    shutil.rmtree(run.path / "trajectories")
    assert "has kept no episodes" in client.get("/api/batch", params={"run": "shop"}).json()["error"]


def test_a_role_s_prompt_is_compared_with_its_own_last_step(run: RunDir, client: TestClient) -> None:
    steps = [
        Step(prompt_ids=ids, role=role, response_ids=[9], response_logprobs=[-1.0])
        for ids, role in (([1], "asker"), ([5, 6], "teller"), ([1, 9, 2], "asker"), ([5, 7], "teller"))
    ]
    run.write_trajectories("train", 7, [group("row", "?", None, make_episode("row", 0, 1.0, *steps))])
    page = client.get("/api/episode", params={"run": "shop", "file": "train_000007", "n": "0"}).json()
    assert [(step["role"], step["shared_tokens"], step["kept_all"]) for step in page["steps"]] == [
        ("asker", 0, True), ("teller", 0, True), ("asker", 2, True), ("teller", 1, False),
    ]  # fmt: skip


def test_a_run_without_token_texts_still_shows_ids(run: RunDir, client: TestClient) -> None:
    (run.path / "tokens.json").unlink()
    page = client.get("/api/episode", params={"run": "shop", "file": "train_000002", "n": "0"}).json()
    assert page["steps"][0]["tokens"]["texts"] is None
    assert page["steps"][0]["tokens"]["ids"] == [1, 2, 5, 4]


def test_numbers_that_are_not_finite_are_texts(run: RunDir, client: TestClient) -> None:
    path = run.trajectories_file("train", 1)
    lines = path.read_text(encoding="utf-8").splitlines()
    lines[0] = lines[0].replace("-0.01", '"NaN"').replace('"total_reward": 1.0', '"total_reward": "Infinity"')
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    page = client.get("/api/episode", params={"run": "shop", "file": "train_000001", "n": "0"}).json()
    assert page["steps"][0]["tokens"]["values"]["logprob"][0] == "NaN"
    rows = all_episodes(client)
    assert next(row for row in rows if (row["file"], row["n"]) == ("train_000001", 0))["reward"] == "inf"


def test_metrics_come_in_parts_and_start_over_when_replaced(run: RunDir, client: TestClient) -> None:
    first = client.get("/api/metrics", params={"run": "shop"}).json()
    assert len(first["records"]) == 5
    since = {"run": "shop", "since": "5", "generation": str(first["generation"])}
    assert client.get("/api/metrics", params=since).json()["records"] == []
    run.append_metrics("train", 4, {"success": 1.0})
    assert [record["step"] for record in client.get("/api/metrics", params=since).json()["records"]] == [4]
    run.forget_after(1)
    again = client.get("/api/metrics", params=since).json()
    assert again["generation"] != first["generation"]
    assert again["since"] == 0
    assert [(record["kind"], record["step"]) for record in again["records"]] == [("eval", 0), ("train", 1)]


def test_a_deleted_run_is_gone_and_said_to_be(run: RunDir, client: TestClient) -> None:
    assert len(all_episodes(client)) == 20
    shutil.rmtree(run.path)
    answer = client.get("/api/episodes", params={"run": "shop"})
    assert answer.status_code == 404
    assert "moved, renamed or deleted" in answer.json()["error"]
    assert client.get("/api/runs").json()["runs"] == []


def test_evaluations_of_a_run_are_listed_and_damaged_ones_say_so(run: RunDir, client: TestClient) -> None:
    subject = Subject.of(run.settings, model=str(run.path / "checkpoints" / "step_000003"), panel="p")
    outcomes = {"a": {"success": 1.0}, "b": {"success": 0.0}}
    run.evals.mkdir()
    EvalRecord(subject=subject, outcomes=outcomes, metrics={}).save(run.evals / "good.json")
    (run.evals / "bad.json").write_text("{}")
    bad, good = client.get("/api/evaluations", params={"run": "shop"}).json()["evaluations"]
    assert (good["success"], good["stderr"], good["rows"]) == (0.5, 0.5, 2)
    assert good["model"] == "checkpoints/step_000003"
    assert "not an evaluation" in bad["problem"]


def test_loopback_addresses_are_known() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.5.5.5", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.168.1.1", "example.test", "localhost.evil.test")))


def test_the_files_of_the_page_are_found_as_package_data() -> None:
    assert {"index.html", "main.js", "style.css", "icon.svg"} <= static_files().keys()


def ask_raw(port: int | None, path: str) -> bytes:
    """Send a path as it is; HTTP clients remove the dots."""
    with socket.create_connection(("127.0.0.1", port or 0), timeout=20) as line:
        line.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        return line.recv(64)


def serve_with(*options: str) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "agent_r1.cli", "view", *options, "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    line = server.stdout.readline()
    return server, line[line.index("http://") :].split()[0]


def test_the_command_serves_until_interrupted(run: RunDir) -> None:
    server, link = serve_with(str(run.path))
    try:
        assert httpx.get(f"{link}api/runs").json()["runs"][0]["id"] == "shop"
        assert httpx.get(link, headers={"host": "evil.test"}).status_code == 403
        for path in ("/static/../server.py", "/../../../etc/passwd", "/static/..%2f..%2fserver.py", "//etc/passwd"):
            assert b" 404 " in ask_raw(urlsplit(link).port, path), path
    finally:
        server.send_signal(signal.SIGINT)
        assert server.wait(20) == 0


def test_the_command_needs_a_token_on_other_addresses(run: RunDir) -> None:
    server, link = serve_with(str(run.path), "--host", "0.0.0.0")
    try:
        parts = urlsplit(link)
        here = f"http://127.0.0.1:{parts.port}/"
        assert httpx.get(f"{here}api/runs").status_code == 401
        with httpx.Client(follow_redirects=True) as browser:
            assert browser.get(here, params=parse_qs(parts.query)).status_code == 200
            assert json.loads(browser.get(f"{here}api/runs").text)["runs"][0]["id"] == "shop"
    finally:
        server.terminate()
        server.wait(20)
