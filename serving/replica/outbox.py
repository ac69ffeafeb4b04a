"""Outbox: the news that one gateway has not been sent yet.

The writer takes everything at once: while it keeps up that is one message per engine step; while it is behind, text of
the same request is joined, so memory is bounded by the answers themselves and never by how slowly a gateway reads.
"""

import asyncio
from dataclasses import dataclass, field

from serving.replica import convert
from serving.replica.events import Accepted, Delta, Ending, TokenLogprob
from serving.replica.proto import replica_pb2 as pb
from serving.replica.status import ReplicaStatus

MAX_UNSENT = 4096  # requests with unsent news; beyond it the gateway's own messages are not read


@dataclass(slots=True)
class _Text:
    parts: list[str] = field(default_factory=list)
    num_tokens: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt: list[TokenLogprob] = field(default_factory=list)
    embedding: bytes = b""


class Outbox:
    """Filled by the event loop's callbacks, emptied by one writer task."""

    def __init__(self, max_unsent: int = MAX_UNSENT) -> None:
        self._max_unsent = max_unsent
        self._accepted: list[pb.Accepted] = []
        self._texts: dict[int, _Text] = {}
        self._finished: list[pb.Finished] = []
        self._status: ReplicaStatus | None = None
        self._writing = False
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    @property
    def sent(self) -> bool:
        """Whether everything so far has been taken and written."""
        return not (self._writing or self._news.is_set())

    def mark_sent(self) -> None:
        """The batch taken last has been written."""
        self._writing = False

    def accept(self, handle: int, accepted: Accepted) -> None:
        self._accepted.append(
            pb.Accepted(handle=handle, prompt_tokens=accepted.prompt_tokens, in_thought=accepted.in_thought)
        )
        self._changed()

    def add(self, handle: int, delta: Delta) -> None:
        unsent = self._texts.setdefault(handle, _Text())
        unsent.parts.append(delta.text)
        unsent.num_tokens += delta.num_tokens
        unsent.logprobs += delta.logprobs
        unsent.prompt += delta.prompt
        unsent.embedding = unsent.embedding or delta.embedding
        self._changed()

    def finish(self, handle: int, ending: Ending) -> None:
        self._finished.append(convert.finished_to_pb(handle, ending))
        self._changed()

    def set_status(self, status: ReplicaStatus) -> None:
        """Only the newest matters."""
        self._status = status
        self._changed()

    async def room(self) -> None:
        """Wait until the gateway has read enough to be listened to again."""
        await self._room.wait()

    async def take(self) -> pb.ServerBatch:
        """Wait for news and take all of it."""
        await self._news.wait()
        batch = pb.ServerBatch(accepted=self._accepted, deltas=self._take_deltas(), finished=self._finished)
        if self._status is not None:
            batch.status.CopyFrom(convert.status_to_pb(self._status))
        self._clear()
        self._writing = True
        return batch

    def _take_deltas(self) -> list[pb.Delta]:
        return [
            convert.delta_to_pb(
                handle, "".join(unsent.parts), unsent.num_tokens, unsent.logprobs, unsent.prompt, unsent.embedding
            )
            for handle, unsent in self._texts.items()
        ]

    def _clear(self) -> None:
        self._accepted, self._texts, self._finished, self._status = [], {}, [], None
        self._news.clear()
        self._room.set()

    def _changed(self) -> None:
        self._news.set()
        if len(self._accepted) + len(self._texts) + len(self._finished) >= self._max_unsent:
            self._room.clear()
