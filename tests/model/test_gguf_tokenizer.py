"""The rules by which text is cut before merging; whole tokenizers are compared with transformers in the e2e tests."""

import json
from pathlib import Path

import pytest
import tokenizers

from model.errors import CheckpointError
from model.gguf_tokenizer import RULES, read_text_assets
from serving.engine.tokenizer import Tokenizer


def _fields(pre, tokens=(), merges=("a b",), **changes):
    """A vocabulary of single bytes, then `tokens`."""
    letters = [*tokenizers.pre_tokenizers.ByteLevel.alphabet(), "ab", *tokens]
    fields = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": letters,
        "tokenizer.ggml.token_type": [1] * len(letters), "tokenizer.ggml.merges": list(merges),
    }  # fmt: skip
    return fields | {key.replace("__", "."): value for key, value in changes.items()}


def _pieces(pre, text):
    """How the rule cuts `text`, as text again."""
    tokenizer = tokenizers.Tokenizer.from_str(read_text_assets(Path("m.gguf"), _fields(pre)).tokenizer_json)
    return [text[start:end] for _, (start, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "it's 1234 x", ["it", "'s", " 1234", " x"]),
        ("default", "a  b", ["a", " ", " b"]),
        ("smollm", "ab 1234", ["ab", " ", "1", "2", "3", "4"]),
        ("smollm", "½²①", ["½", "²", "①"]),
        ("llama-bpe", "Ab'S 12345\n\n x", ["Ab", "'S", " ", "123", "45", "\n\n", " x"]),
        ("llama-bpe", "a,b!?\r\n", ["a", ",b", "!?\r\n"]),
        ("qwen2", "n 123", ["n", " ", "1", "2", "3"]),
    ],
)
def test_rules_cut_text(pre, text, pieces):
    assert _pieces(pre, text) == pieces


def _sentencepiece(**changes):
    """Scores say that `ab` is made before `bc`, and that longer pieces come last."""
    pieces = ["<unk>", "<s>", "▁", "a", "b", "c", "ab", "bc", "abc", "▁a", "<turn>"]
    tokens = [*pieces, *(f"<0x{byte:02X}>" for byte in range(256))]
    scores = [0.0] * 6 + [-1.0, -2.0, -3.0, -4.0] + [0.0] * 257
    types = [2, 3, 1, 1, 1, 1, 1, 1, 1, 1, 3] + [6] * 256
    fields = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": scores,
              "tokenizer.ggml.token_type": types, "tokenizer.ggml.add_space_prefix": False}  # fmt: skip
    return read_text_assets(Path("m.gguf"), fields | {key.replace("__", "."): value for key, value in changes.items()})


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("bc", ["bc"]),
        ("abc", ["abc"]),
        ("abbc", ["ab", "bc"]),
        (" a", ["▁a"]),
        ("a<turn>é", ["a", "<turn>", "<0xC3>", "<0xA9>"]),
    ],
)
def test_sentencepiece_merges_the_best_score_first(text, pieces):
    tokenizer = tokenizers.Tokenizer.from_str(_sentencepiece().tokenizer_json)
    assert tokenizer.encode(text).tokens == pieces
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_sentencepiece_puts_a_space_in_front_unless_told_not_to():
    text = _sentencepiece(tokenizer__ggml__add_space_prefix=True)
    tokenizer = tokenizers.Tokenizer.from_str(text.tokenizer_json)
    assert tokenizer.encode("a").tokens == ["▁a"] and tokenizer.decode(tokenizer.encode("a b").ids) == "a b"
    assert text.add_bos, "unless the file says otherwise"


def test_sentencepiece_needs_its_scores():
    with pytest.raises(CheckpointError, match=r"lacks tokenizer\.ggml\.scores for its 267 tokens"):
        _sentencepiece(tokenizer__ggml__scores=[1.0])


def test_every_rule_decodes_what_it_encodes():
    text = "Grüße 123\n\n  你好 it's\tok 😀"
    for pre in RULES:
        tokenizer = Tokenizer(read_text_assets(Path("m.gguf"), _fields(pre)))
        detokenizer = tokenizer.detokenizer()
        assert detokenizer.push(tokenizer.encode(text)) + detokenizer.finish() == text, pre


def test_bos_rule_follows_the_file_then_the_family():
    assert read_text_assets(Path("m"), _fields("llama-bpe")).add_bos
    assert not read_text_assets(Path("m"), _fields("llama-bpe", tokenizer__ggml__add_bos_token=False)).add_bos
    assert not read_text_assets(Path("m"), _fields("smollm")).add_bos


def test_control_tokens_are_special_and_user_tokens_are_text():
    tokens = ("<s>", "<think>")
    fields = _fields("gpt-2", tokens)
    fields["tokenizer.ggml.token_type"][-2:] = [3, 4]
    text = read_text_assets(Path("m"), fields)
    added = json.loads(text.tokenizer_json)["added_tokens"]
    assert [(token["content"], token["special"]) for token in added] == [("<s>", True), ("<think>", False)]
    tokenizer = Tokenizer(text)
    ids = tokenizer.encode("<s><think>ab")
    assert len(ids) == 3
    assert tokenizer.detokenizer().push(ids) == "<think>ab"


def test_templates_and_the_tokens_that_they_use_are_read():
    fields = _fields("gpt-2", ("<s>", "<pad>", "<unk>"))
    last = len(fields["tokenizer.ggml.tokens"]) - 1
    fields |= {
        "tokenizer.ggml.bos_token_id": last - 2, "tokenizer.ggml.padding_token_id": last - 1,
        "tokenizer.ggml.unknown_token_id": last, "tokenizer.chat_template": "plain",
        "tokenizer.chat_template.tool_use": "tools",
    }  # fmt: skip
    text = read_text_assets(Path("m"), fields)
    assert text.named_tokens == {"bos_token": "<s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    assert (text.chat_template, text.tool_template) == ("plain", "tools")
