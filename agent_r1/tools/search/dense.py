"""Dense ranking: unit vectors of a small transformer encoder, compared by inner product.

The vectors are one memory-mapped array. `flat` compares a query with all of them, on a GPU if there is one; `ivf`
searches only the nearest cells of an inverted file (faiss): approximate, but far faster on a CPU. Encoders are Hugging
Face directories or hub ids; pooling and query prefix are stored with the index. The last bits of a query's scores may
depend on the other queries in its batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from agent_r1.errors import ConfigError, DataError, did_you_mean, import_extra
from agent_r1.tools.search.corpus import Passage, Report, track
from agent_r1.tools.search.lexical import Ranking

if TYPE_CHECKING:
    import torch

Vectors = NDArray[np.float32]

PROBE = "The river that flows past the town is crossed by two bridges."  # the vector of this text identifies an encoder
PROBE_COSINE = 0.99  # number formats and devices change vectors less, other weights far more
BGE_QUERY = "Represent this sentence for searching relevant passages: "
BLOCK_ROWS = 65_536  # vectors compared at once on a CPU
CELLS_READ = 1 / 32  # share of the cells that an `ivf` search reads
MIN_PER_CELL = 39  # vectors faiss wants per cell to place its centre well


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSettings:
    model: str  # a Hugging Face directory or hub id
    pooling: Literal["mean", "cls"]
    query_prefix: str = ""
    max_tokens: int = 256


ENCODERS = {
    "minilm": EncoderSettings(model="sentence-transformers/all-MiniLM-L6-v2", pooling="mean"),
    "bge-small": EncoderSettings(model="BAAI/bge-small-en-v1.5", pooling="cls", query_prefix=BGE_QUERY),
    "bge-base": EncoderSettings(model="BAAI/bge-base-en-v1.5", pooling="cls", query_prefix=BGE_QUERY),
    "bge-large": EncoderSettings(model="BAAI/bge-large-en-v1.5", pooling="cls", query_prefix=BGE_QUERY),
}


def encoder_settings(name: str | None, path: str | None = None) -> EncoderSettings:
    """Return a named encoder, `minilm` for None, with the weights of `path` if there are any."""
    name = name or "minilm"
    if name not in ENCODERS:
        raise ConfigError(f"unknown encoder {name!r}.{did_you_mean(name, ENCODERS)}")
    return replace(ENCODERS[name], model=path or ENCODERS[name].model)


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSettings:
    """How a dense index is built: the encoder and the kind of index."""

    encoder: EncoderSettings = field(default_factory=lambda: encoder_settings(None))
    method: Literal["flat", "ivf"] = "flat"
    batch_size: int = 64  # passages encoded at once

    @classmethod
    def named(cls, encoder: str | None, path: str | None) -> DenseSettings | None:
        """Settings for the options of a command; None if neither is given."""
        return cls(encoder=encoder_settings(encoder, path)) if encoder or path else None


class Encoder:
    """Turns texts into unit vectors."""

    def __init__(self, settings: EncoderSettings) -> None:
        import torch
        from transformers import AutoModel, AutoTokenizer

        self.settings = settings
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(settings.model)
            network = AutoModel.from_pretrained(settings.model, dtype=torch.float32)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"cannot load the encoder {settings.model!r}: {error}. Give a Hugging Face directory with its weights"
            ) from error
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._network = network.to(self._device).eval()
        limit = getattr(network.config, "max_position_embeddings", settings.max_tokens)
        self._max_tokens = min(settings.max_tokens, limit)

    def queries(self, texts: Sequence[str]) -> Vectors:
        return self.passages([self.settings.query_prefix + text for text in texts])

    def passages(self, texts: Sequence[str]) -> Vectors:
        import torch

        encoded = self._tokenizer(
            list(texts), padding=True, truncation=True, max_length=self._max_tokens, return_tensors="pt"
        ).to(self._device)
        bfloat16 = torch.autocast("cuda", torch.bfloat16, enabled=self._device.type == "cuda")
        with torch.inference_mode(), bfloat16:
            states = self._network(**encoded).last_hidden_state
        pooled = self._pool(states.float(), encoded["attention_mask"].unsqueeze(-1).float())
        vectors: Vectors = torch.nn.functional.normalize(pooled, dim=-1).cpu().numpy()
        return vectors

    def _pool(self, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if self.settings.pooling == "cls":
            return states[:, 0]
        return (states * mask).sum(dim=1) / mask.sum(dim=1)


class DenseRanker:
    """The vectors of one corpus and the encoder that computed them."""

    def __init__(self, directory: Path, settings: DenseSettings) -> None:
        self._vectors: Vectors = np.load(directory / "vectors.npy", mmap_mode="r")
        self._encoder = Encoder(settings.encoder)
        self._check_encoder(np.load(directory / "probe.npy"), directory)
        self._cells = _import_faiss().read_index(str(directory / "cells.faiss")) if settings.method == "ivf" else None
        self._on_gpu: torch.Tensor | None = None

    @staticmethod
    def build(
        passages: Iterable[Passage], total: int, directory: Path, settings: DenseSettings, report: Report | None
    ) -> None:
        if settings.method == "ivf":
            _import_faiss()  # fails before hours of encoding, not after
        encoder = Encoder(settings.encoder)
        directory.mkdir(parents=True)
        probe = encoder.passages([PROBE])
        np.save(directory / "probe.npy", probe)
        vectors = np.lib.format.open_memmap(
            directory / "vectors.npy", mode="w+", dtype=np.float32, shape=(total, probe.shape[1])
        )
        texts = (f"{passage.title}\n{passage.text}" for passage in track(passages, "dense: encoding", report, total))
        for start in range(0, total, settings.batch_size):
            batch = list(islice(texts, settings.batch_size))
            vectors[start : start + len(batch)] = encoder.passages(batch)
        vectors.flush()
        if settings.method == "ivf":
            if report is not None:
                report("dense: sorting into cells")
            _build_cells(vectors, directory / "cells.faiss")

    def rank(self, queries: Sequence[str], top_k: int) -> list[Ranking]:
        if not queries:
            return []
        encoded, top_k = self._encoder.queries(queries), min(top_k, len(self._vectors))
        if self._cells is not None:
            scores, places = self._cells.search(encoded, top_k)
        else:
            scores, places = self._compare(encoded, top_k)
        # faiss returns -1 if the cells it read hold too few passages
        found = zip(places.tolist(), scores.tolist(), strict=True)
        return [[(p, s) for p, s in zip(*pair, strict=True) if p >= 0] for pair in found]

    def _compare(self, encoded: Vectors, top_k: int) -> tuple[NDArray[Any], NDArray[Any]]:
        import torch

        if torch.cuda.is_available():
            if self._on_gpu is None:
                self._on_gpu = torch.from_numpy(np.asarray(self._vectors)).cuda()
            found = (torch.from_numpy(encoded).cuda() @ self._on_gpu.T).topk(top_k, dim=1)
            return found.values.cpu().numpy(), found.indices.cpu().numpy()
        scores = np.empty((len(encoded), 0), dtype=np.float32)
        places = np.empty((len(encoded), 0), dtype=np.int64)
        for start in range(0, len(self._vectors), BLOCK_ROWS):
            block = encoded @ self._vectors[start : start + BLOCK_ROWS].T
            here = np.argpartition(-block, min(top_k, block.shape[1]) - 1, axis=1)[:, :top_k]
            scores = np.concatenate([scores, np.take_along_axis(block, here, axis=1)], axis=1)
            places = np.concatenate([places, here + start], axis=1)
        order = np.lexsort((places, -scores), axis=1)[:, :top_k]
        return np.take_along_axis(scores, order, axis=1), np.take_along_axis(places, order, axis=1)

    def _check_encoder(self, probe: Vectors, directory: Path) -> None:
        now = self._encoder.passages([PROBE])
        if now.shape != probe.shape or float((now * probe).sum()) < PROBE_COSINE:
            raise DataError(
                f"{directory} was built with other weights than {self._encoder.settings.model!r} has: build it again"
            )


def _build_cells(vectors: Vectors, path: Path) -> None:
    faiss = _import_faiss()
    cells = max(1, min(int(4 * sqrt(len(vectors))), len(vectors) // MIN_PER_CELL))
    index = faiss.index_factory(vectors.shape[1], f"IVF{cells},SQ8", faiss.METRIC_INNER_PRODUCT)
    index.train(np.asarray(vectors))
    index.add(np.asarray(vectors))
    index.nprobe = max(1, round(cells * CELLS_READ))
    faiss.write_index(index, str(path))


def _import_faiss() -> Any:
    return import_extra("faiss", "method=ivf", "dense", "set method=flat")
