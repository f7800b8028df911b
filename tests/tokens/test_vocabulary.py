"""The texts of tokens spell what the tokenizer decodes, byte for byte."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.decoders import ByteFallback, Fuse, Replace
from tokenizers.decoders import Sequence as DecoderSequence
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from agent_r1.tokens.vocabulary import token_texts
from tests.chatml import tokenizer

TEXTS = token_texts(tokenizer())


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_a_byte_level_vocabulary_spells_any_text(text: str) -> None:
    spelled = "".join(TEXTS[token] for token in tokenizer().encode(text))
    assert spelled.encode("utf-8", "surrogateescape") == text.encode()


def test_a_vocabulary_with_byte_fallback_spells_words_and_bytes() -> None:
    vocabulary = {"▁Hi": 0, "!": 1, **{f"<0x{byte:02X}>": 2 + byte for byte in range(256)}}
    backend = Tokenizer(BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    backend.decoder = DecoderSequence([Replace("▁", " "), ByteFallback(), Fuse()])
    texts = token_texts(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>"))
    ids = [0, 1, *(2 + byte for byte in "ß".encode())]
    assert "".join(texts[token] for token in ids).encode("utf-8", "surrogateescape").decode() == " Hi!ß"
    assert backend.decode(ids) == " Hi!ß"
