"""Detokenizer: token ids of one answer to text, as they come, each token paid for once.

The law, whatever the ids and however they are split into pushes: all texts joined equal the whole decoded at once.
So text is held back only while a later token could still change it: the bytes of a cut UTF-8 character, or, in
vocabularies with byte tokens (`<0xE4>`), a run of them, which is decoded as a whole.
"""

import codecs
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import tokenizers

from model.errors import UnsupportedModel

BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
# Decoders that treat each token by itself, but for the first one and runs of byte tokens.
WORD_DECODERS = frozenset({"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"})


class Detokenizer(Protocol):
    """State of one answer; used by one thread at a time."""

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete, "" if none. Unknown tokens have no text, nor special ones but those that
        are shown."""
        ...

    def finish(self) -> str:
        """The rest; a character that stayed cut becomes U+FFFD."""
        ...


class Vocabulary(Protocol):
    """What all detokenizers of one tokenizer share; may be used by many threads."""

    def detokenizer(self, shown: Sequence[str] = ()) -> Detokenizer:
        """`shown` are names of special tokens that are to be shown; others are not known and do not matter."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that this token adds to a text; a special token's name; b"" if there is no such token."""
        ...


def new_vocabulary(tokenizer: tokenizers.Tokenizer, tokenizer_json: str) -> Vocabulary:
    """Choose how to decode. Raises UnsupportedModel for a decoder that cannot be run token by token."""
    decoder = json.loads(tokenizer_json).get("decoder") or {"type": None}
    parts = [part["type"] for part in decoder.get("decoders", [decoder])]
    if parts == ["ByteLevel"]:
        return ByteVocabulary(tokenizer)
    if parts and WORD_DECODERS.issuperset(parts):
        return WordVocabulary(tokenizer)
    raise UnsupportedModel(
        f"the decoder {parts} of tokenizer.json is not supported; supported: ByteLevel, {sorted(WORD_DECODERS)}."
    )


class ByteVocabulary(dict[int, bytes]):
    """Byte-level BPE: every token is a string of bytes. Filled as tokens are met."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._special = _special_tokens(tokenizer)
        super().__init__((token_id, b"") for token_id in self._special)
        self._tokenizer = tokenizer
        self._byte_of = _byte_of_letter()

    def __missing__(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id) or ""
        try:
            piece = bytes(self._byte_of[letter] for letter in token)
        except KeyError:  # an added token, kept as plain text
            piece = token.encode()
        self[token_id] = piece
        return piece

    def detokenizer(self, shown: Sequence[str] = ()) -> Detokenizer:
        return ByteDetokenizer(self, {i: name.encode() for i, name in self._special.items() if name in shown})

    def token_bytes(self, token_id: int) -> bytes:
        name = self._special.get(token_id)
        return self[token_id] if name is None else name.encode()


class ByteDetokenizer:
    """See Detokenizer."""

    def __init__(self, vocabulary: ByteVocabulary, shown: Mapping[int, bytes]) -> None:
        self._vocabulary = vocabulary
        self._shown = shown
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Iterable[int]) -> str:
        vocabulary, shown = self._vocabulary, self._shown
        if shown:
            pieces = [shown.get(token_id) or vocabulary[token_id] for token_id in token_ids]
            return self._utf8.decode(b"".join(pieces))
        return self._utf8.decode(b"".join([vocabulary[token_id] for token_id in token_ids]))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class WordVocabulary(dict[int, str | None]):
    """SentencePiece-like: the text of a token that is not the first, None for a byte token. Filled on demand."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._special = _special_tokens(tokenizer)
        super().__init__((token_id, "") for token_id in self._special)
        self._tokenizer = tokenizer
        self._anchor = self._find_anchor()
        self._anchor_chars = len(self.first([self._anchor]))

    def __missing__(self, token_id: int) -> str | None:
        token = self._tokenizer.id_to_token(token_id)
        piece = "" if token is None else None if BYTE_TOKEN.fullmatch(token) else self.later([token_id])
        self[token_id] = piece
        return piece

    def first(self, token_ids: list[int]) -> str:
        """At the start of a text some decoders drop a space."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def later(self, token_ids: list[int]) -> str:
        return self.first([self._anchor, *token_ids])[self._anchor_chars :]

    def detokenizer(self, shown: Sequence[str] = ()) -> Detokenizer:
        return WordDetokenizer(self, {i: name for i, name in self._special.items() if name in shown})

    def token_bytes(self, token_id: int) -> bytes:
        piece = self._special.get(token_id) or self[token_id]
        if piece is not None:
            return piece.encode()
        name = str(self._tokenizer.id_to_token(token_id))  # <0xE4>, plain text to a decoder without byte fallback
        return name.encode() if self.later([token_id]) == name else bytes([int(name[3:5], base=16)])

    def _find_anchor(self) -> int:
        """Any ordinary word, to stand in front."""
        for token_id in range(self._tokenizer.get_vocab_size()):
            token = self._tokenizer.id_to_token(token_id)
            if token_id not in self and token and token.isascii() and token.isalnum():
                return token_id
        raise UnsupportedModel("the vocabulary of tokenizer.json has no token made of letters or digits alone.")


class WordDetokenizer:
    """See Detokenizer."""

    def __init__(self, vocabulary: WordVocabulary, shown: Mapping[int, str]) -> None:
        self._vocabulary = vocabulary
        self._shown = shown
        self._started = False
        self._byte_run: list[int] = []

    def push(self, token_ids: Iterable[int]) -> str:
        return "".join([self._push(token_id) for token_id in token_ids])

    def finish(self) -> str:
        return self._end_run()

    def _push(self, token_id: int) -> str:
        piece = self._vocabulary[token_id]
        if name := self._shown.get(token_id):
            return self._end_run() + name
        if piece is None:
            self._byte_run.append(token_id)
            return ""
        if not piece:
            return ""
        before = self._end_run()
        return before + (piece if self._started else self._start([token_id]))

    def _end_run(self) -> str:
        run, self._byte_run = self._byte_run, []
        if not run:
            return ""
        return self._vocabulary.later(run) if self._started else self._start(run)

    def _start(self, token_ids: list[int]) -> str:
        self._started = True
        return self._vocabulary.first(token_ids)


def _special_tokens(tokenizer: tokenizers.Tokenizer) -> dict[int, str]:
    added: dict[int, Any] = tokenizer.get_added_tokens_decoder()
    return {token_id: str(token.content) for token_id, token in added.items() if token.special}


def _byte_of_letter() -> dict[str, int]:
    """Byte-level BPE writes bytes as letters: printable Latin-1 as itself, the other bytes from U+0100 upwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}
