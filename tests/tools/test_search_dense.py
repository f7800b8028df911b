"""Dense and hybrid search with a tiny random encoder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from agent_r1.errors import ConfigError, DataError
from agent_r1.tools.search.dense import DenseSettings, Encoder, EncoderSettings
from agent_r1.tools.search.index import Index
from agent_r1.tools.search.lexical import LexicalSettings
from tests.tools.small_search import TEXTS, passages, titles


def make_encoder(directory: Path, seed: int) -> Path:
    words = sorted({word for text in TEXTS.values() for word in text.lower().replace(".", " ").split()})
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", *words, *map(str.lower, TEXTS)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(directory)
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=max(vocabulary.values()) + 1, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=64,
    )  # fmt: skip
    BertModel(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> EncoderSettings:
    torch.set_num_threads(1)
    folder = make_encoder(tmp_path_factory.mktemp("encoder"), seed=0)
    return EncoderSettings(model=str(folder), pooling="mean")


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory, encoder: EncoderSettings) -> Index:
    place = tmp_path_factory.mktemp("search") / "index"
    return Index.build(passages(), place, lexical=LexicalSettings(), dense=DenseSettings(encoder=encoder, batch_size=2))


def test_a_passage_is_nearest_to_its_own_text(index: Index) -> None:
    assert index.manifest.kinds == ["lexical", "dense", "hybrid"]
    found = index.search([f"{title}\n{text}" for title, text in TEXTS.items()], 2, "dense")
    assert [titles(hits)[0] for hits in found] == list(TEXTS)
    assert all(hits[0].score == pytest.approx(1.0, abs=1e-4) for hits in found)  # unit vectors, the same text


def test_a_dense_batch_finds_the_same_as_single_queries(index: Index) -> None:
    assert index.search([], 7, "dense") == []
    assert len(index.search(["moon"], 7, "dense")[0]) == 5  # there are no more
    queries = ["fish in the river", "moon", "the baker buys flour at the mill"]
    for together, query in zip(index.search(queries, 5, "dense"), queries, strict=True):
        [alone] = index.search([query], 5, "dense")
        assert titles(together) == titles(alone)
        assert [hit.score for hit in together] == pytest.approx([hit.score for hit in alone], abs=1e-5)


def test_hybrid_search_is_the_fusion_of_both(index: Index) -> None:
    [found] = index.search(["otter"], 5)  # hybrid is the default
    # the lexical ranking holds Otter alone, first: 1/61; the dense one holds all five
    [dense] = index.search(["otter"], 5, "dense")
    rank = titles(dense).index("Otter") + 1
    score = next(hit.score for hit in found if hit.passage.title == "Otter")
    assert score == pytest.approx(1 / 61 + 1 / (60 + rank))
    assert len(found) == 5


def test_an_encoder_applies_its_pooling_and_query_prefix(encoder: EncoderSettings) -> None:
    mean, first = Encoder(encoder), Encoder(replace(encoder, pooling="cls"))
    text = ["otter fish"]
    assert not np.allclose(mean.passages(text), first.passages(text))
    prefixed = Encoder(replace(encoder, query_prefix="moon "))
    np.testing.assert_allclose(prefixed.queries(text), mean.passages(["moon otter fish"]), atol=1e-6)
    np.testing.assert_allclose(prefixed.passages(text), mean.passages(text), atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(mean.passages(text), axis=1), 1.0, atol=1e-6)


def test_an_index_built_with_other_weights_is_refused(tmp_path: Path, encoder: EncoderSettings, index: Index) -> None:
    other = make_encoder(tmp_path / "other", seed=1)
    copy = Index.build(passages(), tmp_path / "i", dense=DenseSettings(encoder=encoder))
    manifest = copy.directory / "manifest.json"
    stored = json.loads(manifest.read_text(encoding="utf-8"))
    stored["dense"]["encoder"]["model"] = str(other)
    manifest.write_text(json.dumps(stored), encoding="utf-8")
    with pytest.raises(DataError, match="other weights"):
        Index.open(copy.directory).search(["moon"], 1)


def test_missing_weights_leave_no_index(tmp_path: Path) -> None:
    missing = EncoderSettings(model=str(tmp_path / "nothing"), pooling="cls")
    with pytest.raises(ConfigError, match=r"nothing.*Hugging Face directory"):
        Index.build(passages(), tmp_path / "i", dense=DenseSettings(encoder=missing))
    assert not (tmp_path / "i").exists()


def test_ivf_finds_the_same_as_flat_with_one_cell(tmp_path: Path, encoder: EncoderSettings) -> None:
    pytest.importorskip("faiss")
    # 5 passages make one cell, so nothing is missed; storing vectors in bytes changes scores a little
    flat = Index.build(passages(), tmp_path / "flat", dense=DenseSettings(encoder=encoder))
    cells = Index.build(passages(), tmp_path / "cells", dense=DenseSettings(encoder=encoder, method="ivf"))
    [exact], [near] = flat.search(["fish frogs"], 5), cells.search(["fish frogs"], 5)
    assert {hit.passage.title: hit.score for hit in near} == {
        hit.passage.title: pytest.approx(hit.score, abs=0.02) for hit in exact
    }
