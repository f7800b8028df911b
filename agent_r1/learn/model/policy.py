"""The policy: a Hugging Face causal LM that answers one question, how likely each trained token of a pack is.

Knows transformers models and packs; knows no losses, rewards or optimizers. Weights are fp32 masters. Dropout stays
off: the log-probs must be those of the distribution that the sampler drew from.

Shape suffixes: N = tokens of a pack, T = trained tokens of a pack, D = hidden size, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import copy, deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from agent_r1.errors import ConfigError
from agent_r1.learn.batch.packs import Pack
from agent_r1.learn.batch.tree import PackLayout
from agent_r1.learn.model.head import OUTSIDE, HeadSettings, narrow, token_logprobs
from agent_r1.learn.model.layers import checkpoint_layers, compile_layers, require_compiler
from agent_r1.learn.model.lora import Adapters, LoRA
from agent_r1.learn.model.packed_attention import use_packed_attention

# The most logits that may exist at once (256 MiB in fp32). With a vocabulary of 150k that is 447 tokens at a time.
MAX_LOGITS = 2**26
# fp32 kernels that sum in another order differ by about 1e-5; a model computed wrongly differs by far more.
CHECK_TOLERANCE = 1e-3


class PolicyModel:
    """A causal LM, prepared for packed training."""

    def __init__(  # noqa: PLR0913 (all settings of a model in one place)
        self,
        model: Any,  # a transformers ...ForCausalLM
        *,
        attention: str | None = None,  # a packed attention by name; None: the fastest
        autocast_dtype: torch.dtype | None = None,
        fp32_head: bool = False,  # compute logits in float32 from the master weights, in any body dtype
        max_logits: int = MAX_LOGITS,
        lora: LoRA | None = None,  # train adapters instead of the weights
        compiled: bool = False,  # the layers, and on a GPU what is done to logits
        checkpoint_activations: bool = False,  # keep the input of each layer alone, and compute the layer twice
    ) -> None:
        self.model: nn.Module = model.float().eval()
        self.autocast_dtype = autocast_dtype
        self.head_dtype = None if fp32_head else autocast_dtype
        self.max_logits = max_logits
        self.compiled = compiled
        self._adapters = Adapters(model, lora) if lora is not None else None
        self._bare = False  # computes without the adapters
        self._body: nn.Module = model.base_model
        self._head: Any = model.get_output_embeddings()
        self._softcap: float | None = getattr(model.config, "final_logit_softcapping", None)
        if checkpoint_activations:
            checkpoint_layers(self._body)
        self._check(attention)
        if compiled:
            require_compiler(self.device)
            compile_layers(self._body)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def logprobs(self, pack: Pack, *, temperature: float, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
        """(logprobs_T, entropy_T) of the distribution that was sampled from, in fp32, at the trained tokens only."""
        return self.score(self.hidden(pack), pack, temperature=temperature, entropy_gradient=entropy_gradient)

    def hidden(self, pack: Pack) -> Tensor:
        """[T, D]: the last hidden state that each trained token is predicted from."""
        with self._autocast(self.autocast_dtype), self._without_adapters():
            return self._hidden(pack).index_select(0, pack.sources_T)

    def score(
        self, hidden_TD: Tensor, pack: Pack, *, temperature: float, entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor]:
        """`logprobs`, from hidden states that are there already.

        At most `max_logits` logits exist at once; see `head.py`. The entropy carries a gradient only on request.
        """
        if type(self._head) is not nn.Linear:
            return self._score_by_module(hidden_TD, pack, temperature, entropy_gradient)
        settings = HeadSettings(
            temperature=temperature,
            softcap=self._softcap,
            entropy_gradient=entropy_gradient,
            chunk=self._chunk,
            dtype=self.head_dtype or self._head.weight.dtype,
            compiled=self.compiled and self.device.type == "cuda",
        )
        head = self._head
        return token_logprobs(hidden_TD, head.weight, head.bias, pack.targets_T, settings, pack.supports)

    def weights(self) -> Mapping[str, Tensor]:
        """The weights under the model's own state-dict names, tied ones once. Views, not copies; with adapters each
        adapted matrix is merged when it is asked for."""
        if self._adapters is not None:
            return self._adapters.merged()
        once = {name for name, _ in self.model.named_parameters()}
        tied = {name for name, _ in self.model.named_parameters(remove_duplicate=False)} - once
        return {name: tensor for name, tensor in self.model.state_dict().items() if name not in tied}

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """The inverse of `weights`, for a model without adapters."""
        assert self._adapters is None  # merged weights cannot be taken apart again
        expected = self.weights().keys()
        if expected != weights.keys():
            raise ConfigError(
                f"weights of another model: {sorted(expected ^ weights.keys())[0]!r} is in only one of the two"
            )
        self.model.load_state_dict(weights, strict=False)  # not strict: tied weights are there once

    def adapter_state(self) -> dict[str, Tensor] | None:
        """All that training changes, where that is adapters and not the weights. Live tensors."""
        return self._adapters.state_dict() if self._adapters is not None else None

    def load_adapter_state(self, state: Mapping[str, Tensor] | None) -> None:
        """The inverse of `adapter_state`."""
        if (state is None) != (self._adapters is None):
            raise ConfigError(
                f"the saved state has {'no adapter' if state is None else 'an adapter'}, this model has "
                f"{'none' if self._adapters is None else 'one'}: continue with the section lora that was saved"
            )
        if state is not None and self._adapters is not None:
            self._adapters.load_state_dict(state)

    def save_pretrained(self, save_directory: str) -> None:
        """A complete Hugging Face directory of a plain model: adapters are merged into the weights."""
        model: Any = self.model
        merged = {name: tensor.cpu() for name, tensor in self.weights().items()} if self._adapters is not None else None
        model.save_pretrained(save_directory, state_dict=merged)

    @property
    def hidden_size(self) -> int:
        return int(self._head.weight.shape[1])

    @property
    def vocabulary_size(self) -> int:
        return int(self._head.weight.shape[0])

    def body_parameters(self) -> list[nn.Parameter]:
        """Those that hidden states depend on: all but an output head of its own."""
        return [p for p in self._body.parameters() if p.requires_grad]

    def copy(self) -> PolicyModel:
        """The same weights in a model of its own: to train as something else, or to freeze."""
        other = deepcopy(self)
        if self.compiled:  # what was compiled is not copied
            compile_layers(other._body)
        return other

    def without_adapters(self) -> PolicyModel:
        """The model as it was before its adapters were trained, on the same weights: no second copy of them."""
        assert self._adapters is not None
        other = copy(self)
        other._bare = True
        return other

    def _autocast(self, dtype: torch.dtype | None) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None)

    def _without_adapters(self) -> AbstractContextManager[None]:
        return self._adapters.disabled() if self._bare and self._adapters is not None else nullcontext()

    @property
    def _chunk(self) -> int:
        """How many tokens may have logits at once."""
        return max(1, self.max_logits // self.vocabulary_size)

    def _hidden(self, pack: Pack) -> Tensor:
        output = self._body(
            input_ids=pack.input_ids_N[None],
            position_ids=pack.position_ids_N[None],
            use_cache=False,
            packed=pack.layout,
        )
        hidden_ND: Tensor = output.last_hidden_state[0]
        return hidden_ND

    def _logits(self, hidden_TD: Tensor) -> Tensor:
        logits_TV: Tensor = self._head(hidden_TD).float()
        if self._softcap is not None:
            logits_TV = self._softcap * (logits_TV / self._softcap).tanh()
        return logits_TV

    def _score_by_module(
        self, hidden_TD: Tensor, pack: Pack, temperature: float, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        """For a head that is more than a matrix (quantised, adapted): called as it is, chunk by chunk."""
        hidden_TD = hidden_TD if self.head_dtype == self.autocast_dtype else hidden_TD.float()
        pieces = []
        for start in range(0, max(1, len(hidden_TD)), self._chunk):
            rows = slice(start, start + self._chunk)
            ids_CK = None if pack.supports is None else pack.supports.chunk(rows, hidden_TD.device)
            settings = (ids_CK, temperature, entropy_gradient)
            with self._autocast(self.head_dtype):
                chunk = checkpoint(self._score, hidden_TD[rows], pack.targets_T[rows], *settings, use_reentrant=False)
            pieces.append(chunk)
        logprobs, entropies = zip(*pieces, strict=True)
        return torch.cat(logprobs), torch.cat(entropies)

    def _score(
        self, hidden_TD: Tensor, targets_T: Tensor, ids_TK: Tensor | None, temperature: float, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        logits_TV, targets_T, padding_TV = narrow(self._logits(hidden_TD), targets_T, ids_TK)
        scaled_TV = logits_TV / temperature
        logprobs_TV = (scaled_TV if padding_TV is None else scaled_TV.masked_fill(padding_TV, OUTSIDE)).log_softmax(-1)
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropy_T = -(logprobs_TV.exp() * logprobs_TV).sum(-1)
        return logprobs_TV.gather(-1, targets_T[:, None])[:, 0], entropy_T

    @torch.no_grad()
    def _check(self, attention: str | None) -> None:
        """Compare body, packed attention and head once with the model's own definition, on two short sequences.

        Models differ in what they do between hidden states and logits, and in what they hand to their attention. Better
        a refusal here than a policy that is trained as something it is not.
        """
        token_ids = (
            torch.arange(8, device=self.device) * 7919 % self.vocabulary_size
        )  # a prime: spread over the vocabulary
        lengths = (5, 3)
        model: Any = self.model
        every = torch.arange(8, device=self.device)
        probe = Pack(
            input_ids_N=token_ids,
            position_ids_N=torch.cat([every[:length] for length in lengths]),
            layout=PackLayout.flat(lengths).to(self.device),
            lengths=lengths,
            sources_T=every,
            targets_T=token_ids,
            columns_T=every,
            step_ids_T=every,
            trajectory_ids_T=every,
        )
        use_packed_attention(model, "segments")  # in fp32, like the model's own
        got = self._logits(self._hidden(probe))
        model.set_attn_implementation("eager")  # how the model itself defines attention, without any fused kernel
        expected = torch.cat(
            [model(input_ids=part[None], use_cache=False).logits[0] for part in token_ids.split(lengths)]
        ).float()
        use_packed_attention(model, attention, self.autocast_dtype)
        error = (got.log_softmax(-1) - expected.log_softmax(-1)).abs().max().item()
        if not error <= CHECK_TOLERANCE:  # written so that NaN fails too
            raise ConfigError(
                f"{type(model).__name__} cannot be trained: packed log-probs differ from the model's own by "
                f"{error:.2g} (allowed {CHECK_TOLERANCE}). It probably scales its logits or mixes "
                "tokens outside attention."
            )
