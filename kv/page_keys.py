"""PageKeys: names for what lies in a sequence's full pages, so that equal beginnings of two sequences are found.

The key of a page is a digest of the key of the page before it and of its own token ids; the chain begins with a digest
of the salt, in a space of its own for each adapter. Equal keys therefore mean the same salt, adapter, tokens and
positions, which is all that keys and values in a page depend on. Sixteen bytes of BLAKE2b: a collision, which would
show one conversation to another, takes 2**64 tries of someone who looks for one.
"""

from collections.abc import Sequence
from hashlib import blake2b
from struct import Struct

KEY_BYTES = 16


class PageKeys:
    """The keys of one sequence. Its tokens may only be appended to: a key that was computed stays."""

    def __init__(self, page_size: int, salt: str = "", adapter: int = 0) -> None:
        """Sequences with different salts never have a key in common, nor those with different adapters, which are
        numbers that are never used again; 0 for none."""
        self._page_size = page_size
        self._pack = Struct(f"{page_size}q").pack
        person = b"%d" % adapter if adapter else b""
        self._chain = [blake2b(salt.encode(), digest_size=KEY_BYTES, person=person).digest()]

    def first(self, token_ids: Sequence[int], count: int, start: int = 0) -> list[bytes]:
        """Keys of the first `count` pages, which `token_ids` fill, without the first `start`."""
        size = self._page_size
        assert count * size <= len(token_ids), f"{len(token_ids)} tokens do not fill {count} pages"
        for page in range(len(self._chain) - 1, count):
            tokens = self._pack(*token_ids[page * size : (page + 1) * size])
            self._chain.append(blake2b(self._chain[-1] + tokens, digest_size=KEY_BYTES).digest())
        return self._chain[start + 1 : count + 1]
