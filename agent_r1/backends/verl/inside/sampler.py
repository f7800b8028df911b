"""A `Sampler` over verl's rollout servers: ids in, ids and log-probs out. Knows verl's client only by its methods."""

from __future__ import annotations

from typing import Any

from agent_r1.engines.base import Completion, Prompt, Sampling
from agent_r1.errors import RolloutError

SESSION = "agent_r1_session"  # for our own server: verl gives every request an id of its own


class VerlSampler:
    """`client` is verl's LLMServerClient. It keeps a session on one server, so that its prefix cache is of use."""

    def __init__(self, client: Any, *, engine: str) -> None:
        self._client, self._engine = client, engine

    async def generate(self, prompt: Prompt, sampling: Sampling, *, session: str) -> Completion:
        if prompt.media:
            raise RolloutError("verl's rollout servers are asked for text only, and this prompt has images")
        output = await self._client.generate(
            session, prompt_ids=list(prompt.ids), sampling_params=self.parameters(sampling, session)
        )
        ids, logprobs = list(output.token_ids), output.log_probs
        if logprobs is None or len(logprobs) != len(ids) or not ids:
            raise RolloutError(
                f"the rollout server returned {len(ids)} tokens and {len(logprobs or [])} log-probs (stop reason "
                f"{output.stop_reason!r}); training needs one log-prob per token"
            )
        if output.stop_reason in ("aborted", "abort"):
            stop: Any = "abort"
        else:  # verl says "completed" for both; the last token shows which it was
            stop = "stop" if ids[-1] in sampling.stop_ids else "length"
        version = output.extra_fields.get("global_steps")
        return Completion(
            token_ids=ids,
            logprobs=[float(value) for value in logprobs],
            stop=stop,
            versions=((0 if version is None else int(version), len(ids)),),
        )

    def parameters(self, sampling: Sampling, session: str) -> dict[str, Any]:
        """Sampling options as the servers name them. SGLang takes no seed per request, so its runs cannot be
        repeated."""
        given: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "repetition_penalty": 1.0,
            "max_tokens": sampling.max_tokens,
            "stop_token_ids": list(sampling.stop_ids),
            "logprobs": True,
        }
        if sampling.seed is not None and self._engine != "sglang":
            given["seed"] = sampling.seed % 2**63
        if self._engine not in ("vllm", "sglang"):
            given[SESSION] = session
        return given

    def release(self, session: str) -> None:
        """Sessions of verl's servers end by themselves."""
