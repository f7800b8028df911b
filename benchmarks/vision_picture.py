"""Draw docs/vision.png: what a policy sees of an episode in which a tool returns a picture, token by token.

python -m benchmarks.vision_picture

The episode is played: a real tool, tokenizer, picture format and renderer; only the policy follows a script.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from PIL import Image, ImageDraw
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from agent_r1 import ToolResult, tool
from agent_r1.engines.base import Sampling
from agent_r1.engines.scripted import ScriptedEngine
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.flows.budgets import Limits
from agent_r1.flows.flow import AgentEnvLoop
from agent_r1.rollout.collect import Collector
from agent_r1.tokens.rendering import Renderer
from agent_r1.track.plots import DPI, WIDTH
from agent_r1.types import Step, TaskRow, Trajectory
from agent_r1.vision.picture_format import PictureFormat, QwenPictures
from agent_r1.vision.pictures import Picture, index_of, key_of

TARGET = Path(__file__).parents[1] / "docs" / "vision.png"
SIDE = 224
BEADS = [(0.16, 0.2, "#d62f2f"), (0.5, 0.32, "#2f6fd6"), (0.82, 0.18, "#3a9d4f"), (0.28, 0.72, "#e0a11b"),
         (0.74, 0.74, "#7d4bc4")]  # fmt: skip
SAID = ['<tool_call>{"name": "zoom", "arguments": {"x": 0.74, "y": 0.74}}</tool_call>', "seven"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}"
    "{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def scene() -> Image.Image:
    """Five beads on a table, one of them with a number that is too small to read."""
    image = Image.new("RGB", (4 * SIDE, 4 * SIDE), "#f6f1e7")
    pen = ImageDraw.Draw(image)
    for x, y, colour in BEADS:
        x, y = 4 * SIDE * x, 4 * SIDE * y
        pen.ellipse((x - 70, y - 70, x + 70, y + 70), fill=colour)
    pen.text((4 * SIDE * 0.74 - 14, 4 * SIDE * 0.74 - 28), "7", fill="white", font_size=56)
    return image


@tool
def zoom(x: float, y: float) -> ToolResult:
    """Look closer at a place, given as shares of the width and the height."""
    whole = scene()
    left, top = (min(max(int(4 * SIDE * at - 100), 0), 4 * SIDE - 200) for at in (x, y))
    crop = whole.crop((left, top, left + 200, top + 200)).resize((160, 160))
    return ToolResult(f"around {x:g}, {y:g}", images=[crop])


def picture_format() -> PictureFormat:
    """Qwen3-VL's: patches of 16 pixels, of which 2 x 2 are a token."""
    half = (0.5, 0.5, 0.5)
    return QwenPictures(
        kind="qwen3_vl", placeholder="<|image_pad|>", patch=16, merge=2, frames=2, min_pixels=64 * 64,
        max_pixels=16_777_216, mean=half, std=half,
    )  # fmt: skip


def byte_tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(BPE(vocab={char: i for i, char in enumerate(sorted(ByteLevel.alphabet()))}, merges=[]))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = ByteLevelDecoder()
    special = ["<|im_start|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        additional_special_tokens=special,
        clean_up_tokenization_spaces=False,
        chat_template=TEMPLATE,
    )


def play() -> tuple[Trajectory, Any, PictureFormat]:
    tokenizer, form = byte_tokenizer(), picture_format()
    renderer = Renderer(tokenizer, pictures=form)
    picture = {"type": "image", "image": scene().resize((SIDE, SIDE))}
    question = {"type": "text", "text": "Which number is on the violet bead?"}
    row = TaskRow(prompt=[{"role": "user", "content": [picture, question]}], row_id="beads")
    collect = Collector(
        make_flow=lambda _: AgentEnvLoop(lambda _: ToolEnv(tools=[zoom])),
        sampler=ScriptedEngine(SAID, tokenizer=tokenizer),
        renderer=renderer,
        sampling=Sampling(max_tokens=128, stop_ids=renderer.stop_ids),
        limits=Limits(max_steps=4, max_response_tokens=128, max_context_tokens=2048, episode_seconds=60),
        group_size=1,
    )
    [group] = asyncio.run(collect([row], seed=0))
    return group.trajectories[0], tokenizer, form


def pieces(step: Step, tokenizer: Any) -> list[Picture | str]:
    """The prompt as the model reads it: texts, and pictures where their tokens stand."""
    by_key = {picture.key: picture for picture in step.pictures}
    found: list[Picture | str] = []
    text: list[int] = []
    for token in step.prompt_ids:
        if token >= 0:
            text.append(token)
        elif index_of(token) == 0:
            found += [tokenizer.decode(text), by_key[key_of(token)]]
            text = []
    return [*found, tokenizer.decode(text)]


def draw(path: Path) -> None:
    trajectory, tokenizer, form = play()
    last = trajectory.steps[-1]
    shown = pieces(last, tokenizer)
    figure = Figure(figsize=(WIDTH, 4.9), facecolor="white")
    axes = figure.subplots(1, 2, gridspec_kw={"left": 0.02, "right": 0.98, "top": 0.86, "bottom": 0.3, "wspace": 0.08})
    for axis, picture in zip(axes, (piece for piece in shown if isinstance(piece, Picture)), strict=True):
        rows, columns = form.shape(picture)
        seen = picture.image().resize((columns * 32, rows * 32))
        axis.imshow(np.asarray(seen), aspect="equal")
        axis.set_xticks(np.arange(0, columns * 32 + 1, 32) - 0.5, [])
        axis.set_yticks(np.arange(0, rows * 32 + 1, 32) - 0.5, [])
        axis.grid(color="white", linewidth=1)
        axis.tick_params(length=0)
        size = f"{picture.width} x {picture.height} pixels, {rows} x {columns} = {rows * columns} tokens"
        axis.set_title(f"picture {picture.name[:6]}\n{size}", fontsize=9)
    lines = [(piece if isinstance(piece, str) else f"[image {piece.name[:6]}]") for piece in shown]
    text = "".join(lines).replace("\n", " ").strip()
    words = text.replace(SAID[0], f"\n{SAID[0]}").replace("<|im_end|> <|im_start|>", "<|im_end|>\n<|im_start|>")
    figure.text(0.02, 0.2, words, fontsize=8, family="monospace", va="top", linespacing=1.6)
    counts = len(last.prompt_ids), sum(token < 0 for token in last.prompt_ids)
    note = f"the second prompt: {counts[0]} tokens, {counts[1]} of them of pictures; sampled next: {SAID[1]!r}"
    figure.text(0.02, 0.96, note, fontsize=10, weight="bold")
    box = FancyBboxPatch((0.01, 0.015), 0.98, 0.21, boxstyle="round,pad=0.002", transform=figure.transFigure,
                         facecolor="#e8edf4", edgecolor="none", zorder=-1)  # fmt: skip
    figure.add_artist(box)
    figure.savefig(path, dpi=DPI)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET)
