"""The policy: a Hugging Face causal LM that gives the log-prob of each trained token of a pack.

Knows transformers models and packs; knows no losses, rewards or optimizers. Weights are fp32 masters. Dropout stays
off: the log-probs must be those of the distribution that the sampler drew from.

Shape suffixes: N = tokens of a pack, T = trained tokens of a pack, D = hidden size, V = vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from copy import copy, deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from agent_r1.compute.attention import short_windows
from agent_r1.errors import ConfigError, UnsupportedModelError
from agent_r1.learn.batch.packs import Pack
from agent_r1.learn.batch.tree import PackLayout
from agent_r1.learn.model.head import HeadSettings, token_logprobs
from agent_r1.learn.model.layers import (
    checkpoint_layers,
    chunk_mlps,
    compile_layers,
    decoder_layers,
    require_compiler,
    untied_state,
)
from agent_r1.learn.model.lora import Adapters, LoRA
from agent_r1.learn.model.packed_attention import use_packed_attention
from agent_r1.learn.model.sharding import body_of, gathered, onto, release, shard_model
from agent_r1.learn.sizes import MAX_LOGITS
from agent_r1.types import ByRole, of_role
from agent_r1.vision.eyes import MAX_CACHED_BYTES, Eyes
from agent_r1.vision.picture_format import PictureFormat

logger = logging.getLogger(__name__)

# fp32 kernels that sum in another order differ by about 1e-5; a model computed wrongly differs by far more.
CHECK_TOLERANCE = 1e-3
ROUNDING = 1e-5  # factors closer to 1 are 1
OWN_ATTENTIONS = ("sdpa", "eager")  # transformers' own, fastest first


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
        mlp_chunk_tokens: int | None = None,  # compute MLPs for this many tokens at a time, and twice
        pictures: PictureFormat | None = None,  # how the model takes pictures, if it does
        train_vision: bool = False,  # train the vision tower too
    ) -> None:
        self._eyes = None if pictures is None else Eyes(model, pictures)
        if self._eyes is not None and not train_vision:
            self._eyes.freeze()
        self.shares_base = lora is not None and lora.share_base
        self._sends_adapters = lora is not None and not lora.merges
        self.model: nn.Module = (model if self.shares_base else model.float()).eval()
        self.autocast_dtype = autocast_dtype
        self.head_dtype = None if fp32_head else autocast_dtype
        self.max_logits = max_logits
        self.compiled, self.mlp_chunk_tokens = compiled, mlp_chunk_tokens
        self._adapters = Adapters(model, lora) if lora is not None else None
        self._bare = False  # whether to compute without the adapters
        # A class whose prefix does not name its body (Llama 4) is its own base model.
        self._body: Any = model.model if model.base_model is model else model.base_model
        if self._eyes is not None:
            self._body = self._eyes.decoder
        self._attending: Any = model if self._eyes is None else self._body  # the tower keeps its own attention
        self._head: Any = model.get_output_embeddings()
        if type(self._head) is not nn.Linear:
            raise ConfigError(f"the output head of {type(model).__name__} must be nn.Linear, not {type(self._head)}")
        self._softcap: float | None = getattr(model.config, "final_logit_softcapping", None)
        self._logit_scale = 1.0  # between the head's output and the model's logits
        self.packs = True  # whether segments are computed together; otherwise one at a time, with the model's attention
        if checkpoint_activations:
            self.checkpoint_activations()
        if mlp_chunk_tokens is not None:
            chunk_mlps(decoder_layers(self._body, without="leave out learner.mlp_chunk_tokens"), mlp_chunk_tokens)
        self._check(attention)
        if compiled:
            require_compiler(self.device)
            self._compile_layers()

    def checkpoint_activations(self) -> None:
        """Turn on activation checkpointing: keep each layer's input, and recompute the layer in the backward pass."""
        checkpoint_layers(self._body)

    def shard(self, mesh: DeviceMesh) -> None:
        """Spread the weights over the ranks; see `sharding.py`. A sharded model cannot be copied."""
        if self._eyes is not None:
            raise ConfigError("a model that takes pictures is trained in one process: leave out --gpus")
        if not self.is_sharded:  # a reference may share the policy's model
            shard_model(self.model, self._body, mesh, self.autocast_dtype)

    @property
    def pictures(self) -> PictureFormat | None:
        return None if self._eyes is None else self._eyes.form

    @property
    def is_sharded(self) -> bool:
        return isinstance(self.model, FSDPModule)

    @property
    def kept_features(self) -> int:
        """Bytes of the features of pictures that may be kept between passes."""
        return 0 if self._eyes is None or self._eyes.learns else MAX_CACHED_BYTES

    def forget_pictures(self) -> None:
        """Drop the features of all pictures."""
        if self._eyes is not None:
            self._eyes.forget()

    def release(self) -> None:
        """Free the weights that a forward pass gathered."""
        release(self.model)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def logprobs(self, pack: Pack, *, temperature: ByRole, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
        """(logprobs_T, entropy_T) of the distribution that was sampled from, in fp32, at the trained tokens only."""
        return self.score(self.hidden(pack), pack, temperature=temperature, entropy_gradient=entropy_gradient)

    def hidden(self, pack: Pack) -> Tensor:
        """[T, D]: the last hidden state that each trained token is predicted from."""
        dtype, adapters = self.autocast_dtype, self._adapters
        autocast = torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None)
        with autocast, adapters.disabled() if self._bare and adapters is not None else nullcontext():
            return self._hidden(pack).index_select(0, pack.sources_T)

    def score(
        self, hidden_TD: Tensor, pack: Pack, *, temperature: ByRole, entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor]:
        """`logprobs` from given hidden states. At most `max_logits` logits exist at once; see `head.py`.

        temperature: the one for steps that do not record theirs.
        """
        head = self._head
        settings = HeadSettings(
            temperature=_sampled_at(pack, of_role(temperature)) / self._logit_scale,
            softcap=None if self._softcap is None else self._softcap / self._logit_scale,
            entropy_gradient=entropy_gradient,
            chunk=max(1, self.max_logits // self.vocabulary_size),
            dtype=self.head_dtype or torch.promote_types(head.weight.dtype, torch.float32),
            compiled=self.compiled and self.device.type == "cuda",
        )
        return token_logprobs(hidden_TD, head.weight, head.bias, pack.targets_T, settings, pack.supports)

    def weights(self) -> Mapping[str, Tensor]:
        """The weights under the model's state-dict names, tied ones once. Views, not copies; adapters are merged into
        each matrix on access, and sharded weights are gathered, so every rank must read all of them in order."""
        merged = self._adapters.merged() if self._adapters is not None else untied_state(self.model)
        return gathered(merged) if self.is_sharded else merged

    def sampler_weights(self) -> Mapping[str, Tensor]:
        """The tensors that an engine must load after an update: the adapters if it has their base, otherwise
        `weights`."""
        if not self._sends_adapters or self._adapters is None:
            return self.weights()
        adapters = self._adapters.state_dict()
        return gathered(adapters) if self.is_sharded else adapters

    def trained_state(self) -> dict[str, Tensor]:
        """The live tensors of the adapters, or of the whole model; this rank's shards of them."""
        return untied_state(self.model) if self._adapters is None else self._adapters.state_dict()

    @torch.no_grad()
    def load_trained_state(self, state: Mapping[str, Tensor]) -> None:
        """The inverse of `trained_state`."""
        own = self.trained_state()
        if {name: t.shape for name, t in own.items()} != {name: t.shape for name, t in state.items()}:
            raise ConfigError(
                "the saved weights or adapters do not fit this model: continue with the saved model and section lora"
            )
        for name, tensor in own.items():
            tensor.copy_(onto(state[name], tensor))

    def adapter_state(self) -> dict[str, Tensor] | None:
        """The live tensors of the adapters; None if the weights themselves are trained."""
        return self._adapters.state_dict() if self._adapters is not None else None

    def load_adapter_state(self, state: Mapping[str, Tensor] | None) -> None:
        """The inverse of `adapter_state`."""
        if (state is None) != (self._adapters is None):
            raise ConfigError("only one of saved state and model has an adapter: continue with the saved section lora")
        if state is not None:
            self.load_trained_state(state)

    def save_pretrained(self, save_directory: str) -> None:
        """Write a complete Hugging Face directory of a plain model; adapters are merged into the weights. All ranks
        must take part in gathering a sharded model; rank 0 writes."""
        model: Any = self.model
        if self._adapters is None and not self.is_sharded:
            model.save_pretrained(save_directory)
            return
        is_writer = not self.is_sharded or distributed.get_rank() == 0
        weights = {name: tensor.cpu() for name, tensor in self.weights().items() if is_writer}
        if is_writer:
            model.save_pretrained(save_directory, state_dict=weights)

    @property
    def hidden_size(self) -> int:
        return int(self._head.weight.shape[1])

    @property
    def vocabulary_size(self) -> int:
        return int(self._head.weight.shape[0])

    def body_parameters(self) -> list[nn.Parameter]:
        """The trained parameters that hidden states depend on: all but an untied output head."""
        parts = [self._body, *([] if self._eyes is None else self._eyes.tower)]
        return [p for part in parts for p in part.parameters() if p.requires_grad]

    def copy(self) -> PolicyModel:
        """An independent model with the same weights, to train as something else or to freeze."""
        frozen = [p for p in self.model.parameters() if self.shares_base and not p.requires_grad]
        other = deepcopy(self, {id(parameter): parameter for parameter in frozen})
        if self.compiled:  # compiled code is not copied
            other._compile_layers()
        return other

    def without_adapters(self) -> PolicyModel:
        """The model without its adapters, sharing the same weights."""
        assert self._adapters is not None
        other = copy(self)
        other._bare = True
        return other

    def _compile_layers(self) -> None:
        compile_layers(self._body)
        if self._eyes is not None:
            self._eyes.compile(self.autocast_dtype or self._head.weight.dtype)

    def _hidden(self, pack: Pack) -> Tensor:
        if self._eyes is not None:
            positions_AN = pack.position_ids_N if pack.position_ids_N.ndim == 2 else pack.position_ids_N[None]
            return self._eyes.hidden(pack.input_ids_N, positions_AN, pack.sight, packed=pack.layout)
        body = body_of(self.model, self._body)
        if not self.packs:
            parts = pack.input_ids_N.split(pack.lengths)
            return torch.cat([body(input_ids=ids[None], use_cache=False).last_hidden_state[0] for ids in parts])
        output = body(
            input_ids=pack.input_ids_N[None],
            position_ids=pack.position_ids_N[None],
            use_cache=False,
            packed=pack.layout,
        )
        hidden_ND: Tensor = output.last_hidden_state[0]
        return hidden_ND

    def _logits(self, hidden_TD: Tensor) -> Tensor:
        logits_TV: Tensor = self._head(hidden_TD).float() * self._logit_scale
        if self._softcap is not None:
            logits_TV = self._softcap * (logits_TV / self._softcap).tanh()
        return logits_TV

    @torch.no_grad()
    def _check(self, attention: str | None) -> None:
        """Compare body, packed attention and head once with the model's own forward pass, on two short sequences.

        Models differ in what they do between hidden states and logits, and in what they pass to their attention. A
        model that cannot be packed, because it mixes tokens outside attention for example, computes one segment at a
        time.
        """
        model: Any = self.model
        with short_windows(model):
            probe, expected = self._probe()
            packed = partial(use_packed_attention, self._attending)
            reason = self._try(probe, expected, lambda: packed("segments"))  # in fp32, like eager
            if reason is None:
                packed(attention, self.autocast_dtype)
                return
            if self._eyes is not None:
                raise UnsupportedModelError(f"{type(model).__name__} cannot be trained: {reason}")
            self.packs = False
            own = [self._try(probe, expected, partial(model.set_attn_implementation, name)) for name in OWN_ATTENTIONS]
        if all(own):
            raise UnsupportedModelError(
                f"{type(model).__name__} cannot be trained: {own[-1]}. It probably changes its logits after the head."
            )
        model.set_attn_implementation(OWN_ATTENTIONS[own.index(None)])
        logger.warning("%s is trained one segment at a time, without packing: %s", type(model).__name__, reason)

    def _probe(self) -> tuple[Pack, Tensor]:
        """Two sequences, and the model's own logits of each. Measures the factor between head and logits."""
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
        self._attending.set_attn_implementation("eager")  # the model's own definition, without fused kernels
        raw: list[Tensor] = []
        hook = self._head.register_forward_hook(lambda _head, _inputs, output: raw.append(output[0].clone()))
        parts = token_ids.split(lengths)
        expected = torch.cat([model(input_ids=part[None], use_cache=False).logits[0] for part in parts]).float()
        hook.remove()
        if self._softcap is None:
            logits = torch.cat(raw).double()
            scale = float((expected * logits).sum() / logits.square().sum())
            self._logit_scale = scale if abs(scale - 1) > ROUNDING else 1.0
        return probe, expected

    def _try(self, probe: Pack, expected: Tensor, use_attention: Callable[[], None]) -> str | None:
        """Return why log-probs are wrong with this attention; None if they are right."""
        try:
            use_attention()
            got = self._logits(self._hidden(probe))
        except ValueError as reason:  # an UnsupportedModelError, or transformers has no fused attention for the model
            return str(reason)
        error = (got.log_softmax(-1) - expected.log_softmax(-1)).abs().max().item()
        rounding = 8 * torch.finfo(self._head.weight.dtype).eps * float(expected.abs().max())
        is_right = error <= max(CHECK_TOLERANCE, rounding)  # False for NaN
        return None if is_right else f"log-probs are off by {error:.2g}"


def _sampled_at(pack: Pack, otherwise: float) -> float | Tensor:
    """The temperature of the pack's tokens, or of each of them."""
    if isinstance(pack.temperature, Tensor):
        return pack.temperature.nan_to_num(otherwise)
    return otherwise if pack.temperature is None else pack.temperature
