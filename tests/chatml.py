"""A byte-level ChatML tokenizer and the parts around it, for tests that need real ids but no trained model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from agent_r1.engines.base import Sampler, Sampling
from agent_r1.engines.scripted import ScriptedEngine
from agent_r1.envs.base import AgentEnv
from agent_r1.flows.budgets import Limits
from agent_r1.flows.flow import AgentEnvLoop, AgentFlowBase
from agent_r1.rollout.collect import Collector
from agent_r1.tokens.rendering import Renderer
from agent_r1.types import TaskRow

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@cache
def tokenizer() -> Any:
    alphabet = sorted(ByteLevel.alphabet())
    backend = Tokenizer(BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = ByteLevelDecoder()
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = TEMPLATE
    return made


@cache
def renderer() -> Renderer:
    return Renderer(tokenizer())


def row(row_id: str = "r", question: str = "?", **fields: Any) -> TaskRow:
    return TaskRow(prompt=[{"role": "user", "content": question}], row_id=row_id, **fields)


def collector(
    sampler: Sampler | Sequence[str],
    *,
    make_env: Callable[[TaskRow], AgentEnv] | None = None,
    make_flow: Callable[[TaskRow], AgentFlowBase] | None = None,
    group_size: int = 1,
    **limits: Any,
) -> Collector:
    """A collector whose policy says the given texts in order, or is the given sampler."""
    engine = ScriptedEngine(sampler, tokenizer=tokenizer()) if isinstance(sampler, Sequence) else sampler
    settings = {"max_steps": 5, "max_response_tokens": 64, "max_context_tokens": 2048, "episode_seconds": 20}
    return Collector(
        make_flow=make_flow or (lambda _: AgentEnvLoop(make_env or _no_env)),
        sampler=engine,
        renderer=renderer(),
        sampling=Sampling(max_tokens=64, stop_ids=tuple(renderer().stop_ids)),
        limits=Limits(**(settings | limits)),
        group_size=group_size,
    )


def _no_env(row: TaskRow) -> AgentEnv:
    raise AssertionError("this test's flow needs no env")
