"""Draw a three-step episode token by token: its author, what is trained, rewards, and each kind of advantage.

    python -m benchmarks.draw_masks            # writes docs/masks.png

Four attempts at one question are written by hand; each word is a token. All numbers come from the functions that
training uses: the sequence and its trained positions from `merge_steps`, the rewards from
`process_rewards` and `outcome_rewards`, the advantages from `assign_credit`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.patches import Rectangle

from agent_r1.learn.algorithms import get_algorithm
from agent_r1.learn.batch.packs import Segment, merge_steps
from agent_r1.learn.credit import assign_credit
from agent_r1.learn.rewards import outcome_rewards, process_rewards
from agent_r1.track.plots import drawn
from agent_r1.types import Group, PerToken, Step, StopReason, TaskRow, ToolCallRecord, Trajectory

PICTURE = Path(__file__).parents[1] / "docs" / "masks.png"
QUESTION = "<user> coins of Ann and Bob ? <agent>"
# One per level of credit.
LEVELS = {"grpo": "one number per trajectory", "reinforce": "one per step", "reinforce++": "one per token"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A response, the process rewards of its calls, and the environment's reply."""

    response: str
    paid: dict[str, float]  # call, as written in the response -> its reward
    reply: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One column per token of the merged sequence; None where a number does not exist."""

    words: list[str]
    steps: list[int | None]  # the step whose response the token belongs to; None for prompt and tool text
    rows: dict[str, list[float | None]]


class Vocabulary:
    """Numbers words in order of appearance."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def encode(self, text: str) -> list[int]:
        self.words.extend(word for word in dict.fromkeys(text.split()) if word not in self.words)
        return [self.words.index(word) for word in text.split()]


def play(name: str, turns: Sequence[Turn], outcome: float, vocabulary: Vocabulary) -> Trajectory:
    """An append-only episode: every prompt is the previous one, its response and the environment's reply."""
    prompt_ids = vocabulary.encode(QUESTION)
    steps = []
    for turn in turns:
        response_ids = vocabulary.encode(f"{turn.response} <end>")
        steps.append(
            Step(
                prompt_ids=prompt_ids,
                response_ids=response_ids,
                response_logprobs=[-1.0] * len(response_ids),
                reward=sum(turn.paid.values()),
                calls=tuple(record(turn.response, call, reward) for call, reward in turn.paid.items()),
            )
        )
        prompt_ids = [*prompt_ids, *response_ids, *vocabulary.encode(turn.reply)]
    return Trajectory(row_id="coins", trajectory_id=name, steps=steps, stop=StopReason.ANSWERED, outcome_reward=outcome)


def record(response: str, call: str, reward: float) -> ToolCallRecord:
    start = response.index(call)
    first = len(response[:start].split())
    return ToolCallRecord(
        name="lookup",
        arguments={},
        result="",
        reward=reward,
        text_span=(start, start + len(call)),
        token_span=(first, first + len(call.split())),
    )


def episodes() -> tuple[Group, Vocabulary]:
    """The first attempt is drawn. Its second step misspells a name and corrects it at once."""
    vocabulary = Vocabulary()
    ann, bob, misspelt = "lookup ( Ann )", "lookup ( Bob )", "lookup ( Bop )"
    first = Turn(response=ann, paid={ann: 0.2}, reply="<tool> 19 <agent>")
    both = Turn(response=f"{misspelt} {bob}", paid={misspelt: -0.4, bob: 0.2}, reply="<tool> unknown 23 <agent>")
    wrong = Turn(response=misspelt, paid={misspelt: -0.4}, reply="<tool> unknown <agent>")
    attempts = [
        play("drawn", [first, both, Turn(response="answer 42", paid={})], 1.0, vocabulary),
        play("guess", [Turn(response="answer 40", paid={})], 0.0, vocabulary),
        play("half", [first, Turn(response="answer 19", paid={})], 0.0, vocabulary),
        play("lost", [first, wrong, Turn(response="answer 19", paid={})], 0.0, vocabulary),
    ]
    return Group(row=TaskRow(prompt=[{"role": "user", "content": QUESTION}]), trajectories=attempts), vocabulary


def picture() -> Picture:
    group, vocabulary = episodes()
    drawn = group.trajectories[0]
    (segment,) = merge_steps([drawn])  # append-only: all three steps are one sequence
    advantages = {name: assign_credit([group], get_algorithm(name))[0].advantages for name in LEVELS}
    rewards = {"process reward": process_rewards(drawn), "outcome reward": outcome_rewards(drawn)}
    credit = {f"advantage, {name}\n({level})": advantages[name] for name, level in LEVELS.items()}
    steps: list[int | None] = [None] * len(segment.token_ids)
    for position, step in zip(segment.trained, segment.step_indices, strict=True):
        steps[position] = step
    trained = [float(step is not None) for step in steps]
    carrying = [float(value is not None) for value in on_positions(segment, advantages["grpo"])]
    return Picture(
        words=[vocabulary.words[token] for token in segment.token_ids],
        steps=steps,
        rows={
            "loss mask": list(trained),
            "advantage mask": list(carrying),
            **{name: without_zeros(on_positions(segment, placed)) for name, placed in rewards.items()},
            **{name: on_positions(segment, placed) for name, placed in credit.items()},
        },
    )


def on_positions(segment: Segment, per_token: PerToken) -> list[float | None]:
    """Numbers of response tokens at their positions in the merged sequence; other positions have none."""
    flat = list(chain.from_iterable(per_token))
    placed: list[float | None] = [None] * len(segment.token_ids)
    for position, column in zip(segment.trained, segment.columns, strict=True):
        placed[position] = flat[column]
    return placed


def without_zeros(values: Sequence[float | None]) -> list[float | None]:
    """Leave zero rewards blank, so that others stand out."""
    return [value or None for value in values]


def draw(shown: Picture, target: Path) -> None:
    with drawn(target, height=5.4) as figure:
        axes = figure.subplots()
        for x, (word, step) in enumerate(zip(shown.words, shown.steps, strict=True)):
            tint = "#e3e3e3" if step is None else ("#cfe2f3", "#d9ead3", "#fff2cc")[step]
            axes.add_patch(Rectangle((x, 0), 1, -1, facecolor=tint, edgecolor="white"))
            axes.text(x + 0.5, -0.5, word, ha="center", va="center", rotation=90, fontsize=9, family="monospace")
        advantages = [v for name, row in shown.rows.items() if name.startswith("advantage,") for v in row if v]
        tops = [-1 - 0.6 * index for index in range(len(shown.rows))]
        for top, (name, row) in zip(tops, shown.rows.items(), strict=True):
            paint = painter(name, max(map(abs, advantages)))
            for x, value in enumerate(row):
                tint = "white" if value is None else paint(value)
                axes.add_patch(Rectangle((x, top), 1, -0.6, facecolor=tint, edgecolor="white"))
                if value is not None:
                    text, angle = (f"{value:.0f}", 0) if name.endswith("mask") else (f"{value:+.1f}", 90)
                    axes.text(x + 0.5, top - 0.3, text, ha="center", va="center", fontsize=9, rotation=angle)
        axes.set_yticks([-0.5, *(top - 0.3 for top in tops)], ["token", *shown.rows], fontsize=10)
        axes.set(xticks=[], xlim=(0, len(shown.words)), ylim=(tops[-1] - 0.6, 0))
        axes.set_title("grey: prompt and tool text   blue, green, yellow: responses of steps 0, 1, 2", fontsize=11)
        axes.tick_params(length=0)
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)


def painter(name: str, largest: float) -> Callable[[float], Any]:
    """Positive is blue and negative is orange."""
    if name.endswith("mask"):
        return lambda value: "#7fb3d5" if value else "#eeeeee"
    if name.endswith("reward"):
        return lambda value: "#9fc5e8" if value > 0 else "#f0b27a"
    return lambda value: colormaps["PuOr"](0.5 + 0.25 * value / largest)


def main() -> None:
    shown = picture()
    draw(shown, PICTURE)
    for name, row in shown.rows.items():
        print(f"{' '.join(name.split()):48s}", *("." if value is None else f"{value:g}" for value in row))


if __name__ == "__main__":
    main()
