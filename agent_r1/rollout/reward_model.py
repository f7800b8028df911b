"""Models that score: what one has to offer, how concurrent episodes reach it in batches, and a local classifier.

    reward = BatchedReward(ClassifierReward("path/to/model", device="cuda"))

A `BatchScorer` turns finished episodes into numbers, many at a time. `BatchedReward` makes a reward function of it: it
gathers the episodes that are being scored at once, limits and repeats attempts, and fails only the episodes of a batch
that could not be scored. Nothing is kept of an event loop after its last call.

Not known here: HTTP (a scorer may speak it; `judge.py` does) and the time limit of the whole, `task.reward_seconds`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from numbers import Real
from threading import Lock
from typing import Any, Protocol

from agent_r1.agent.guard import call, describe, guarded
from agent_r1.errors import ConfigError
from agent_r1.rollout.attempts import Attempts, PerLoop, ScoringError
from agent_r1.types import Message, TaskRow, Trajectory

Item = tuple[TaskRow, Trajectory]


class BatchScorer(Protocol):
    """A model that scores. Raise TransientError (or a timeout or connection error) to be asked again."""

    async def score(self, items: Sequence[Item]) -> Sequence[float]:
        """One finite number per item, in order."""
        ...


@dataclass(frozen=True, slots=True)
class BatchedReward:
    """A reward function: concurrent calls reach the scorer together."""

    scorer: BatchScorer
    _: KW_ONLY
    max_batch: int = 32
    max_wait_seconds: float = 0.05  # for a batch to fill, after its first episode
    max_concurrent: int = 1  # batches at the scorer at once; the time of an attempt runs only then
    attempts: int = 3
    seconds_per_attempt: float = 8.0
    backoff_seconds: float = 0.5
    _queues: PerLoop[_Queue] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.max_batch < 1 or self.max_concurrent < 1 or self.max_wait_seconds < 0:
            raise ConfigError(
                "BatchedReward needs max_batch and max_concurrent of at least 1 and max_wait_seconds not negative: "
                f"got {self.max_batch}, {self.max_concurrent} and {self.max_wait_seconds}"
            )
        patience = Attempts(self.attempts, self.seconds_per_attempt, self.backoff_seconds)
        object.__setattr__(self, "_queues", PerLoop(lambda: _Queue(self, patience), _Queue.close))

    async def __call__(self, row: TaskRow, trajectory: Trajectory) -> float:
        async with self._queues.use() as queue:
            return await queue.put((row, trajectory))


Waiting = tuple[Item, asyncio.Future[float]]


class _Queue:
    """The episodes of one event loop that wait for their batch, and the batches under way."""

    def __init__(self, settings: BatchedReward, patience: Attempts) -> None:
        self._settings = settings
        self._patience = patience
        self._gate = asyncio.Semaphore(settings.max_concurrent)
        self._waiting: list[Waiting] = []
        self._timer: asyncio.TimerHandle | None = None
        self._running: set[asyncio.Task[None]] = set()

    async def put(self, item: Item) -> float:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[float] = loop.create_future()
        self._waiting.append((item, future))
        if len(self._waiting) == self._settings.max_batch:
            self._send()
        elif self._timer is None:
            self._timer = loop.call_later(self._settings.max_wait_seconds, self._send)
        return await future

    async def close(self) -> None:
        """Nobody waits any more: what is still under way was given up by all its episodes."""
        if self._timer is not None:
            self._timer.cancel()
        for task in self._running:
            task.cancel()

    def _send(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        batch, self._waiting = self._waiting, []
        task = asyncio.get_running_loop().create_task(self._run(batch))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _run(self, batch: list[Waiting]) -> None:
        name = type(self._settings.scorer).__name__
        try:
            scored = await self._patience.run(lambda: self._attempt(batch), who=f"scorer {name}")
        except Exception as error:  # noqa: BLE001 (the failure of this batch, raised to each of its episodes)
            for _, future in batch:
                if not future.done():
                    failure = ScoringError(f"a batch of {len(batch)} could not be scored: {describe(error)}")
                    future.set_exception(failure.with_traceback(error.__traceback__))
            return
        for future, score in scored:
            if future.done():
                continue
            if isinstance(score, Real) and math.isfinite(score):
                future.set_result(float(score))
            else:
                wrong = f"scorer {name} returned {score!r:.80} for this episode; scores must be finite numbers"
                future.set_exception(ScoringError(wrong))

    async def _attempt(self, batch: list[Waiting]) -> list[tuple[asyncio.Future[float], Any]]:
        async with self._gate:
            wanted = [(item, future) for item, future in batch if not future.done()]  # the others ran out of time
            if not wanted:
                return []
            items = [item for item, _ in wanted]
            scores = await guarded(self._score(items), seconds=self._patience.seconds)
        if len(scores) != len(items):
            raise ScoringError(f"{len(scores)} scores came back for {len(items)} episodes; return one for each")
        return [(future, score) for (_, future), score in zip(wanted, scores, strict=True)]

    async def _score(self, items: list[Item]) -> Sequence[float]:
        return await self._settings.scorer.score(items)


def final_exchange(row: TaskRow, trajectory: Trajectory) -> list[Message]:
    """The row's prompt and the last thing the policy said, as a conversation."""
    return [*row.prompt, {"role": "assistant", "content": trajectory.final_text}]


class ClassifierReward:
    """A Hugging Face sequence-classification model, as reward models are published: its one output is the score.

    Of a model with several labels, the probability of `label` is. The model is loaded where the object is made, before
    any time limit runs, and one batch at a time is computed in a thread.
    """

    def __init__(
        self,
        path: str,  # a folder or a hub id
        *,
        format: Callable[[TaskRow, Trajectory], str | list[Message]] = final_exchange,  # messages: by its template
        device: str = "cpu",
        max_tokens: int = 4096,  # a longer text loses its beginning: the answer is at the end
        max_batch: int = 16,  # texts per forward pass
        label: int | None = None,
    ) -> None:
        if max_tokens < 1 or max_batch < 1:
            raise ConfigError(
                f"ClassifierReward needs max_tokens and max_batch of at least 1, got {max_tokens} and {max_batch}"
            )
        self._model, self._tokenizer = _load(path, device)
        labels = self._model.config.num_labels
        if (label is None and labels != 1) or (label is not None and not 0 <= label < labels):
            raise ConfigError(f"{path} has {labels} labels, got label={label}; give the index of the one to score by")
        places = getattr(self._model.config.get_text_config(), "max_position_embeddings", None) or math.inf
        if max_tokens > places:
            raise ConfigError(f"{path} reads at most {places} tokens, got max_tokens={max_tokens}; lower it")
        self._format = format
        self._max_tokens = max_tokens
        self._max_batch = max_batch
        self._label = label
        self._lock = Lock()  # an attempt that was given up still computes: the next one waits for the device

    async def score(self, items: Sequence[Item]) -> list[float]:
        texts = [self._format(row, trajectory) for row, trajectory in items]
        scores: list[float] = await call(self._scores, texts)
        return scores

    def _scores(self, texts: Sequence[str | list[Message]]) -> list[float]:
        with self._lock:
            ids = [self._token_ids(text) for text in texts]
            shortest_first = sorted(range(len(ids)), key=lambda index: len(ids[index]))
            scores = [0.0] * len(ids)
            for start in range(0, len(ids), self._max_batch):
                chosen = shortest_first[start : start + self._max_batch]
                for index, score in zip(chosen, self._forward([ids[index] for index in chosen]), strict=True):
                    scores[index] = score
            return scores

    def _token_ids(self, text: str | list[Message]) -> list[int]:
        written = isinstance(text, list)  # a template writes the special tokens itself
        if written:
            text = self._tokenizer.apply_chat_template(text, tokenize=False)
        ids: list[int] = self._tokenizer(
            text, add_special_tokens=not written, truncation=True, max_length=self._max_tokens
        )["input_ids"]
        if not ids:
            raise ScoringError("the text of an episode has no tokens; check what `format` returns")
        return ids

    def _forward(self, ids: list[list[int]]) -> list[float]:
        import torch

        # On the right, whatever the tokenizer prefers: what comes after a text cannot shift its positions.
        config = self._model.config.get_text_config()
        given = config.pad_token_id
        # Decoders are read at the last id that is not the padding. A model without one is read at its very last.
        pad = given if given is not None else _absent(ids)
        longest = max(map(len, ids))
        tokens = torch.tensor([row + [pad] * (longest - len(row)) for row in ids], device=self._model.device)
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in ids], device=self._model.device)
        config.pad_token_id = pad
        try:
            with torch.inference_mode():
                logits = self._model(input_ids=tokens, attention_mask=mask).logits.float()
        finally:
            config.pad_token_id = given
        scores = logits[:, 0] if self._label is None else logits.softmax(dim=-1)[:, self._label]
        as_floats: list[float] = scores.tolist()
        return as_floats


def _absent(ids: list[list[int]]) -> int:
    present = {token for row in ids for token in row}
    return next(token for token in range(len(present) + 1) if token not in present)


def _load(path: str, device: str) -> tuple[Any, Any]:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, truncation_side="left")
        model, report = AutoModelForSequenceClassification.from_pretrained(path, dtype="auto", output_loading_info=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot load a reward model from {path!r}: {error}") from error
    if report["missing_keys"]:
        missing = ", ".join(sorted(report["missing_keys"])[:3])
        raise ConfigError(f"{path!r} is not a trained classifier: its weights lack {missing}, which would be random")
    return model.to(device).eval(), tokenizer
