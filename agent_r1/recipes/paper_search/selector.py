"""The selector: how well a paper fits the question, between 0 and 1. The process reward adds up its scores.

`lexical` needs nothing but the corpus. `embedding` and `cross_encoder` are Hugging Face models, loaded when the run
starts; papers that episodes find at the same time are scored in one batch. The policy sees the scores, so they must not
depend on the gold papers.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from agent_r1.batching import Batcher
from agent_r1.errors import ConfigError, did_you_mean
from agent_r1.guard import call
from agent_r1.recipes.paper_search.papers import Paper, PaperSource
from agent_r1.resources import Resource
from agent_r1.tools.search.lexical import STOP_WORDS, Words

MAX_BATCH = 64  # papers per forward pass
MAX_KNOWN = 100_000  # scores that are kept: the attempts of a group find the same papers
MAX_CHARS = 2000  # characters of a paper's text that a model reads
TITLE_SHARE = 0.35  # weight of a stem's presence in the title, in the lexical score

# Words that ask for papers and say nothing about their subject.
_REQUEST = (
    "about academic advance advanced advancement advancements aim aimed analysis analyze answer any approach "
    "approaches are article articles based been best can cite comprehensive could current cutting detail did discuss "
    "discussed do does done edge effective examples example exist explain explore explored explores find first focus "
    "focused focuses from give had has have help how i including intend into introduce introduced introduces "
    "investigate investigated investigates journal journals know latest like list literature looking made make many "
    "me mention mentioned method methods multiple my need novel one our paper papers particularly past perspective "
    "perspectives please point present presented presents previous problem problems propose proposed proposes provide "
    "provided provides publication publications published recent reference references relate related report research "
    "researches researchers resources review search show some specific specifically specify studied studies study "
    "studying suggest suggestions summarize support survey tackle talk tell top topic toward towards try type use "
    "used uses using utilize various want was we were what when where which while who work works would years you your"
)
REQUEST = frozenset(_REQUEST.split())


class Selector(Resource):
    @abstractmethod
    async def scores(self, question: str, papers: Sequence[Paper]) -> list[float]:
        """Return one score between 0 and 1 for each paper."""


class LexicalSelector(Selector):
    """The share of the question's stems found in the paper, weighted by rarity; stems in the title count extra.

    coverage = 0.65 * share in title and abstract + 0.35 * share in the title (without an abstract: the latter)
    score = coverage squared
    """

    def __init__(self, weights: Callable[[Sequence[str]], list[float] | None]) -> None:
        self._weights, self._words = weights, Words(stem=True)

    async def scores(self, question: str, papers: Sequence[Paper]) -> list[float]:
        return self.rate(question, papers)

    def rate(self, question: str, papers: Sequence[Paper]) -> list[float]:
        stems = list(dict.fromkeys(self._words(" ".join(subject_words(question)))))
        weights = self._weights(stems) or [1.0] * len(stems)
        return [self._score(stems, weights, paper) for paper in papers]

    def _score(self, stems: Sequence[str], weights: Sequence[float], paper: Paper) -> float:
        total = sum(weights)
        if not total:
            return 0.0
        title = set(self._words(paper.title))
        text = title | set(self._words(paper.abstract))
        in_title, in_text = (
            sum(weight for stem, weight in zip(stems, weights, strict=True) if stem in where) / total
            for where in (title, text)
        )
        coverage = (1 - TITLE_SHARE) * in_text + TITLE_SHARE * in_title if paper.abstract else in_title
        return coverage * coverage


def subject_words(question: str) -> list[str]:
    """Return the words of a question that say what it is about, in order."""
    words = (word.strip('.,;:?!()"“”') for word in question.replace("-", " ").split())
    return [word for word in words if word and word.lower() not in REQUEST and word.lower() not in STOP_WORDS]


class ModelSelector(Selector):
    """A model that scores (question, text) pairs in batches, in a thread. Loaded by `open`."""

    def __init__(self, load: Callable[[], Callable[[list[tuple[str, str]]], list[float]]]) -> None:
        self._load = load
        self._model: Callable[[list[tuple[str, str]]], list[float]] | None = None
        self._batcher: Batcher[tuple[str, str], float] | None = None
        self._known: dict[tuple[str, str], float] = {}

    async def open(self) -> None:
        if self._model is None:
            self._model = await asyncio.to_thread(self._load)
        self._batcher = Batcher(self._score, max_items=MAX_BATCH, max_concurrent=1)

    async def close(self) -> None:
        if self._batcher is not None:
            self._batcher.close()
            self._batcher = None

    async def scores(self, question: str, papers: Sequence[Paper]) -> list[float]:
        if self._batcher is None:
            raise RuntimeError("the selector was not opened")
        pairs = [(question, f"{paper.title}\n{paper.abstract}"[:MAX_CHARS]) for paper in papers]
        new = [pair for pair in dict.fromkeys(pairs) if pair not in self._known]
        scored = dict(zip(new, await asyncio.gather(*map(self._batcher.submit, new)), strict=True))
        found = [scored[pair] if pair in scored else self._known[pair] for pair in pairs]
        if len(self._known) + len(scored) > MAX_KNOWN:
            self._known.clear()
        self._known |= scored
        return found

    async def _score(self, pairs: list[tuple[str, str]]) -> Sequence[float]:
        assert self._model is not None
        scores: list[float] = await call(self._model, pairs)
        return scores


def make_selector(kind: str, source: PaperSource, model: str | None = None, **settings: Any) -> Selector:
    """`model` is a Hugging Face directory or hub id, for the kinds that are models."""
    kinds = ("lexical", "embedding", "cross_encoder")
    if kind not in kinds:
        raise ConfigError(f"unknown selector {kind!r}.{did_you_mean(kind, kinds)}")
    if (model is not None) != (kind != "lexical"):
        raise ConfigError(f"selector={kind!r} with selector_model={model!r}: embedding and cross_encoder need a model")
    if kind == "lexical":
        return LexicalSelector(source.weights)
    load = _load_embedding if kind == "embedding" else _load_cross_encoder
    return ModelSelector(lambda: load(str(model), **settings))


def _load_embedding(model: str) -> Callable[[list[tuple[str, str]]], list[float]]:
    """The cosine of question and paper, cut to 0 to 1."""
    from agent_r1.tools.search.dense import Encoder, EncoderSettings

    encoder = Encoder(EncoderSettings(model=model, pooling="mean"))

    def score(pairs: list[tuple[str, str]]) -> list[float]:
        questions, texts = encoder.queries([pair[0] for pair in pairs]), encoder.passages([pair[1] for pair in pairs])
        cosines: list[float] = (questions * texts).sum(axis=1).clip(0, 1).tolist()
        return cosines

    return score


def _load_cross_encoder(model: str) -> Callable[[list[tuple[str, str]]], list[float]]:
    """The sigmoid of a model's only output, or one minus the probability of its first label (as published)."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
        network = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot load the cross-encoder {model!r}: {error}") from error
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network = network.to(device).eval()
    limit = min(512, getattr(network.config, "max_position_embeddings", 512))

    def score(pairs: list[tuple[str, str]]) -> list[float]:
        questions, texts = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        encoded = tokenizer(
            questions, texts, padding=True, truncation="only_second", max_length=limit, return_tensors="pt"
        )
        with torch.inference_mode():
            logits = network(**encoded.to(device)).logits.float()
        chosen = logits[:, 0].sigmoid() if logits.shape[1] == 1 else 1 - logits.softmax(dim=1)[:, 0]
        scores: list[float] = chosen.cpu().tolist()
        return scores

    return score
