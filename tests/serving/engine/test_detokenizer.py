"""The law: any ids, split in any way, give the text of the whole decoded at once by the `tokenizers` library."""

import itertools
import json

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from model.errors import UnsupportedModel
from serving.engine.detokenizer import new_vocabulary
from tests.model_files import TIED


def byte_level():
    """The golden tokenizer with an added token that is no byte-level word, and one that is special."""
    data = json.loads((TIED / "tokenizer.json").read_text())
    for token_id, content, special in [(320, "<tool call>", False), (321, "你", False), (322, "<|x|>", True)]:
        data["added_tokens"].append(data["added_tokens"][0] | {"id": token_id, "content": content, "special": special})
    return json.dumps(data)


WORDS = ["<unk>", "<s>", "▁Hello", "▁world", "ab", "▁", "▁▁", ",", "你", "▁a", "x▁y"]


def sentencepiece(*decoders):
    """Words with a mark for spaces, and 256 byte tokens."""
    tokens = [*WORDS, *(f"<0x{byte:02X}>" for byte in range(256))]
    model = tokenizers.models.BPE({t: i for i, t in enumerate(tokens)}, [], byte_fallback=True, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.add_special_tokens(["<unk>", "<s>"])
    data = json.loads(tokenizer.to_str())
    data["decoder"] = decoders[0] if len(decoders) == 1 else {"type": "Sequence", "decoders": list(decoders)}
    return json.dumps(data)


SPACES = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
LLAMA2 = sentencepiece(
    SPACES, {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}
)
GEMMA = sentencepiece(SPACES, {"type": "ByteFallback"}, {"type": "Fuse"})
METASPACE = sentencepiece({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True})
KINDS = {"byte_level": byte_level(), "llama2": LLAMA2, "gemma": GEMMA, "metaspace": METASPACE}
LOADED = {kind: tokenizers.Tokenizer.from_str(text) for kind, text in KINDS.items()}
VOCABULARIES = {kind: new_vocabulary(LOADED[kind], text) for kind, text in KINDS.items()}

# Bytes of cut and whole characters are likelier than chance would have them.
UTF8 = "é你😀".encode()


def _ids(kind):
    tokenizer = LOADED[kind]
    known = tokenizer.get_vocab_size()
    if kind == "byte_level":
        letters = [
            tokenizer.token_to_id(t) for byte in UTF8 for t in tokenizer.encode(bytes([byte]).decode("latin-1")).tokens
        ]
        letters += tokenizer.encode("é你😀", add_special_tokens=False).ids
    else:
        letters = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in UTF8]
    return st.lists(st.one_of(st.integers(0, known + 3), st.sampled_from(letters), st.integers(0, 12)), max_size=25)


def _decode_in_pieces(vocabulary, ids, cuts):
    detokenizer = vocabulary.detokenizer()
    edges = [0, *sorted(cut for cut in cuts if cut < len(ids)), len(ids)]
    texts = [detokenizer.push(ids[start:end]) for start, end in itertools.pairwise(edges)]
    return "".join(texts) + detokenizer.finish()


@pytest.mark.parametrize("kind", KINDS)
def test_pushes_join_to_the_whole(kind):
    @given(ids=_ids(kind), cuts=st.lists(st.integers(1, 24)))
    def law(ids, cuts):
        expected = LOADED[kind].decode(ids, skip_special_tokens=True)
        assert _decode_in_pieces(VOCABULARIES[kind], ids, cuts) == expected

    law()


def test_a_cut_character_is_held_back_until_it_is_whole():
    detokenizer = VOCABULARIES["byte_level"].detokenizer()
    ids = LOADED["byte_level"].encode("a😀", add_special_tokens=False).ids
    assert len(ids) > 2
    assert [detokenizer.push([token_id]) for token_id in ids] == ["a", *[""] * (len(ids) - 2), "😀"]
    assert detokenizer.finish() == ""


def test_a_character_that_stays_cut_is_replaced_at_the_end():
    detokenizer = VOCABULARIES["byte_level"].detokenizer()
    assert detokenizer.push(LOADED["byte_level"].encode("😀", add_special_tokens=False).ids[:-1]) == ""
    assert detokenizer.finish() == "\ufffd"


def test_special_and_unknown_tokens_have_no_text():
    detokenizer = VOCABULARIES["byte_level"].detokenizer()
    assert detokenizer.push([0, 322, 9999, 320]) == "<tool call>"


def test_words_keep_their_spaces_but_for_the_first():
    detokenizer = VOCABULARIES["llama2"].detokenizer()
    hello, world = WORDS.index("▁Hello"), WORDS.index("▁world")
    assert [detokenizer.push([hello]), detokenizer.push([world])] == ["Hello", " world"]


def test_decoders_that_look_around_are_refused():
    for decoder in ({"type": "WordPiece", "prefix": "##", "cleanup": True}, None):
        data = json.loads(KINDS["byte_level"]) | {"decoder": decoder}
        text = json.dumps(data)
        with pytest.raises(UnsupportedModel, match="is not supported"):
            new_vocabulary(tokenizers.Tokenizer.from_str(text), text)


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_tokens_join_to_the_bytes_of_the_text(kind):
    text = "caf\u00e9 😀 world"
    ids = LOADED[kind].encode(text, add_special_tokens=False).ids
    joined = b"".join(VOCABULARIES[kind].token_bytes(token_id) for token_id in ids)
    assert joined.decode().removeprefix(" ") == LOADED[kind].decode(ids)


def test_bytes_of_special_and_unknown_tokens():
    assert VOCABULARIES["byte_level"].token_bytes(0) == LOADED["byte_level"].id_to_token(0).encode()
    assert VOCABULARIES["byte_level"].token_bytes(9999) == b""


@pytest.mark.parametrize("name", VOCABULARIES)
def test_special_tokens_are_shown_by_name_if_asked_for(name):
    vocabulary = VOCABULARIES[name]
    token_id, text = next(iter(vocabulary._special.items()))
    assert vocabulary.detokenizer().push([token_id]) == ""
    shown = vocabulary.detokenizer([text, "unknown"])
    assert shown.push([token_id]) + shown.finish() == text
