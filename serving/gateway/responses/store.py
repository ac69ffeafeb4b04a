"""ResponseStore: answers that a later request may go on from. In memory, bounded in bytes, and forgotten with time."""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

MAX_BYTES = 64 << 20
TTL_S = 3600.0


@dataclass(frozen=True, slots=True)
class Stored:
    response: bytes
    """As the client got it."""
    messages: bytes
    """The conversation up to its end, without instructions: a JSON list as chat completions take it."""
    expires_s: float

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.messages)

    def conversation(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = orjson.loads(self.messages)
        return messages


class ResponseStore:
    """What was put in first goes first."""

    def __init__(
        self, max_bytes: int = MAX_BYTES, ttl_s: float = TTL_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_bytes, self._ttl_s, self._clock = max_bytes, ttl_s, clock
        self._stored: OrderedDict[str, Stored] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    def put(self, response_id: str, response: bytes, messages: Sequence[dict[str, Any]]) -> None:
        """One that is larger than the whole store is not kept."""
        stored = Stored(response, orjson.dumps(messages), self._clock() + self._ttl_s)
        self._stored[response_id] = stored
        self._num_bytes += stored.num_bytes
        self._forget_old()

    def get(self, response_id: str) -> Stored | None:
        self._forget_old()
        return self._stored.get(response_id)

    def delete(self, response_id: str) -> bool:
        """Whether there was one."""
        self._forget_old()
        stored = self._stored.pop(response_id, None)
        if stored is not None:
            self._num_bytes -= stored.num_bytes
        return stored is not None

    def _forget_old(self) -> None:
        now = self._clock()
        while self._stored:
            oldest = next(iter(self._stored.values()))
            if self._num_bytes <= self._max_bytes and oldest.expires_s > now:
                return
            self._stored.popitem(last=False)
            self._num_bytes -= oldest.num_bytes
