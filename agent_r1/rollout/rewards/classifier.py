"""A Hugging Face classifier as reward model, on a device of this machine.

    reward = BatchedReward(ClassifierReward("path/to/model", device="cuda"))

`format` chooses what it reads of an episode. `reward_model.py` makes batches and handles failures.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from threading import Event, Lock
from typing import Any

from agent_r1.errors import ConfigError, at_least
from agent_r1.guard import call
from agent_r1.rollout.rewards.attempts import ScoringError
from agent_r1.rollout.rewards.reward_model import Item
from agent_r1.tokens.control_tokens import CUT, ControlTokens
from agent_r1.types import Message, TaskRow, Trajectory


def final_exchange(row: TaskRow, trajectory: Trajectory) -> list[Message]:
    """Return the row's prompt and the last response as a conversation."""
    return [*row.prompt, {"role": "assistant", "content": trajectory.final_text}]


class ClassifierReward:
    """A Hugging Face sequence-classification model: its only output, or the probability of `label`, is the score.

    The model is loaded when the object is created, before any time limit. One batch at a time is computed, in a thread:
    leave `BatchedReward.max_concurrent` at 1.

    In messages, text that spells a special token stays text, so no message can forge a turn. In a string, special
    tokens count, including those that the policy wrote: prefer messages, or strip them in `format`.
    """

    def __init__(
        self,
        path: str,  # a folder or a hub id
        *,
        format: Callable[[TaskRow, Trajectory], str | list[Message]] = final_exchange,  # messages are templated
        device: str = "cpu",
        max_tokens: int = 4096,  # longer texts lose their beginning, not the answer
        max_batch: int = 16,  # texts per forward pass
        label: int | None = None,
    ) -> None:
        at_least(1, "ClassifierReward", max_tokens=max_tokens, max_batch=max_batch)
        self._model, self._tokenizer = _load(path, device)
        labels = self._model.config.num_labels
        if (label is None and labels != 1) or (label is not None and not 0 <= label < labels):
            raise ConfigError(f"{path} has {labels} labels, got label={label}; give the index of one of them")
        config = self._model.config.get_text_config()
        places = getattr(config, "max_position_embeddings", None) or math.inf
        if max_tokens > places:
            raise ConfigError(f"{path} reads at most {places} tokens, got max_tokens={max_tokens}; lower it")
        self._format = format
        self._max_tokens = max_tokens
        self._pad = config.pad_token_id
        self._max_batch = 1 if self._pad is None else max_batch  # decoders are read at the last id that is not padding
        self._label = label
        added = self._tokenizer.added_tokens_decoder.values()
        special = {token.content for token in added if token.special} | set(self._tokenizer.all_special_tokens)
        self._special = ControlTokens(special)
        self._lock = Lock()  # shared by all event loops

    async def score(self, items: Sequence[Item]) -> list[float | Exception]:
        given_up = Event()
        work = asyncio.ensure_future(call(self._scores, items, given_up))
        try:
            scores: list[float | Exception] = await asyncio.shield(work)
            return scores
        except asyncio.CancelledError:
            given_up.set()
            await asyncio.wait({work})  # until the model is free
            raise

    def _scores(self, items: Sequence[Item], given_up: Event) -> list[float | Exception]:
        scores: list[float | Exception] = [0.0] * len(items)
        ids: dict[int, list[int]] = {}
        with self._lock:
            for index, (row, trajectory) in enumerate(items):
                if given_up.is_set():
                    return []
                try:
                    ids[index] = self._token_ids(self._format(row, trajectory))
                except Exception as error:  # noqa: BLE001 (only this episode fails)
                    scores[index] = error
            shortest_first = sorted(ids, key=lambda index: len(ids[index]))
            for start in range(0, len(ids), self._max_batch):
                if given_up.is_set():
                    return []
                chosen = shortest_first[start : start + self._max_batch]
                for index, score in zip(chosen, self._forward([ids[index] for index in chosen]), strict=True):
                    scores[index] = score
        return scores

    def _token_ids(self, text: str | list[Message]) -> list[int]:
        ids: list[int]
        if isinstance(text, str):
            ids = self._tokenizer(text, truncation=True, max_length=self._max_tokens)["input_ids"]
        else:  # only the template writes special tokens; look-alikes in messages are cut into pieces
            pieces = self._tokenizer.apply_chat_template(self._special.defuse(text), tokenize=False).split(CUT)
            encoded = (self._tokenizer(piece, add_special_tokens=False)["input_ids"] for piece in pieces if piece)
            ids = [token for piece in encoded for token in piece][-self._max_tokens :]
        if not ids:
            raise ScoringError("the text of this episode has no tokens: check `format`")
        return ids

    def _forward(self, ids: list[list[int]]) -> list[float]:
        import torch

        pad = self._pad or 0  # without a pad id, there is one text per pass and nothing to pad
        longest = max(map(len, ids))
        # Padding on the right does not shift positions.
        tokens = torch.tensor([row + [pad] * (longest - len(row)) for row in ids], device=self._model.device)
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in ids], device=self._model.device)
        with torch.inference_mode():
            logits = self._model(input_ids=tokens, attention_mask=mask).logits.float()
        scores = logits[:, 0] if self._label is None else logits.softmax(dim=-1)[:, self._label]
        as_floats: list[float] = scores.tolist()
        return as_floats


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
