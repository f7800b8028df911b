"""What pictures cost: episodes per second and optimizer steps of a vision-language model, against transformers.

python -m benchmarks.speed vision
python -m benchmarks.speed vision --only episodes --pictures 8

episodes    groups of attempts that look at 1, 4 or 8 pictures and get another one after every response; against
            `model.generate`, which has each step's whole conversation as its prompt
updates     an optimizer step over such episodes, merged and packed, with a frozen tower; against a padded step of the
            whole model
trained     the same with the tower trained, too, in smaller packs: both models are in memory at once

Weights are random, in the shape of Qwen3-VL-2B; pictures of 448 x 448 pixels take 196 tokens. Attempts of a group begin
with the same pictures, and later pictures are drawn from a few per group, as crops of one picture would be. `looked`
counts the pictures that went through the tower, `shown` those in the prompts of all steps.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import count as counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agent_r1.bench.learner_speed import BETAS, LR, MAX_GRAD_NORM, make_learner
from agent_r1.bench.measure import GIB, Cost, alternate, free_memory, measure
from agent_r1.bench.results import Figures, Row
from agent_r1.build.engine import GPU_BURST
from agent_r1.engines.base import Prompt, Sampling
from agent_r1.engines.local.local_engine import LocalEngine
from agent_r1.engines.local.weights import cast_weights
from agent_r1.learn.learner import Learner
from agent_r1.learn.model.policy import PolicyModel
from agent_r1.types import CreditedTrajectory, Step, StopReason, Trajectory
from agent_r1.vision.picture_format import PictureFormat, read_format
from agent_r1.vision.pictures import Picture, by_key, without_repeats

MICRO_BATCHES = (16, 8, 4, 2, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    """Episodes of several steps that see pictures."""

    groups: int
    group_size: int
    steps: int
    text_tokens: int  # before the first response, and after each later picture
    response_tokens: int
    side: int  # pixels of a picture
    later: int  # different pictures per group that follow a response

    def episodes(self, pictures: int, form: PictureFormat, vocabulary: int, seed: int = 0) -> list[list[Prompt]]:
        """For each episode, what each of its steps adds to the prompt before the response. Tokens of text separate the
        pictures, as templates do."""
        rng, made = np.random.default_rng((pictures, seed)), []
        for _ in range(self.groups):
            first = [self._picture(rng) for _ in range(pictures)]
            pool = [self._picture(rng) for _ in range(self.later)]
            opening = [token for each in first for token in (1, *form.ids(each), 2)] + self._text(rng, vocabulary)
            for attempt in range(self.group_size):
                shown = [pool[(attempt + step) % self.later] for step in range(self.steps - 1)]
                later = [Prompt([1, *form.ids(each), 2, *self._text(rng, vocabulary)], (each,)) for each in shown]
                made.append([Prompt(opening, tuple(first)), *later])
        return made

    def _picture(self, rng: np.random.Generator) -> Picture:
        return Picture.from_pixels(rng.integers(0, 256, (self.side, self.side, 3), dtype=np.uint8))

    def _text(self, rng: np.random.Generator, vocabulary: int) -> list[int]:
        drawn: list[int] = rng.integers(vocabulary, size=self.text_tokens).tolist()
        return drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionSizes:
    config: dict[str, Any]  # of the model
    pictures: tuple[int, ...]  # of the first prompt
    play: Play
    update_groups: int  # of an optimizer step
    tokens_per_pack: int
    trained_tokens_per_pack: int  # with the tower trained
    cached_tokens: int
    generate_batch: int  # episodes that `model.generate` takes at once


FULL = VisionSizes(
    config={
        "text": {
            "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
            "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 32_768,
            "sections": [24, 20, 20],
        },
        "vision": {
            "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "patch_size": 16,
            "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 2048,
            "num_position_embeddings": 2304, "deepstack_visual_indexes": [5, 11, 17],
        },
    },
    pictures=(1, 4, 8),
    play=Play(groups=8, group_size=8, steps=3, text_tokens=64, response_tokens=64, side=448, later=4),
    update_groups=4,
    tokens_per_pack=32_768,
    trained_tokens_per_pack=16_384,
    cached_tokens=655_360,
    generate_batch=64,
)  # fmt: skip
QUICK = VisionSizes(
    config={
        "text": {
            "vocab_size": 320, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024,
            "sections": [4, 2, 2],
        },
        "vision": {
            "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 8,
            "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 48,
            "num_position_embeddings": 36, "deepstack_visual_indexes": [0],
        },
    },
    pictures=(1, 2),
    play=Play(groups=2, group_size=2, steps=2, text_tokens=6, response_tokens=4, side=64, later=2),
    update_groups=1,
    tokens_per_pack=256,
    trained_tokens_per_pack=128,
    cached_tokens=8_192,
    generate_batch=4,
)  # fmt: skip


def make_network(sizes: VisionSizes, *, dtype: torch.dtype, device: torch.device) -> Any:
    """Random weights, drawn on the device. Tokens of the control kind are those that no text of a `Play` shows."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    text = dict(sizes.config["text"])
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": text.pop("sections"), "mrope_interleaved": True}
    config = Qwen3VLConfig(
        text_config=text | {"rope_parameters": rope, "tie_word_embeddings": True},
        vision_config=sizes.config["vision"],
        tie_word_embeddings=True,
        **{f"{name}_token_id": text["vocab_size"] - 1 - index for index, name in enumerate(CONTROL)},
    )
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.device(device):
        torch.manual_seed(0)
        return cast_weights(Qwen3VLForConditionalGeneration(config), dtype).eval()


CONTROL = ("image", "video", "vision_start", "vision_end")


@dataclass(kw_only=True)
class VisionBench:
    sizes: VisionSizes
    device: torch.device
    repeats: int
    _network: Any = field(default=None, init=False)

    @property
    def groups(self) -> dict[str, Callable[[], Iterator[Row]]]:
        return {
            "episodes": self.episodes,
            "updates": partial(self.updates, "updates", trains=False),
            "trained": partial(self.updates, "trained", trains=True),
        }

    def close(self) -> None:
        self._network = None
        free_memory(self.device)

    @property
    def vocabulary(self) -> int:
        """Ids of text."""
        size: int = self.sizes.config["text"]["vocab_size"] - len(CONTROL)
        return size

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def episodes(self) -> Iterator[Row]:
        network = make_network(self.sizes, dtype=self.dtype, device=self.device)
        form = read_format(network.config, None, ())
        generate = Generator(make_network(self.sizes, dtype=self.dtype, device=self.device), form, self.sizes)
        play = self.sizes.play
        engine = LocalEngine(
            network,
            seed=0,
            max_running=play.groups * play.group_size,
            max_batch_tokens=16_384,
            max_cached_tokens=self.sizes.cached_tokens,
            burst=GPU_BURST,
            pictures=form,
        )
        for count in self.sizes.pictures:
            seeds, looks = counter(1), list[Figures]()

            def ours(count: int = count, seeds: Iterator[int] = seeds, looks: list[Figures] = looks) -> float:
                # New pictures each time: none is known from the last repeat, as after an update.
                seconds, figures = asyncio.run(
                    self._play(engine, play.episodes(count, form, self.vocabulary, next(seeds)))
                )
                looks.append(figures)
                return seconds

            made = play.episodes(count, form, self.vocabulary)
            asyncio.run(self._play(engine, made[: play.group_size]))  # warm up
            generate.seconds(made[:1])
            sides: dict[str, Callable[[], float]] = {"engine": ours, "generate": partial(generate.seconds, made)}
            timed = alternate(sides, self.repeats)
            yield Row(
                name=f"episodes/{count} pictures",
                settings=self._settings(count),
                headline="episodes_per_second",
                repeats=[
                    {
                        "episodes_per_second": len(made) / each["engine"],
                        "generate_episodes_per_second": len(made) / each["generate"],
                        "speed_ratio": each["generate"] / each["engine"],
                        **look,
                    }
                    for each, look in zip(timed, looks, strict=True)
                ],
                once={"picture_tokens": form.tokens(made[0][0].media[0])},
            )
        asyncio.run(engine.close())

    async def _play(self, engine: LocalEngine, episodes: Sequence[list[Prompt]]) -> tuple[float, Figures]:
        """Seconds, and how many pictures were looked at."""
        eyes = engine._runner.eyes
        assert eyes is not None
        looked, began = eyes.looked, time.perf_counter()
        shown = sum(await asyncio.gather(*(self._episode(engine, n, each) for n, each in enumerate(episodes))))
        seconds = time.perf_counter() - began
        return seconds, {"shown": shown, "looked": eyes.looked - looked, "hit_rate": 1 - (eyes.looked - looked) / shown}

    async def _episode(self, engine: LocalEngine, number: int, steps: list[Prompt]) -> int:
        ids: list[int] = []
        media: tuple[Picture, ...] = ()
        shown, sampling = 0, Sampling(max_tokens=self.sizes.play.response_tokens)
        for step in steps:
            ids, media = ids + step.ids, without_repeats((*media, *step.media))
            shown += len(media)
            answer = await engine.generate(Prompt(ids, media), sampling, session=str(number))
            assert len(answer.token_ids) == sampling.max_tokens
            ids = ids + answer.token_ids
        engine.release(str(number))
        return shown

    def updates(self, group: str, *, trains: bool) -> Iterator[Row]:
        network = make_network(self.sizes, dtype=torch.float32, device=self.device)
        form = read_format(network.config, None, ())
        rival = make_network(self.sizes, dtype=torch.float32, device=self.device)
        padded = PaddedPictures(rival, form, self._autocast, train_vision=trains)
        tokens_per_pack = self.sizes.trained_tokens_per_pack if trains else self.sizes.tokens_per_pack
        learner = self._learner(network, form, tokens_per_pack, trains)
        for count in self.sizes.pictures:
            batch = self._batch(count, form)
            learner.update(batch)
            micro_batch = max(1, padded.largest_micro_batch(batch) // 2)  # both sides stay on the GPU
            sides: dict[str, Callable[[], Cost]] = {
                "packed": partial(self._cost, learner.zero_grad, partial(learner.update, batch)),
                "padded": partial(self._cost, padded.zero_grad, partial(padded.step, batch, micro_batch)),
            }
            more = {"train_vision": trains, "groups": self.sizes.update_groups, "tokens_per_pack": tokens_per_pack}
            yield Row(
                name=f"{group}/{count} pictures",
                settings=self._settings(count) | more,
                headline="seconds",
                repeats=[
                    {
                        "seconds": each["packed"].seconds,
                        "padded_seconds": each["padded"].seconds,
                        "speed_ratio": each["padded"].seconds / each["packed"].seconds,
                        "added_gib": each["packed"].added_bytes / GIB,
                        "padded_added_gib": each["padded"].added_bytes / GIB,
                    }
                    for each in alternate(sides, self.repeats)
                ],
                once={"padded_micro_batch": micro_batch},
            )

    @property
    def _autocast(self) -> torch.dtype | None:
        return torch.bfloat16 if self.device.type == "cuda" else None

    def _cost(self, clear: Callable[[], None], work: Callable[[], object]) -> Cost:
        clear()
        return measure(work, self.device)

    def _learner(self, network: Any, form: PictureFormat, tokens_per_pack: int, train_vision: bool) -> Learner:
        policy = PolicyModel(
            network,
            autocast_dtype=self._autocast,
            compiled=self.device.type == "cuda",
            pictures=form,
            train_vision=train_vision,
        )
        return make_learner(policy, tokens_per_pack=tokens_per_pack)

    def _batch(self, pictures: int, form: PictureFormat) -> list[CreditedTrajectory]:
        play = replace(self.sizes.play, groups=self.sizes.update_groups)
        rng = np.random.default_rng(0)
        credited = []
        for number, prompts in enumerate(play.episodes(pictures, form, self.vocabulary)):
            ids: list[int] = []
            media: tuple[Picture, ...] = ()
            steps, advantages = [], []
            for prompt in prompts:
                ids, media = ids + prompt.ids, without_repeats((*media, *prompt.media))
                response = rng.integers(self.vocabulary, size=play.response_tokens).tolist()
                none = [-1.0] * len(response)
                steps.append(Step(prompt_ids=ids, response_ids=response, response_logprobs=none, pictures=media))
                advantages.append(rng.normal(size=len(response)).tolist())
                ids = ids + response
            made = Trajectory(row_id="bench", trajectory_id=str(number), steps=steps, stop=StopReason.ANSWERED)
            credited.append(CreditedTrajectory(trajectory=made, advantages=advantages))
        return credited

    def _settings(self, pictures: int) -> dict[str, Any]:
        return {"config": self.sizes.config, "pictures": pictures, **asdict(self.sizes.play)}


class Generator:
    """`model.generate` on left-padded batches of whole conversations."""

    def __init__(self, network: Any, form: PictureFormat, sizes: VisionSizes) -> None:
        self._network, self._form, self._sizes = network, form, sizes
        network.set_attn_implementation("sdpa")

    def seconds(self, episodes: Sequence[list[Prompt]]) -> float:
        def play() -> None:
            size = self._sizes.generate_batch
            for start in range(0, len(episodes), size):
                self._play(episodes[start : start + size])

        return measure(play, self._network.device).seconds

    def _play(self, episodes: Sequence[list[Prompt]]) -> None:
        grown: list[list[int]] = [[] for _ in episodes]
        pictures: list[Picture] = []
        seen: list[list[Picture]] = [[] for _ in episodes]
        new = self._sizes.play.response_tokens
        for step in range(len(episodes[0])):
            for ids, shown, episode in zip(grown, seen, episodes, strict=True):
                ids += episode[step].ids
                shown += episode[step].media
            pictures = [picture for shown in seen for picture in shown]
            longest = max(map(len, grown))
            ids_BL = torch.tensor([[0] * (longest - len(ids)) + ids for ids in grown])
            attention_BL = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in grown])
            given = inputs(self._network, self._form, ids_BL, attention_BL, pictures)
            asked = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "use_cache": True}
            asked |= {"max_new_tokens": new, "min_new_tokens": new, "pad_token_id": 0}
            with torch.no_grad():
                sampled = self._network.generate(**given, **asked)[:, longest:].tolist()
            for ids, response in zip(grown, sampled, strict=True):
                ids += [token % (self._sizes.config["text"]["vocab_size"] - len(CONTROL)) for token in response]


class PaddedPictures:
    """One optimizer step as it is usually taken: right-padded micro-batches through the whole model, SDPA, all logits
    in fp32, bf16 autocast over fp32 weights, fused AdamW."""

    def __init__(self, network: Any, form: PictureFormat, dtype: torch.dtype | None, *, train_vision: bool) -> None:
        network.set_attn_implementation("sdpa")
        network.model.visual.requires_grad_(train_vision)
        self._network, self._form, self._dtype = network, form, dtype
        trained = [p for p in network.parameters() if p.requires_grad]
        self._adam = torch.optim.AdamW(trained, lr=LR, betas=BETAS, weight_decay=0.0, fused=True)

    def zero_grad(self) -> None:
        self._adam.zero_grad(set_to_none=True)

    def step(self, credited: Sequence[CreditedTrajectory], micro_batch: int) -> None:
        self.zero_grad()
        for start in range(0, len(credited), micro_batch):
            self._loss(credited[start : start + micro_batch]).backward()
        torch.nn.utils.clip_grad_norm_([p for p in self._network.parameters() if p.requires_grad], MAX_GRAD_NORM)
        self._adam.step()

    def largest_micro_batch(self, credited: Sequence[CreditedTrajectory]) -> int:
        for micro_batch in MICRO_BATCHES:
            try:
                self.step(credited, micro_batch)
            except torch.cuda.OutOfMemoryError:
                self.zero_grad()
                free_memory(self._network.device)
            else:
                return micro_batch
        raise torch.cuda.OutOfMemoryError("a micro-batch of one sequence does not fit into GPU memory")

    def _loss(self, credited: Sequence[CreditedTrajectory]) -> Tensor:
        """Each episode is one row: its last prompt and response, trained where it was sampled."""
        rows, weights, pictures = [], [], []
        for item in credited:
            last = item.trajectory.steps[-1]
            ids = last.prompt_ids + last.response_ids
            weight = [0.0] * len(ids)
            for step, advantages in zip(item.trajectory.steps, item.advantages, strict=True):
                start = len(step.prompt_ids)
                weight[start : start + len(advantages)] = advantages
            rows.append(ids)
            weights.append(weight)
            pictures += [picture for _, picture in self._form.spans(np.array(ids), by_key(last.pictures))]
        longest = max(map(len, rows))
        ids_BL = torch.tensor([ids + [0] * (longest - len(ids)) for ids in rows])
        attention_BL = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids in rows])
        weights_BL = torch.tensor([weight + [0.0] * (longest - len(weight)) for weight in weights])
        given = inputs(self._network, self._form, ids_BL, attention_BL, pictures)
        with torch.autocast(self._network.device.type, dtype=self._dtype, enabled=self._dtype is not None):
            logits_BLV = self._network(**given, use_cache=False).logits
        logprobs_BLV = logits_BLV[:, :-1].float().log_softmax(-1)
        logprobs_BL = logprobs_BLV.gather(-1, given["input_ids"][:, 1:, None])[..., 0]
        loss: Tensor = -(weights_BL[:, 1:].to(logprobs_BL.device) * logprobs_BL).sum()
        return loss


def inputs(
    network: Any, form: PictureFormat, ids_BL: Tensor, attention_BL: Tensor, pictures: Sequence[Picture]
) -> dict[str, Tensor]:
    """What transformers' model takes. Pictures are given once for each time they are shown, as processors do."""
    shown_BL = ids_BL < 0
    merge = network.config.vision_config.spatial_merge_size
    known = {picture.name: torch.from_numpy(form.values(picture)) for picture in without_repeats(list(pictures))}
    shapes = [form.shape(picture) for picture in pictures]
    given = {
        "input_ids": ids_BL.masked_fill(shown_BL, network.config.image_token_id),
        "attention_mask": attention_BL,
        "pixel_values": torch.cat([known[picture.name] for picture in pictures]).to(network.dtype),
        "image_grid_thw": torch.tensor([[1, rows * merge, columns * merge] for rows, columns in shapes]),
        "mm_token_type_ids": shown_BL.int(),
    }
    return {name: tensor.to(network.device) for name, tensor in given.items()}
