"""The policy: a Hugging Face causal LM that answers one question, how likely each trained token of a pack is.

Knows transformers models and packs; knows no losses, rewards or optimizers. Weights are fp32 masters. Dropout stays
off: the log-probs must be those of the distribution that the sampler drew from.

Shape suffixes: N = tokens of a pack, T = trained tokens of a pack, D = hidden size, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from agent_r1.errors import ConfigError
from agent_r1.learn.attention import use_packed_attention
from agent_r1.learn.batch import Pack

# The most logits that may exist at once (256 MiB in fp32). With a vocabulary of 150k that is 447 tokens at a time.
MAX_LOGITS = 2**26
# fp32 kernels that sum in another order differ by about 1e-5; a model computed wrongly differs by far more.
CHECK_TOLERANCE = 1e-3


class PolicyModel:
    """A causal LM, prepared for packed training."""

    def __init__(
        self,
        model: Any,  # a transformers ...ForCausalLM
        *,
        attention: str = "segments",
        autocast_dtype: torch.dtype | None = None,
        max_logits: int = MAX_LOGITS,
    ) -> None:
        self.model: nn.Module = model.float().eval()
        self.autocast_dtype = autocast_dtype
        self.max_logits = max_logits
        self._body: nn.Module = model.base_model
        self._head: Any = model.get_output_embeddings()
        self._softcap: float | None = getattr(model.config, "final_logit_softcapping", None)
        self._check(attention)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def logprobs(self, pack: Pack, *, temperature: float, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
        """(logprobs_T, entropy_T) of the temperature-scaled distribution, in fp32, at the trained tokens only."""
        return self.score(self.hidden(pack), pack, temperature=temperature, entropy_gradient=entropy_gradient)

    def hidden(self, pack: Pack) -> Tensor:
        """[T, D]: the last hidden state that each trained token is predicted from."""
        with self._autocast():
            return self._hidden(pack).index_select(0, pack.sources_T)

    def score(
        self, hidden_TD: Tensor, pack: Pack, *, temperature: float, entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor]:
        """`logprobs`, from hidden states that are there already.

        The full [T, V] logits exist only when they fit in `max_logits`; otherwise they are made chunk by chunk, and
        again in the backward pass. The entropy carries a gradient only on request, since keeping it costs [T, V].
        """
        chunk = max(1, self.max_logits // int(self._head.weight.shape[0]))
        with self._autocast():
            if pack.num_trained <= chunk:
                return self._score(hidden_TD, pack.targets_T, temperature, entropy_gradient)
            pieces = [
                checkpoint(self._score, hidden, targets, temperature, entropy_gradient, use_reentrant=False)
                for hidden, targets in zip(hidden_TD.split(chunk), pack.targets_T.split(chunk), strict=True)
            ]
        logprobs, entropies = zip(*pieces, strict=True)
        return torch.cat(logprobs), torch.cat(entropies)

    def weights(self) -> Mapping[str, Tensor]:
        """The live weights under their state-dict names, tied ones once. Views, not copies."""
        once = {name for name, _ in self.model.named_parameters()}
        tied = {name for name, _ in self.model.named_parameters(remove_duplicate=False)} - once
        return {name: tensor for name, tensor in self.model.state_dict().items() if name not in tied}

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """The inverse of `weights`."""
        expected = self.weights().keys()
        if expected != weights.keys():
            raise ConfigError(
                f"weights of another model: {sorted(expected ^ weights.keys())[0]!r} is in only one of the two"
            )
        self.model.load_state_dict(weights, strict=False)  # not strict: tied weights are there once

    @property
    def hidden_size(self) -> int:
        return int(self._head.weight.shape[1])

    def body_parameters(self) -> list[nn.Parameter]:
        """Those that hidden states depend on: all but an output head of its own."""
        return [p for p in self._body.parameters() if p.requires_grad]

    def copy(self) -> PolicyModel:
        """The same weights in a model of its own: to train as something else, or to freeze."""
        return deepcopy(self)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=self.autocast_dtype, enabled=self.autocast_dtype is not None)

    def _hidden(self, pack: Pack) -> Tensor:
        output = self._body(
            input_ids=pack.input_ids_N[None],
            position_ids=pack.position_ids_N[None],
            use_cache=False,
            packed_lengths=pack.lengths,
        )
        hidden_ND: Tensor = output.last_hidden_state[0]
        return hidden_ND

    def _logits(self, hidden_TD: Tensor) -> Tensor:
        logits_TV: Tensor = self._head(hidden_TD).float()
        if self._softcap is not None:
            logits_TV = self._softcap * (logits_TV / self._softcap).tanh()
        return logits_TV

    def _score(
        self, hidden_TD: Tensor, targets_T: Tensor, temperature: float, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        logits_TV = self._logits(hidden_TD)
        if temperature != 1.0:
            logits_TV = logits_TV / temperature
        logprobs_TV = logits_TV.log_softmax(-1)
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropy_T = -(logprobs_TV.exp() * logprobs_TV).sum(-1)
        return logprobs_TV.gather(-1, targets_T[:, None])[:, 0], entropy_T

    @torch.no_grad()
    def _check(self, attention: str) -> None:
        """Compare body, packed attention and head once with the model's own definition, on two short sequences.

        Models differ in what they do between hidden states and logits, and in what they hand to their attention. Better
        a refusal here than a policy that is trained as something it is not.
        """
        vocabulary = int(self._head.weight.shape[0])
        token_ids = torch.arange(8, device=self.device) * 7919 % vocabulary  # a prime: spread over the vocabulary
        lengths = (5, 3)
        model: Any = self.model
        every = torch.arange(8, device=self.device)
        probe = Pack(
            input_ids_N=token_ids,
            position_ids_N=torch.cat([every[:length] for length in lengths]),
            lengths=lengths,
            sources_T=every,
            targets_T=token_ids,
            columns_T=every,
            step_ids_T=every,
            trajectory_ids_T=every,
        )
        use_packed_attention(model, attention)
        got = self._logits(self._hidden(probe))
        model.set_attn_implementation("eager")  # how the model itself defines attention, without any fused kernel
        expected = torch.cat([model(input_ids=part[None]).logits[0] for part in token_ids.split(lengths)]).float()
        use_packed_attention(model, attention)
        error = (got.log_softmax(-1) - expected.log_softmax(-1)).abs().max().item()
        if not error <= CHECK_TOLERANCE:  # written so that NaN fails too
            raise ConfigError(
                f"{type(model).__name__} cannot be trained: packed log-probs differ from the model's own by "
                f"{error:.2g} (allowed {CHECK_TOLERANCE}). It probably scales its logits or mixes "
                "tokens outside attention."
            )
