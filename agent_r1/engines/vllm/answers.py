"""Requests to vLLM's token endpoint and its answers: pure functions of our types and JSON. Knows nothing about HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from agent_r1.engines.base import Completion, Prompt, Sampling
from agent_r1.errors import RolloutError
from agent_r1.types import Support

GENERATE = "/inference/v1/generate"
FLOOR = -9999.0  # vLLM's log-prob for an id that was filtered out, and for one that is not a number
TIES = 8  # further ids asked for beside top_k: vLLM keeps those that tie with the last one
STOPS: Mapping[str, Literal["stop", "length", "abort"]] = {"stop": "stop", "length": "length", "abort": "abort"}


def request_body(
    prompt: Prompt, sampling: Sampling, *, seed: int, salt: str, request_id: str, adapter: str | None = None
) -> dict[str, Any]:
    """`adapter` is the name of a loaded adapter; None samples from the base."""
    return {
        "request_id": request_id,
        "model": adapter,
        "token_ids": prompt.ids,
        "cache_salt": salt,  # keys and values of older weights are never reused
        "sampling_params": {
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "seed": seed,
            "stop_token_ids": list(sampling.stop_ids),
            "ignore_eos": True,  # only our stop ids end a response
            "logprobs": sampling.top_k + TIES if sampling.keep_support else 0,
            "detokenize": False,
        },
    }


def engine_request_id(request_id: str) -> str:
    """The name under which vLLM's engine knows a request, for aborting it."""
    return f"generate-tokens-{request_id}"


def read_completion(answer: Any, sampling: Sampling, *, version: int, server: str) -> Completion:
    """Turn an answer into a completion. Raises RolloutError if it is not one."""
    try:
        choice = answer["choices"][0]
        ids, reason = choice["token_ids"], STOPS[choice["finish_reason"]]
        entries = choice["logprobs"]["content"] if ids else []
        logprobs = [float(entry["logprob"]) for entry in entries]
        if [_token_id(entry) for entry in entries] != ids:
            raise ValueError(f"log-probs of {len(entries)} tokens for {len(ids)} tokens")
        kept = [[_token_id(top) for top in entry["top_logprobs"] if top["logprob"] > FLOOR] for entry in entries]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise RolloutError(f"{server} gave an answer that cannot be read ({error!r}): {str(answer)[:200]}") from error
    if any(logprob <= FLOOR or logprob != logprob for logprob in logprobs):
        raise RolloutError(f"the logits of the model on {server} (version {version}) are not finite")
    return Completion(
        token_ids=ids,
        logprobs=logprobs,
        stop="stop" if ids and ids[-1] in sampling.stop_ids else reason,
        versions=((version, len(ids)),) if ids else (),
        support=Support.of(kept) if sampling.keep_support else None,
    )


def _token_id(entry: Mapping[str, Any]) -> int:
    """vLLM 0.26 gives an id as the text of its token, such as `token_id:7`."""
    return entry["token_id"] if "token_id" in entry else int(entry["token"].removeprefix("token_id:"))
