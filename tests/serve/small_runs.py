"""Small run directories for the tests of the viewer, with every kind of episode: won, lost, failed, hostile, long."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agent_r1.config import parse_config
from agent_r1.runs.run_dir import RunDir
from agent_r1.types import Failure, Group, Step, StopReason, TaskRow, ToolCallRecord, Trajectory

CONFIG = parse_config(
    {"recipe": "shop", "task": {"rows": "task.rows", "reward": "task.reward"}, "model": {"path": "a/b"}}
)
TOKENS = ["<a>", "one", " two", "\n", "\udce2\udc82", "</script><b>x</b>", "", "seven"]
HOSTILE = "<img src=x onerror=\"document.title='hacked'\"><script>document.title='hacked'</script>"
LONG = "long " * 40_000  # 200,000 characters


def make_step(*, text: str = "plain words", call: dict[str, Any] | None = None, prompt: int = 3, **fields: Any) -> Step:
    calls: tuple[ToolCallRecord, ...] = ()
    if call is not None:
        span = (text.index("{"), text.index("}") + 1)
        calls = (
            ToolCallRecord(**{"name": "price", "arguments": {"item": "tea"}, "result": "4", "text_span": span, **call}),
        )
    return Step(
        prompt_ids=[index % len(TOKENS) for index in range(prompt)],
        response_ids=[1, 2, 5, 4],
        response_logprobs=[-0.01, -0.5, -2.0, -5.0],
        temperature=1.0,
        action_text=text,
        calls=calls,
        feedback=f"price: {calls[0].result}" if calls else "",
        versions=((0, 4),),
        generate_seconds=0.5,
        env_seconds=0.25,
        **fields,
    )


def make_episode(
    row: str, attempt: int, reward: float, *steps: Step, stop: StopReason = StopReason.ANSWERED
) -> Trajectory:
    failure = Failure(kind="ValueError", message="it broke", source="tool 'price'") if stop.is_failure else None
    return Trajectory(
        row_id=row,
        trajectory_id=f"{row}#{attempt}",
        steps=list(steps),
        stop=stop,
        outcome_reward=reward,
        reward_components={"reward": reward},
        failure=failure,
        started=1_700_000_000.0 + attempt,
        seconds=2.0,
    )


def make_groups(step: int) -> list[Group]:
    """Three rows: tea (won by one role, lost by another), a hostile one, and one that failed."""
    calling = make_step(
        text="I look {it} up", call={"seconds": 0.2, "reward": 0.125}, role="buyer", start_seconds=0.125
    )
    answer = make_step(text=f"It costs {step} coins", prompt=7, role="buyer", start_seconds=1.25)
    refused = make_step(
        text="try {that} now", call={"error": "no such item", "fault": "bad_arguments", "name": "stock"}, role="seller"
    )
    hostile = make_step(text=f"{HOSTILE} {{it}}", call={"arguments": {HOSTILE: HOSTILE}, "result": HOSTILE + LONG})
    return [
        group(
            "tea",
            "What does tea cost?",
            "4",
            make_episode("tea", 0, 1.0, calling, answer),
            make_episode("tea", 1, 0.0, refused),
        ),
        group(
            "hostile", f"Who? {HOSTILE}", HOSTILE, make_episode("hostile", 0, 0.5, hostile, stop=StopReason.MAX_STEPS)
        ),
        group("broken", "And coffee?", None, make_episode("broken", 0, 0.0, calling, stop=StopReason.ERROR)),
    ]


def group(row: str, question: str, truth: str | None, *episodes: Trajectory) -> Group:
    prompt = [{"role": "system", "content": "You sell tea."}, {"role": "user", "content": question}]
    return Group(
        row=TaskRow(prompt=prompt, row_id=row, reward_model={"ground_truth": truth}), trajectories=list(episodes)
    )


def make_run(path: Path, *, steps: int = 3, seed: int = 0) -> RunDir:
    """Train some steps, with an evaluation before and after."""
    config = CONFIG.model_copy(update={"seed": seed, "trainer": CONFIG.trainer.model_copy(update={"steps": steps})})
    run = RunDir.create(path, config)
    run.write_tokens(TOKENS)
    for step in range(steps + 1):
        if step in (0, steps):
            run.write_trajectories("eval", step, make_groups(step))
            run.append_metrics("eval", step, {"success": 0.2 + step / 10, "success_stderr": 0.05}, panel="p")
        if step > 0:
            add_step(run, step)
    return run


def add_step(run: RunDir, step: int) -> None:
    groups = make_groups(step)
    of_a_step = {"advantages": [0.5, 0.25, -0.25, -0.5], "ratios": [1, 0.5, 1, 2], "entropies": [0, 0.1, 0.2, 0.4]}
    episodes = [episode for each in groups for episode in each.trajectories]
    per_token = {t.trajectory_id: {name: [row] * len(t.steps) for name, row in of_a_step.items()} for t in episodes}
    run.write_trajectories("train", step, groups, per_token)
    measured = {
        "reward/mean": step / 10,
        "success": step / 20,
        "entropy": 0.5,
        "grad_norm": 1.0,
        "time/collect": 2.0,
        "time/update": 1.0,
        "episode/steps": 1.5,
    }
    run.append_metrics("train", step, measured)
