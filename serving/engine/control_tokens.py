"""ControlTokens: what people write stays text, also where it spells a control token such as `<|im_end|>`.

1. `hide` breaks such text in messages and tools with a mark that nobody can guess, before the chat template sees them.
2. What the template itself writes is then all that still spells control tokens.
3. `encode` puts a placeholder of its own in the place of each, takes the marks out, and encodes all at once with a
   tokenizer that knows placeholders but no control tokens; so what stands around them is encoded as ever.
"""

import re
import secrets
import threading
from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, models


class ControlTokens:
    """Of one tokenizer. May be used by many threads."""

    def __init__(self, tokenizer_json: str, added: Mapping[int, AddedToken], nonce: str | None = None) -> None:
        """`added` are all added tokens by id; those that are special are control tokens. `nonce` is what nobody may
        guess, for tests to give."""
        self._json, self._nonce = tokenizer_json, nonce or secrets.token_hex(8)
        self._special = {token.content: (token_id, token) for token_id, token in added.items() if token.special}
        firsts = re.escape("".join(sorted({text[0] for text in self._special if text})))
        self._first = re.compile(f"[{firsts}]" if firsts else "(?!)")
        """What a control token begins with: most texts have nothing of it, and need no closer look."""
        self._beginnings = {text[:end] for text in self._special for end in range(1, len(text))}
        self._longest = max(map(len, self._special), default=0)
        self._finder = tokenizers.Tokenizer(models.WordLevel({"": 0}, unk_token=""))
        self._finder.add_special_tokens(list(self._special))
        self._mark = f"\ufdd0{self._nonce}\ufdd0"
        self._lock = threading.Lock()
        self._encoder: tuple[tokenizers.Tokenizer, dict[int, int]] | None = None

    def hide(self, value: Any) -> Any:
        """JSON with a mark in each text that spells a control token, or that begins one where a text ends."""
        match value:
            case str():
                return self._hide_in(value)
            case dict():
                return {self.hide(key): self.hide(inner) for key, inner in value.items()}
            case list() | tuple():
                return [self.hide(inner) for inner in value]
        return value

    def is_marked(self, text: str) -> bool:
        return self._nonce in text

    def reveal(self, text: str) -> str:
        """Without marks, also where a template has written them as ASCII."""
        return text.replace(self._mark, "").replace(f"\\ufdd0{self._nonce}\\ufdd0", "")

    def encode(self, text: str) -> list[int]:
        """What a template made of what `hide` returned. The first call loads a tokenizer, as slowly as the
        start does."""
        encoder, ids = self._loaded()
        parts = [
            self._placeholder(self._special[part][0]) if is_special else self.reveal(part)
            for is_special, part in self._parts(text)
        ]
        (found,) = encoder.encode_batch_fast(["".join(parts)], add_special_tokens=False)
        return [ids.get(token_id, token_id) for token_id in found.ids]

    def _hide_in(self, text: str) -> str:
        if not self._first.search(text):
            return text
        parts = [part[0] + self._mark + part[1:] if is_special else part for is_special, part in self._parts(text)]
        ends = range(1, min(self._longest, len(text) + 1))
        if any(text[-end:] in self._beginnings for end in ends):
            parts.append(self._mark)
        return "".join(parts)

    def _parts(self, text: str) -> list[tuple[bool, str]]:
        """What spells a control token, and what is between."""
        (found,) = self._finder.encode_batch([text], add_special_tokens=False)  # `encode` holds the interpreter lock
        return [(token_id > 0, text[a:b]) for token_id, (a, b) in zip(found.ids, found.offsets, strict=True)]

    def _placeholder(self, token_id: int) -> str:
        return f"\ufdd1{self._nonce}:{token_id}\ufdd1"

    def _loaded(self) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
        """And which token each of its placeholders stands for."""
        with self._lock:
            if self._encoder is None:
                encoder = tokenizers.Tokenizer.from_str(self._json)
                encoder.no_truncation()
                encoder.no_padding()
                encoder.encode_special_tokens = True
                places = {self._placeholder(token_id): (token_id, token) for token_id, token in self._special.values()}
                encoder.add_tokens(
                    [
                        AddedToken(place, lstrip=token.lstrip, rstrip=token.rstrip, normalized=False, special=False)
                        for place, (_, token) in places.items()
                    ]
                )
                added = encoder.get_added_tokens_decoder()
                ids = {number: places[one.content][0] for number, one in added.items() if one.content in places}
                self._encoder = encoder, ids
            return self._encoder
