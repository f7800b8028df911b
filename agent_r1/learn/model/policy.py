"""The policy: a Hugging Face causal LM that gives the log-prob of each trained token of a pack.

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

from agent_r1.errors import ConfigError
from agent_r1.learn.batch.packs import Pack
from agent_r1.learn.batch.tree import PackLayout
from agent_r1.learn.model.head import HeadSettings, token_logprobs
from agent_r1.learn.model.layers import checkpoint_layers, compile_layers, require_compiler, untied_state
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
        compiled: bool = False,  # compile the layers, and on a GPU the operations on logits
        checkpoint_activations: bool = False,  # keep only the input of each layer, and compute the layer twice
    ) -> None:
        self.model: nn.Module = model.float().eval()
        self.autocast_dtype = autocast_dtype
        self.head_dtype = None if fp32_head else autocast_dtype
        self.max_logits = max_logits
        self.compiled = compiled
        self._adapters = Adapters(model, lora) if lora is not None else None
        self._bare = False  # whether to compute without the adapters
        self._body: nn.Module = model.base_model
        self._head: Any = model.get_output_embeddings()
        if type(self._head) is not nn.Linear:
            raise ConfigError(f"the output head of {type(model).__name__} must be nn.Linear, not {type(self._head)}")
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
        """`logprobs` from given hidden states. At most `max_logits` logits exist at once; see `head.py`."""
        head = self._head
        settings = HeadSettings(
            temperature=temperature,
            softcap=self._softcap,
            entropy_gradient=entropy_gradient,
            chunk=max(1, self.max_logits // self.vocabulary_size),
            dtype=self.head_dtype or head.weight.dtype,
            compiled=self.compiled and self.device.type == "cuda",
        )
        return token_logprobs(hidden_TD, head.weight, head.bias, pack.targets_T, settings, pack.supports)

    def weights(self) -> Mapping[str, Tensor]:
        """The weights under the model's state-dict names, tied ones once. Views, not copies; adapters are merged into
        each matrix on access."""
        if self._adapters is not None:
            return self._adapters.merged()
        return untied_state(self.model)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """The inverse of `weights`, for a model without adapters."""
        assert self._adapters is None  # merged weights cannot be taken apart again
        expected = self.weights().keys()
        if expected != weights.keys():
            raise ConfigError(f"weights of another model: {min(expected ^ weights.keys())!r} is only in one of them")
        self.model.load_state_dict(weights, strict=False)  # not strict: tied weights are given once

    def adapter_state(self) -> dict[str, Tensor] | None:
        """The live tensors of the adapters; None if the weights themselves are trained."""
        return self._adapters.state_dict() if self._adapters is not None else None

    def load_adapter_state(self, state: Mapping[str, Tensor] | None) -> None:
        """The inverse of `adapter_state`."""
        if (state is None) != (self._adapters is None):
            raise ConfigError("only one of saved state and model has an adapter: continue with the saved section lora")
        if state is not None and self._adapters is not None:
            self._adapters.load_state_dict(state)

    def save_pretrained(self, save_directory: str) -> None:
        """Write a complete Hugging Face directory of a plain model; adapters are merged into the weights."""
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
        """The trained parameters that hidden states depend on: all but an untied output head."""
        return [p for p in self._body.parameters() if p.requires_grad]

    def copy(self) -> PolicyModel:
        """An independent model with the same weights, to train as something else or to freeze."""
        other = deepcopy(self)
        if self.compiled:  # compiled code is not copied
            compile_layers(other._body)
        return other

    def without_adapters(self) -> PolicyModel:
        """The model without its adapters, sharing the same weights."""
        assert self._adapters is not None
        other = copy(self)
        other._bare = True
        return other

    def _autocast(self, dtype: torch.dtype | None) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None)

    def _without_adapters(self) -> AbstractContextManager[None]:
        return self._adapters.disabled() if self._bare and self._adapters is not None else nullcontext()

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

    @torch.no_grad()
    def _check(self, attention: str | None) -> None:
        """Compare body, packed attention and head once with the model's own forward pass, on two short sequences.

        Models differ in what they do between hidden states and logits, and in what they pass to their attention.
        """
        model: Any = self.model
        lengths = (5, 3)
        every = torch.arange(8, device=self.device)
        token_ids = every * 7919 % self.vocabulary_size  # a prime: spread over the vocabulary
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
        model.set_attn_implementation("eager")  # the model's own definition, without fused kernels
        expected = torch.cat(
            [model(input_ids=part[None], use_cache=False).logits[0] for part in token_ids.split(lengths)]
        ).float()
        use_packed_attention(model, attention, self.autocast_dtype)
        error = (got.log_softmax(-1) - expected.log_softmax(-1)).abs().max().item()
        if not error <= CHECK_TOLERANCE:  # written so that NaN fails too
            raise ConfigError(
                f"{type(model).__name__} cannot be trained: packed log-probs are off by {error:.2g}. "
                "It probably scales its logits or mixes tokens outside attention."
            )
