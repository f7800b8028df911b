"""The commands of shell blocks, and why some of them are not run by tests."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from itertools import dropwhile

from tests.docs.shown.blocks import Block, in_language

COMMENT = re.compile(r"(?:^|(?<=\s))#.*$", re.MULTILINE)
# A pattern that the whole command matches, and the reason why it is only parsed. Paths in reasons exist.
NOT_RUN = {
    r"(pip|python3? -m (pip|venv)|source) .*": "installs packages: .ci/package installs this one",
    r"(pytest -n 3|ruff .*|mypy|lint-imports)": "is what .ci/run does",
    r"pytest tests/.*": "is for a machine with a GPU",
    r"pytest -q shop": "tests/docs/test_tutorial.py runs it",
    r"python -m benchmarks\..*": "takes minutes or a GPU",
    r"python -c .*": "needs downloaded data",
    r"nvidia-cuda-mps-control -d": "needs a GPU",
    r"(srun|torchrun) .*": "needs a cluster",
    r"ssh .*": "needs another machine",
    r"agent-r1 bench .*": "takes minutes: tests/bench/test_bench_commands.py",
    r"agent-r1 data .*": "downloads: tests/data/test_download.py",
    r"agent-r1 push .*": "uploads: tests/share/test_push.py",
    r"agent-r1 export .* --merge": "needs a run with adapters: tests/share/test_export.py",
    r"agent-r1 search .*": "serves until it is stopped: tests/recipes/test_paper_service.py",
    r"agent-r1 serve .*": "serves until it is stopped: tests/cli/test_serve_command.py",
    r"agent-r1 view(?!.*--export).*": "serves until it is stopped: tests/serve/test_view_server.py",
    r"agent-r1 chat --url .*": "needs a server: tests/cli/test_remote_chat.py",
    r"agent-r1 chat .* --image .*": "needs a model that sees: tests/vision/test_inputs.py",
    r"agent-r1 eval RUN --split (2wiki|spar|valid_seen)": "needs downloaded data",
    r"agent-r1 sft quickstart sft.trajectories=.*": "needs solved episodes: tests/cli/test_collect_command.py",
    r"agent-r1 train .*backend=verl.*": "needs Ray and verl: .ci/verl",
    r"agent-r1 train RECIPE model.path=runs/verl-run .*": "needs a run on verl: .ci/verl",
    r"agent-r1 train .*engine.kind=vllm.*": "needs vLLM: .ci/vllm",
    r"agent-r1 train .*--gpus .*": "starts several processes: tests/cli/test_ranks.py",
    r"agent-r1 train .*track=.*": "needs an account: tests/runs/test_track.py",
    r"agent-r1 train \w+/tiny": "tests/recipes/test_recipes_run.py trains it",
    r"agent-r1 train \w+/cpu": "takes minutes; tests/recipes/test_recipes_run.py trains two steps",
    r"agent-r1 train (vision_quickstart|drafts_critic|forecast|gridworld|planner_worker)": "takes minutes",
    r"agent-r1 (train|sft) (alfworld|geometry3k|gsm8k|hotpotqa|paper_search|retool|tables|webshop).*": "needs data",
}  # fmt: skip


def is_script(block: Block) -> bool:
    """Whether a block is a file for Slurm. It has more than commands, and its other lines are only checked by bash."""
    return block.body.startswith("#!")


def commands_in(block: Block) -> Iterator[str]:
    """Simple commands, without comments, variables before them and the folder of a virtual environment."""
    text = COMMENT.sub("", block.body.replace("\\\n", " "))
    if is_script(block):
        text = "\n".join(re.findall(r"agent-r1 [^&\n]*", text))
    words = shlex.shlex(text, posix=True, punctuation_chars="\n;&|")
    words.whitespace, words.commenters, words.whitespace_split = " \t", "", True
    command: list[str] = []
    for word in [*words, "\n"]:
        if not set(word) <= set("\n;&|"):
            command.append(word)
        elif command:
            program, *options = dropwhile(re.compile(r"[A-Z_0-9]+=").match, command)
            yield shlex.join([program.rpartition("/bin/")[2], *options])
            command = []


COMMANDS = list(dict.fromkeys(command for block in in_language("bash") for command in commands_in(block)))


def reason(command: str) -> str | None:
    """Why a command is not run, or None."""
    return next((why for pattern, why in NOT_RUN.items() if re.fullmatch(pattern, command, re.DOTALL)), None)


RUN = [command for command in COMMANDS if reason(command) is None]
SKIPPED = [command for command in COMMANDS if reason(command) is not None]
