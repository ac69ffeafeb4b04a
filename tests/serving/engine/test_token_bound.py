"""A text has at least as many tokens as its bound says, with every kind of tokenizer, and the bound is worth having."""

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from serving.engine.token_bound import token_bound
from tests.fakes import byte_tokenizer_json

PROSE = (Path(__file__).parents[3] / "ARCHITECTURE.md").read_text()
WORDS = Regex(r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def byte_level(normalizer=None, added=()):
    """As GPT-2, Llama 3 and Qwen have it."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(WORDS, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    train(tokenizer, trainers.BpeTrainer(vocab_size=1500, initial_alphabet=alphabet, show_progress=False), added)
    return tokenizer


def sentence_pieces(trainer, model):
    """As Llama 2 and Gemma have it."""
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.ByteFallback()
    train(tokenizer, trainer, ())
    return tokenizer


def train(tokenizer, trainer, added):
    tokenizer.train_from_iterator(PROSE.splitlines(keepends=True), trainer)
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True), *added])


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def llama():
    trainer = trainers.BpeTrainer(vocab_size=1500, special_tokens=["<unk>", *BYTES], show_progress=False)
    model = models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    return sentence_pieces(trainer, model)


def unigram():
    trainer = trainers.UnigramTrainer(
        vocab_size=900, special_tokens=["<unk>", *BYTES], unk_token="<unk>", show_progress=False
    )
    tokenizer = sentence_pieces(trainer, models.Unigram())
    data = json.loads(tokenizer.to_str())
    data["model"]["byte_fallback"] = True
    return tokenizers.Tokenizer.from_str(json.dumps(data))


KINDS = {
    "bytes": lambda: tokenizers.Tokenizer.from_str(byte_tokenizer_json()),
    "byte level": byte_level,
    "NFC": lambda: byte_level(normalizers.NFC()),
    "NFKC": lambda: byte_level(normalizers.NFKC()),
    "strips": lambda: byte_level(added=[AddedToken("<|role|>", rstrip=True, lstrip=True)]),
    "llama": llama,
    "unigram": unigram,
}


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request):
    made = KINDS[request.param]()
    return made, token_bound(made.to_str())


def count(tokenizer, text):
    return len(tokenizer.encode(text, add_special_tokens=False).ids)


words = st.sampled_from(
    [
        *("the ", "request", "\n", "  ", "<|end|>", "<|role|>", "   ", "▁", "<0x0A>", "🙂", "é", "漢字", "\x00", "---"),
        *("e\u0301", "\u212b", "\u1fbe\u0308\u0301", "\U0001d400", "\U00011099\U000110ba"),  # forms of Unicode differ
    ]
)
texts = st.lists(words | st.text(max_size=5), max_size=30).map("".join)


@settings(max_examples=60, deadline=None)
@given(text=texts)
@example(text=" " * 3000 + "<|role|>" + " " * 3000)
@example(text="<|end|>" * 300)
@example(text=PROSE)
def test_it_is_never_more_than_there_are(tokenizer, text):
    made, bound = tokenizer
    assert bound.least(text) <= count(made, text)


def test_it_says_enough_to_refuse_long_prose(tokenizer):
    made, bound = tokenizer
    assert bound.least(PROSE) >= count(made, PROSE) / 6


def test_without_merges_it_is_exact():
    bound = token_bound(byte_tokenizer_json())
    assert bound.least("hé🙂" * 100) == 700


def test_a_byte_without_a_token_counts_nothing():
    """Trained on what never held it, a vocabulary may lack it: then the tokenizer drops it."""
    tokenizer_json = byte_tokenizer_json(0xC3)
    made = tokenizers.Tokenizer.from_str(tokenizer_json)
    assert token_bound(tokenizer_json).least("aéb") == count(made, "aéb") == 3


def changed(**parts):
    return json.dumps(json.loads(byte_tokenizer_json()) | parts)


@pytest.mark.parametrize(
    "text",
    [
        changed(normalizer={"type": "Strip", "strip_left": True, "strip_right": True}),
        changed(normalizer={"type": "Replace", "pattern": {"String": "aa"}, "content": "a"}),
        changed(normalizer={"type": "Sequence", "normalizers": [{"type": "StripAccents"}]}),
        changed(pre_tokenizer={"type": "Whitespace"}),
        changed(pre_tokenizer={"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}),
        changed(pre_tokenizer=None),
        changed(model={"type": "WordLevel", "vocab": {"<unk>": 0}, "unk_token": "<unk>"}),
        changed(normalizer={"type": "Lowercase"}),
    ],
)
def test_there_is_none_where_some_of_a_text_may_be_dropped(text):
    assert token_bound(text) is None
