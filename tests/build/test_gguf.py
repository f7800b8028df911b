"""GGUF files are converted exactly, and unsupported content is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("gguf", reason="the optional package gguf is not installed")

from transformers import AutoModelForCausalLM, AutoTokenizer

from agent_r1.build.models.gguf import SPLITTINGS, convert_gguf, tokenizer_of
from agent_r1.errors import ConfigError, DataError
from agent_r1.tokens.rendering import Renderer
from agent_r1.tokens.template_check import verify_template
from tests.chatml import TEMPLATE
from tests.tiny_gguf import CONTROL, MERGES, TOKENS, TYPES, Tiny


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def converted(tiny: Tiny, folder: Path) -> Path:
    directory = folder / "model"
    directory.mkdir()
    convert_gguf(tiny.write(folder / "tiny.gguf"), directory)
    return directory


def load(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(str(directory), dtype=torch.float32).eval()


def logits(network: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = network(input_ids=torch.arange(3, 63).reshape(2, 30)).logits
    return result


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_an_unquantised_file_computes_exactly_what_its_weights_do(
    architecture: str, tied: bool, tmp_path: Path
) -> None:
    tiny = Tiny(architecture=architecture, tied=tied)
    directory = converted(tiny, tmp_path)
    network = load(directory)
    torch.testing.assert_close(logits(network), logits(tiny.network()), rtol=0, atol=0)
    assert network.config.tie_word_embeddings is tied
    assert (network.get_output_embeddings().weight is network.get_input_embeddings().weight) is tied
    assert json.loads((directory / "config.json").read_text(encoding="utf-8"))["dtype"] == "float32"


def test_a_quantised_file_is_kept_in_bfloat16_and_computes_nearly_the_same(tmp_path: Path) -> None:
    tiny = Tiny(quantised=True)
    directory = converted(tiny, tmp_path)
    assert AutoModelForCausalLM.from_pretrained(str(directory)).dtype == torch.bfloat16
    ours, theirs = load(directory).state_dict(), tiny.network().state_dict()
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        # Q8_0 rounds to 1/127 of the largest of a block at most half a step off, bfloat16 to 2^-8 of the weight itself.
        bound = weight.abs().max() * (0.5 / 127 + 2**-8)
        assert (ours[name] - weight).abs().max() <= bound, name


def test_the_directory_has_the_files_tokenizer_and_what_other_readers_look_for(tmp_path: Path) -> None:
    directory = converted(Tiny(), tmp_path)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    assert config["torch_dtype"] == config["dtype"] == "float32"
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 5000.0
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert "quantization_config" not in config
    assert "_model_name_or_path" not in config
    words = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert words["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert words["model_max_length"] == 128
    assert words["model_input_names"] == ["input_ids", "attention_mask"]
    assert (directory / "chat_template.jinja").read_text(encoding="utf-8") == TEMPLATE
    generation = json.loads((directory / "generation_config.json").read_text(encoding="utf-8"))
    assert (generation["bos_token_id"], generation["eos_token_id"]) == (1, 2)

    tokenizer: Any = AutoTokenizer.from_pretrained(str(directory))
    assert tokenizer.convert_ids_to_tokens(list(range(len(TOKENS)))) == TOKENS
    assert len(tokenizer) == len(TOKENS)
    named = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token)
    assert named == ("<|im_start|>", "<|im_end|>", "<|im_end|>")
    special = {token.content: token.special for token in tokenizer.added_tokens_decoder.values()}
    assert special == {**dict.fromkeys(CONTROL, True), "<tool_call>": False}
    assert tokenizer.tokenize("<tool_call>hello<|im_end|>") == ["<tool_call>", "hello", "<|im_end|>"]
    assert verify_template(Renderer(tokenizer)).extends


def metadata(**changes: Any) -> dict[str, Any]:
    values = {"model": "gpt2", "pre": "smollm", "tokens": TOKENS, "token_type": TYPES, "merges": MERGES, **changes}
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["hello", "Ġ", "Ġ", "123", "4"]),  # blanks and digits: the last blank goes with the digits
        ("smollm", ["hello", "ĠĠ", "1", "2", "3", "4"]),  # digits one by one, before anything else is looked at
        ("qwen2", ["hello", "Ġ", "Ġ", "1", "2", "3", "4"]),  # digits one by one, no blank goes with them
        ("llama-bpe", ["hello", "Ġ", "Ġ", "123", "4"]),  # up to three digits
    ],
)
def test_text_is_split_as_the_file_says(pre: str, pieces: list[str]) -> None:
    assert tokenizer_of(metadata(pre=pre), Path("x.gguf")).tokenize("hello  1234") == pieces


@settings(max_examples=50, deadline=None)
@given(text=st.text(), pre=st.sampled_from(sorted(set(SPLITTINGS) - {"qwen2"})))
def test_any_text_round_trips(text: str, pre: str) -> None:
    tokenizer = tokenizer_of(metadata(pre=pre), Path("x.gguf"))  # qwen2 normalises, so that e + accent becomes one
    assert tokenizer.decode(tokenizer.encode(text)) == text


PIECES = {  # how Gemma's files list them: token, kind, score
    "<pad>": (3, -1000.0),
    "<eos>": (3, -1000.0),
    "<bos>": (3, -1000.0),
    "<unk>": (3, -1000.0),
    "  ": (4, -1000.0),
    **{f"<0x{byte:02X}>": (6, 0.0) for byte in range(256)},
    "▁t": (1, -1.0),
    "he": (1, -2.0),
    "▁the": (1, -3.0),
    "the": (1, -4.0),
    **{letter: (1, -5.0 - index) for index, letter in enumerate("▁aeht")},
}


def pieces(**changes: Any) -> Any:
    columns = {"tokens": [*PIECES], "token_type": [kind for kind, _ in PIECES.values()], "merges": None}
    scores = [score for _, score in PIECES.values()]
    names = {"bos_token_id": 2, "eos_token_id": 1, "unknown_token_id": 3, "add_bos_token": True}
    values = {**columns, "model": "llama", "pre": "default", "scores": scores, "add_space_prefix": False, **names}
    given = {key: value for key, value in metadata(**{**values, **changes}).items() if value is not None}
    return tokenizer_of(given, Path("x.gguf"))


def test_gemmas_pieces_merge_by_score_and_runs_of_blanks_first() -> None:
    tokenizer = pieces()
    # "▁t" before "he": "▁the" is made of both, by the third score
    assert tokenizer.tokenize("a the") == ["a", "▁the"]
    assert tokenizer.tokenize("the") == ["the"]  # no blank is put in front
    assert tokenizer.tokenize("a  the") == ["a", "▁▁", "the"]  # not a blank and "▁the"
    assert tokenizer.tokenize("é<eos>") == ["<0xC3>", "<0xA9>", "<eos>"]
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("a")) == ["<bos>", "a"]
    assert len(tokenizer) == len(PIECES)
    assert tokenizer.convert_tokens_to_ids("▁▁") == list(PIECES).index("  ")


@settings(max_examples=50, deadline=None)
@given(text=st.text(st.characters(codec="utf-8", exclude_characters="▁") | st.sampled_from("the a  ")))
def test_any_text_without_its_sign_for_a_blank_round_trips_through_gemmas_pieces(text: str) -> None:
    tokenizer = pieces()
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_other_sentencepiece_tokenizers_are_refused() -> None:
    for prefix in (True, None):  # Llama 2 puts a blank before the text
        with pytest.raises(DataError, match="tokenizer of kind 'llama'"):
            pieces(add_space_prefix=prefix)
    with pytest.raises(DataError, match=r"has no tokenizer\.ggml\.scores"):
        pieces(scores=None)


def test_a_file_with_a_bos_token_prepends_it() -> None:
    tokenizer = tokenizer_of(metadata(add_bos_token=True, bos_token_id=1), Path("x.gguf"))
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("hello")) == ["<|im_start|>", "hello"]
    assert tokenizer.encode("hello", add_special_tokens=False) == [TOKENS.index("hello")]


def test_a_file_without_a_template_makes_a_tokenizer_without_one(tmp_path: Path) -> None:
    directory = converted(Tiny(chat_template=False), tmp_path)
    assert AutoTokenizer.from_pretrained(str(directory)).chat_template is None
    assert not (directory / "chat_template.jinja").exists()


@pytest.mark.parametrize(
    ("tiny", "message"),
    [
        (Tiny(tokenizer="llama"), r"tokenizer of kind 'llama'"),
        (Tiny(pre="smolm"), r"tokenizer\.ggml\.pre='smolm'\. Did you mean 'smollm'\? Known are: gpt-2, llama-bpe"),
        (Tiny(without="merges"), r"has no tokenizer\.ggml\.merges"),
        (Tiny(rope_freqs=True), r"scales its positions"),
        (Tiny(without="blk.1.ffn_up.weight"), r"lacks 1 weights .* model\.layers\.1\.mlp\.up_proj\.weight"),
        (Tiny(architecture="unheard-of"), r"transformers cannot read the model in .*unheard-of"),
    ],
    ids=["sentencepiece", "unknown splitting", "no merges", "scaled positions", "a weight is missing", "architecture"],
)
def test_unsupported_conversions_are_refused(tiny: Tiny, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        converted(tiny, tmp_path)


@pytest.mark.parametrize("kept", [0, 3, 100, -500], ids=["empty", "no header", "no end of the header", "no end"])
def test_an_incomplete_file_is_an_error(kept: int, tmp_path: Path) -> None:
    whole = Tiny().write(tmp_path / "whole.gguf").read_bytes()
    (tmp_path / "part.gguf").write_bytes(whole[:kept])
    with pytest.raises(DataError, match=r"part\.gguf cannot be read as a GGUF file"):
        convert_gguf(tmp_path / "part.gguf", tmp_path)


def test_without_the_gguf_package_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"pip install 'agent-r1\[gguf\]'"):
        convert_gguf(tmp_path / "x.gguf", tmp_path)
