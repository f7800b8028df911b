"""TRL's GRPOTrainer with transformers generation, as a rival of `python -m benchmarks.speed step --against trl`.

What is equal on both sides: the model's shape, the rows, the attempts per row, the turns of an episode, the tokens of
prompts, responses and observations, the sampling (temperature 1, nothing cut off), one optimizer step per batch of
episodes, no reference model, the process and the GPU. TRL runs its own code throughout: chat template, its tool loop,
`model.generate`, rewards, advantages, loss, optimizer. Three things are arranged, none of which costs it time:

* Random weights never call a tool, so a tokenizer says of every response that it holds a call; TRL's loop then executes
  the tool, appends its answer and generates on, until it has had all turns (`max_tool_calling_iterations`).
* A turn has exactly its tokens: `max_new_tokens` is that of one turn, and the end-of-text token cannot be sampled.
* The answer is two characters longer than ours, because TRL does not close a response that was cut off at its length;
  observations have the same number of tokens that way. What TRL trains on is checked to have the expected length.

Where TRL has a choice it gets the faster one: bf16 weights (ours keeps fp32 masters), no activation checkpointing
(its default is on), large micro-batches, fused AdamW.

Needs `pip install trl==1.16.0 datasets`.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
import trl  # type: ignore[import-not-found, unused-ignore]
from datasets import Dataset
from transformers import PreTrainedTokenizerFast, TrainerCallback

from agent_r1.bench.measure import synchronize
from agent_r1.bench.models import NEVER, PAD, TURN_END, TURN_START, BenchModel, make_tokenizer
from agent_r1.bench.step_speed import LR
from agent_r1.bench.workload import ANSWER_FRAME, Workload

MICRO_BATCH = 64  # sequences per forward and backward pass
UNCLOSED_FRAME = "".join(ANSWER_FRAME).removeprefix(f"{TURN_END}\n")  # what TRL's side of the template writes


class ToolCaller(PreTrainedTokenizerFast):  # type: ignore[misc]
    """Reads a call of `look` into every response."""

    def parse_response(self, response: list[int], *args: Any, **kwargs: Any) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": "look", "arguments": {}}}
        return {"role": "assistant", "content": self.decode(response), "tool_calls": [call]}


class TRLStep:
    """Implements `benchmarks.speed.step_comparison.Rival`."""

    name = "trl"

    def __init__(self, workload: Workload, model: BenchModel, device: torch.device) -> None:
        self._workload, self._model, self._device = workload, model, device
        self._dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._micro_batch = min(MICRO_BATCH, workload.episodes)
        self.settings = {
            "trl": version("trl"),
            "trl_weights": str(self._dtype).removeprefix("torch."),
            "trl_micro_batch": self._micro_batch,
        }

    def run(self, steps: int, between: Callable[[], None]) -> list[float]:
        clock = StepClock(self._device, between)
        with tempfile.TemporaryDirectory() as folder:
            trainer = trl.GRPOTrainer(
                model=self._model.network(dtype=self._dtype, device=self._device),
                processing_class=self._tokenizer(),
                args=self._settings(folder, steps),
                train_dataset=self._rows(),
                reward_funcs=self._reward,
                tools=[self._tool()],
                callbacks=[clock],
            )
            trainer.train()
        assert len(clock.seconds) == steps
        return clock.seconds

    def _settings(self, folder: str, steps: int) -> trl.GRPOConfig:
        workload = self._workload
        passes = workload.episodes // self._micro_batch
        return trl.GRPOConfig(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=self._micro_batch,
            gradient_accumulation_steps=passes,
            steps_per_generation=passes,
            num_generations=workload.group_size,
            max_completion_length=workload.episode_tokens - workload.prompt_tokens,
            max_tool_calling_iterations=workload.steps - 1,
            generation_kwargs={"max_new_tokens": workload.response_tokens},
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            beta=0.0,
            learning_rate=LR,
            optim="adamw_torch_fused",
            bf16=self._device.type == "cuda",
            use_cpu=self._device.type == "cpu",
            gradient_checkpointing=False,
            report_to="none",
            save_strategy="no",
            logging_steps=10**6,
            disable_tqdm=True,
        )

    def _rows(self) -> Dataset:
        rows = self._workload.task_rows(self._model.vocabulary, seed=0)
        return Dataset.from_list([{"prompt": row.prompt} for row in rows])

    def _tokenizer(self) -> ToolCaller:
        plain = make_tokenizer(self._model.vocabulary)
        made = ToolCaller(
            tokenizer_object=plain.backend_tokenizer,
            pad_token=PAD,
            eos_token=NEVER,
            additional_special_tokens=[TURN_START, TURN_END],
            clean_up_tokenization_spaces=False,
            chat_template=plain.chat_template,
        )
        made.response_template = {}  # not None: TRL then asks `parse_response` what a response says
        return made

    def _tool(self) -> Callable[[], str]:
        answer = self._workload.answer(self._model.vocabulary, frame=UNCLOSED_FRAME)

        def look() -> str:
            """Look."""
            return answer

        return look

    def _reward(self, completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        """A coin, so that attempts at a row differ; and the proof that the episodes are those we mean."""
        expected = self._workload.episode_tokens - self._workload.prompt_tokens
        lengths = {len(ids) for ids in completion_ids}
        if lengths != {expected} or len(completion_ids) != self._workload.episodes:
            raise AssertionError(f"{len(completion_ids)} episodes of {lengths} tokens after the prompt, not {expected}")
        return [float(random.random() < 0.5) for _ in completion_ids]


class StepClock(TrainerCallback):  # type: ignore[misc]
    """Times optimizer steps, generation included: TRL generates when the first pass of a step asks for its inputs."""

    def __init__(self, device: torch.device, between: Callable[[], None]) -> None:
        self.seconds: list[float] = []
        self._device, self._between, self._began = device, between, 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        synchronize(self._device)
        self._began = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        synchronize(self._device)
        self.seconds.append(time.perf_counter() - self._began)
        self._between()


make_rival = TRLStep
