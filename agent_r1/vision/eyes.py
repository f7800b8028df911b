"""A vision-language model as two parts: a tower that looks at pictures, and a decoder that reads embeddings.

The tower runs once for each picture, however many prompts show it. The decoder is an ordinary causal one: its inputs
are embeddings of text tokens and, at negative ids, the features of pictures (`pictures.py`). So packs, trees and the
paged cache work for it as they do for text. Which rows show pictures is decided by position: a policy may sample the
placeholder token, which is then a token like any other.

Shape suffixes: N = rows of a pass, P = rows that show a picture, F = tokens of all pictures of a pass, D = hidden size,
A = numbers of a position.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from agent_r1.compute.compiling import compile_each, repeated_layers
from agent_r1.compute.flash import has_flash
from agent_r1.errors import DataError
from agent_r1.vision.picture_format import IDEFICS, IntArray, PictureFormat
from agent_r1.vision.pictures import INDEX_BITS, MAX_TOKENS, Picture

MAX_CACHED_BYTES = 2**30  # bytes of features that are kept


@dataclass(slots=True, kw_only=True, eq=False)
class Sight:
    """The pictures of a pass and where they stand."""

    pictures: tuple[Picture, ...]
    rows_P: Tensor  # ascending
    slots_P: Tensor  # which token each of these rows shows, counted over all pictures

    @classmethod
    def of(cls, ids_N: IntArray, pictures: Mapping[int, Picture], form: PictureFormat) -> Sight | None:
        """Find the pictures among ids; None if there are none."""
        rows_P = np.flatnonzero(ids_N < 0)
        if not len(rows_P):
            return None
        codes_P = -1 - ids_N[rows_P]
        keys, place_P = np.unique(codes_P >> INDEX_BITS, return_inverse=True)
        missing = [key for key in keys.tolist() if key not in pictures]
        if missing:
            raise DataError(f"the ids show a picture that is not given: key {missing[0]:012x}")
        shown = tuple(pictures[key] for key in keys.tolist())
        sizes = np.array([form.tokens(picture) for picture in shown])
        slots_P = (sizes.cumsum() - sizes)[place_P] + (codes_P & (MAX_TOKENS - 1))
        return cls(pictures=shown, rows_P=torch.from_numpy(rows_P), slots_P=torch.from_numpy(slots_P))

    def to(self, device: torch.device) -> Sight:
        rows_P, slots_P = (index.to(device, non_blocking=True) for index in (self.rows_P, self.slots_P))
        return Sight(pictures=self.pictures, rows_P=rows_P, slots_P=slots_P)


class Eyes:
    """The parts of a vision-language model, and the features of the pictures it has seen."""

    def __init__(self, model: Any, form: PictureFormat) -> None:
        self.form = form
        self.looked = 0  # pictures that went through the tower
        self._model = model
        self._at_once = False  # whether the tower attends to all pictures of a pass in one call
        self._known: OrderedDict[str, Tensor] = OrderedDict()

    @property
    def decoder(self) -> Any:
        body = self._model.model
        return body.text_model if self.form.kind in IDEFICS else body.language_model

    @property
    def tower(self) -> list[nn.Module]:
        """The module that computes features of pictures."""
        body = self._model.model
        return [body.vision_model, body.connector] if self.form.kind in IDEFICS else [body.visual]

    @property
    def learns(self) -> bool:
        """Whether the tower is trained."""
        return any(parameter.requires_grad for part in self.tower for parameter in part.parameters())

    def freeze(self) -> None:
        for part in self.tower:
            part.requires_grad_(False)

    def compile(self, dtype: torch.dtype) -> None:
        """Compile the layers of the tower, which will compute in `dtype`. Layers that attend to one picture after the
        other stay as they are: they would be compiled again for every number of pictures."""
        if self.form.kind not in IDEFICS:
            from agent_r1.vision.tower_attention import PICTURES_AT_ONCE  # imports transformers

            visual = self._model.model.visual
            head_dim = visual.config.hidden_size // visual.config.num_heads
            if not has_flash(visual.device, dtype, head_dim):
                return
            # Its setter would look for the package flash-attn, because of the name.
            visual.config._attn_implementation = PICTURES_AT_ONCE
            self._at_once = True
        compile_each(layer for part in self.tower for layer in repeated_layers(part))

    def forget(self) -> None:
        """Drop all features: the weights have changed."""
        self._known.clear()

    def features(self, pictures: Sequence[Picture]) -> Tensor:
        """[F, D], or wider with features for deeper layers. Kept unless the tower is trained: each update changes
        them."""
        if self.learns:
            return torch.cat(self._look(pictures))
        new = [picture for picture in pictures if picture.name not in self._known]
        if new:
            with torch.no_grad():
                self._known |= zip((picture.name for picture in new), self._look(new), strict=True)
        found = [self._known[picture.name] for picture in pictures]
        for picture in pictures:
            self._known.move_to_end(picture.name)
        while len(self._known) > len(pictures) and sum(each.nbytes for each in self._known.values()) > MAX_CACHED_BYTES:
            self._known.popitem(last=False)
        return torch.cat(found)

    def hidden(self, ids_N: Tensor, positions_AN: Tensor, sight: Sight | None, **more: Any) -> Tensor:
        """[N, D]: the decoder's last hidden states. `more` goes to its attention."""
        embeds_ND: Tensor = self._model.get_input_embeddings()(ids_N.clamp(min=0))
        if sight is not None:
            seen_PD = self.features(sight.pictures).index_select(0, sight.slots_P).to(embeds_ND.dtype)
            own_PD, *deeper = seen_PD.split(embeds_ND.shape[1], dim=1)
            embeds_ND = embeds_ND.index_put((sight.rows_P,), own_PD)
            if deeper:
                shown_N = torch.zeros(len(ids_N), dtype=torch.bool, device=ids_N.device)
                shown_N[sight.rows_P] = True
                more |= {"visual_pos_masks": shown_N[None], "deepstack_visual_embeds": deeper}
        positions = positions_AN if len(positions_AN) == 1 else positions_AN[:, None]
        output = self.decoder(inputs_embeds=embeds_ND[None], position_ids=positions, use_cache=False, **more)
        hidden_ND: Tensor = output.last_hidden_state[0]
        return hidden_ND

    def _look(self, pictures: Iterable[Picture]) -> list[Tensor]:
        """The features of each picture, without the TF32 that cuDNN's convolutions use for float32 by default."""
        cudnn = torch.backends.cudnn
        kept = {"enabled": cudnn.enabled, "benchmark": cudnn.benchmark, "deterministic": cudnn.deterministic}
        with cudnn.flags(**kept, allow_tf32=False):
            return self._features(pictures)

    def _features(self, pictures: Iterable[Picture]) -> list[Tensor]:
        seen = list(pictures)
        self.looked += len(seen)
        weight = next(self.tower[0].parameters())
        values = [torch.from_numpy(self.form.values(picture)).to(weight) for picture in seen]
        if self.form.kind in IDEFICS:
            given = torch.stack(values)
            states = self._model.model.vision_model(pixel_values=given).last_hidden_state
            # Copies: a slice that is kept would keep the features of all pictures of this pass.
            return [each.clone() for each in self._model.model.connector(states)]
        shapes = [self.form.shape(picture) for picture in seen]
        merge = self._model.config.vision_config.spatial_merge_size
        grid = torch.tensor([[1, rows * merge, columns * merge] for rows, columns in shapes], device=weight.device)
        sizes = [rows * columns for rows, columns in shapes]
        more = {"longest": torch.tensor([max(sizes) * merge**2] * 2)} if self._at_once else {}
        output = self._model.model.get_image_features(torch.cat(values), grid, **more)
        layers = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
        # Releases of transformers differ in whether they split features by picture.
        split = [list(layer.split(sizes) if torch.is_tensor(layer) else layer) for layer in layers]
        return [torch.cat(parts, dim=-1) for parts in zip(*split, strict=True)]
