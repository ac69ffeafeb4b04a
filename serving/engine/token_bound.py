"""TokenBound: how many tokens a text has at least, from its bytes alone. A thousand times quicker than making them.

A token covers some bytes of the text. Let L(b) be the length of the longest token that holds the byte b, and give each
byte of the text the weight 1 / L(b): the bytes of one token have 1 together at most, so the tokens are at least as many
as the weights of all bytes. Only for tokenizers that surely put each byte of a text, but for those of weight 0, into a
token.
"""

import math
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

UNICODE_FORMS = frozenset({"NFC", "NFD", "NFKC", "NFKD"})
KEEPS_ALL = frozenset({"ByteLevel", "Metaspace", "Digits", "UnicodeScripts"})
"""Ways to split a text that drop nothing of it; others may."""
SPACE_MARK = "▁"
BEYOND_16_BITS = re.compile("[\U00010000-\U0010ffff]")


@dataclass(frozen=True, slots=True)
class TokenBound:
    weights: NDArray[np.float64]
    """[256], of each byte."""
    forms: frozenset[str]
    """Of Unicode, that the tokenizer brings texts into."""
    marks_spaces: bool
    """To its vocabulary a space and the mark for it are the same."""
    strips: bool
    """Some tokens take any number of blanks around them."""

    def least(self, text: str) -> int:
        """The text has so many tokens or more."""
        if self.strips:
            text = "".join(text.split())
        if self.forms and not text.isascii():
            # Characters up there are left out, since versions of Unicode differ in them; 0 where the rest would change.
            text = BEYOND_16_BITS.sub("", text)
            if not all(unicodedata.is_normalized(form, text) for form in self.forms):  # type: ignore[arg-type]
                return 0
        if self.marks_spaces:
            text = text.replace(SPACE_MARK, " ")
        counts = np.bincount(np.frombuffer(text.encode(errors="replace"), np.uint8), minlength=256)
        return math.ceil(float(counts @ self.weights) * (1 - 1e-9))


def token_bound(tokenizer_json: str) -> TokenBound | None:
    """None for a tokenizer that may drop some of a text, or make one unknown token of much of it."""
    parts: dict[str, Any] = orjson.loads(tokenizer_json)
    splits, changes = list(_flat(parts.get("pre_tokenizer"))), list(_flat(parts.get("normalizer")))
    if not all(map(_keeps_all, splits)) or not all(map(_is_known, changes)):
        return None
    byte_level = any(split["type"] == "ByteLevel" for split in splits)
    pieces = _pieces(parts["model"], byte_level=byte_level)
    if pieces is None:
        return None
    forms = frozenset(change["type"] for change in changes) & UNICODE_FORMS
    added = parts.get("added_tokens") or []
    for token in added:
        written = [token["content"], *(unicodedata.normalize(form, token["content"]) for form in forms)]
        pieces += [text.replace(SPACE_MARK, " ").encode() for text in written]
    strips = any(token.get("lstrip") or token.get("rstrip") for token in added)
    return TokenBound(_weights(pieces), forms, not byte_level, strips)


def _flat(part: dict[str, Any] | None) -> Iterable[dict[str, Any]]:
    if part is None:
        return
    if part["type"] == "Sequence":
        for inner in part.get("normalizers") or part.get("pretokenizers") or []:
            yield from _flat(inner)
    else:
        yield part


def _keeps_all(split: dict[str, Any]) -> bool:
    if split["type"] in ("Split", "Punctuation"):
        return bool(split.get("behavior") != "Removed")
    return split["type"] in KEEPS_ALL


def _is_known(change: dict[str, Any]) -> bool:
    if change["type"] == "Replace":
        return change["pattern"] == {"String": " "} and change["content"] == SPACE_MARK
    return change["type"] == "Prepend" or change["type"] in UNICODE_FORMS


def _pieces(model: dict[str, Any], *, byte_level: bool) -> list[bytes] | None:
    """What the tokens of the vocabulary stand for; None where much of a text may become one unknown token."""
    kind, vocabulary = model.get("type") or "BPE", model["vocab"]
    tokens = list(vocabulary) if kind == "BPE" else [token for token, _ in vocabulary] if kind == "Unigram" else []
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return None
    if byte_level:
        if kind != "BPE":
            return None
        letters = {chr(letter): chr(byte) for letter, byte in _byte_letters().items()}
        table = str.maketrans(letters)
        written = [token for token in tokens if letters.keys() >= set(token)]  # no text becomes any of the others
        return [token.translate(table).encode("latin-1") for token in written]
    fallbacks = {f"<0x{byte:02X}>" for byte in range(256)}
    if not (model.get("byte_fallback") and fallbacks <= set(tokens)):
        return None
    return [bytes([byte]) for byte in range(256)] + [token.replace(SPACE_MARK, " ").encode() for token in tokens]


def _byte_letters() -> dict[int, int]:
    """The letters by which byte-level vocabularies write bytes, to these: printable ones are their own."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {256 + i: byte for i, byte in enumerate(others)}


def _weights(pieces: Iterable[bytes]) -> NDArray[np.float64]:
    """0 for a byte that has no token of its own: it may be dropped."""
    by_length: defaultdict[int, list[bytes]] = defaultdict(list)
    for piece in pieces:
        by_length[len(piece)].append(piece)
    weights = np.zeros(256)
    alone = list(set(b"".join(by_length[1])))
    for length in sorted(by_length.keys() - {0}):
        weights[list(set(b"".join(by_length[length])))] = 1 / length
    weights[[byte for byte in range(256) if byte not in alone]] = 0
    return weights
