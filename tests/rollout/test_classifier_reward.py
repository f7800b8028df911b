"""Sequence-classification models as rewards: batching and padding change no score, and what is none is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from agent_r1.errors import ConfigError
from agent_r1.rollout.attempts import ScoringError
from agent_r1.rollout.reward import Scorer
from agent_r1.rollout.reward_model import BatchedReward, ClassifierReward, final_exchange
from agent_r1.types import Group, Step, StopReason, TaskRow, Trajectory
from tests.chatml import row, tokenizer
from tests.rollout.tiny_models import GPT2, SHAPE

torch.set_num_threads(1)


def trajectory(text: str) -> Trajectory:
    step = Step(prompt_ids=[1], response_ids=[2], response_logprobs=[0.0], action_text=text)
    return Trajectory(row_id="r", trajectory_id=text, steps=[step], stop=StopReason.ANSWERED)


BERT = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "initializer_range": 0.3,
    "pad_token_id": 257,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", SHAPE | {"vocab_size": 300, "pad_token_id": 257}),
    "llama without padding": ("LlamaConfig", SHAPE | {"vocab_size": 300, "pad_token_id": None}),
    "gpt2": ("GPT2Config", GPT2 | {"vocab_size": 300, "n_positions": 512, "pad_token_id": 257}),
    "bert": ("BertConfig", BERT),
}
TEXTS = ["a", "a much longer text than the others, by far", "", "some words", "b" * 30, "some words, and more"]


def saved(folder: Path, name: str, **changes: Any) -> str:
    config_class, settings = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**({"num_labels": 1} | settings | changes))
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(str(folder))
    tokenizer().save_pretrained(str(folder))
    return str(folder)


def classify(scorer: ClassifierReward, texts: Sequence[str]) -> list[float]:
    return asyncio.run(scorer.score([(row(), trajectory(text)) for text in texts]))


@pytest.mark.parametrize("name", MODELS)
def test_a_batch_scores_as_its_texts_do_alone(name: str, tmp_path: Path) -> None:
    path = saved(tmp_path, name)
    scorer = ClassifierReward(path, max_tokens=128, max_batch=4)
    together = classify(scorer, TEXTS)
    alone = [classify(scorer, [text])[0] for text in TEXTS]
    assert together == pytest.approx(alone, abs=1e-5)
    assert len({round(value, 3) for value in together}) == len(TEXTS)  # the model does tell them apart

    # The plainest way to ask the model itself: one text, no padding.
    model = transformers.AutoModelForSequenceClassification.from_pretrained(path).eval()
    for text, value in zip(TEXTS, together, strict=True):
        written = tokenizer().apply_chat_template(final_exchange(row(), trajectory(text)), tokenize=False)
        ids = tokenizer()(written, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            assert model(input_ids=ids).logits.item() == pytest.approx(value, abs=1e-5)


def test_the_side_a_tokenizer_pads_on_makes_no_difference(tmp_path: Path) -> None:
    scores = []
    for side in ("left", "right"):
        path = saved(tmp_path / side, "gpt2")
        made = transformers.AutoTokenizer.from_pretrained(path, padding_side=side)
        made.save_pretrained(path)
        scores.append(classify(ClassifierReward(path, max_tokens=128), TEXTS))
    assert scores[0] == scores[1]


def test_a_model_without_padding_is_read_at_the_last_token_whichever_that_is(tmp_path: Path) -> None:
    path = saved(tmp_path, "llama without padding")
    scorer = ClassifierReward(path, format=lambda row, trajectory: trajectory.final_text, max_tokens=128)
    texts = [*(f"text{chr(end)}" for end in range(33, 127)), "a longer text"]  # among them the token of id 0, "!"
    model = transformers.AutoModelForSequenceClassification.from_pretrained(path).eval()
    with torch.no_grad():
        alone = [model(input_ids=torch.tensor([tokenizer()(text)["input_ids"]])).logits.item() for text in texts]
    assert classify(scorer, texts) == pytest.approx(alone, abs=1e-5)


def test_the_format_function_says_what_the_model_reads_and_long_texts_keep_their_end(tmp_path: Path) -> None:
    def plain(row: TaskRow, trajectory: Trajectory) -> str:
        return trajectory.final_text

    scorer = ClassifierReward(saved(tmp_path, "llama"), format=plain, max_tokens=8)
    long, short, other = classify(scorer, ["x" * 50 + "the end.", "the end.", "the end!"])
    assert long == pytest.approx(short, abs=1e-6)
    assert short != pytest.approx(other, abs=1e-3)
    with pytest.raises(ScoringError, match="has no tokens"):
        classify(scorer, [""])


def test_of_several_labels_one_probability_is_the_score(tmp_path: Path) -> None:
    path = saved(tmp_path, "llama", num_labels=3)
    by_label = [classify(ClassifierReward(path, max_tokens=128, label=label), TEXTS) for label in range(3)]
    assert [sum(scores) for scores in zip(*by_label, strict=True)] == pytest.approx([1.0] * len(TEXTS))
    with pytest.raises(ConfigError, match="has 3 labels, got label=None"):
        ClassifierReward(path, max_tokens=128)
    with pytest.raises(ConfigError, match="has 3 labels, got label=3"):
        ClassifierReward(path, max_tokens=128, label=3)


def test_what_is_no_reward_model_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot load a reward model"):
        ClassifierReward(str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="reads at most 128 tokens, got max_tokens=4096"):
        ClassifierReward(saved(tmp_path / "short", "llama"))
    folder = tmp_path / "causal"
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).save_pretrained(str(folder))
    tokenizer().save_pretrained(str(folder))
    with pytest.raises(ConfigError, match=r"not a trained classifier: its weights lack score\.weight"):
        ClassifierReward(str(folder), max_tokens=128)


def test_episodes_are_scored_by_a_real_model_as_the_task_reward(tmp_path: Path) -> None:
    scorer = ClassifierReward(saved(tmp_path, "llama"), max_tokens=128)
    reward = BatchedReward(scorer, max_batch=4, seconds_per_attempt=60)
    group = Group(row=row(), trajectories=[trajectory(text) for text in TEXTS])
    [scored] = asyncio.run(Scorer(reward=reward, timeout=120)([group]))
    assert [t.outcome_reward for t in scored.trajectories] == pytest.approx(classify(scorer, TEXTS), abs=1e-5)
