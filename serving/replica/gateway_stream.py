"""GatewayStream: the replica's end of one gateway's stream. Submits and cancels come in, batches of news go out."""

import asyncio
import logging
import time
from collections.abc import Iterable
from functools import partial
from typing import Protocol

from serving import tracing
from serving.context import REQUEST_ID
from serving.errors import EngineFailed, InvalidRequest, ServiceError
from serving.replica import convert
from serving.replica.events import Accepted, Delta, Ending
from serving.replica.outbox import Outbox
from serving.replica.prompts import ReadPrompt
from serving.replica.proto import replica_pb2 as pb
from serving.replica.running import RunningTable
from serving.request import MAX_CHOICES, FinishReason, Request
from serving.tracing import Arrived

logger = logging.getLogger(__name__)

MAX_HANDLE = (1 << 64) - 1  # of a protocol's number


class Entrance(Protocol):
    """What a stream needs of the replica."""

    def admit(self, num_choices: int) -> RunningTable:
        """Raises ReplicaUnavailable or Overloaded."""
        ...

    async def read_prompt(self, table: RunningTable, request: Request, num_bytes: int) -> ReadPrompt:
        """`num_bytes` is how large the request is. Raises ServiceError."""
        ...


class GatewayStream:
    """Every handle is first entering (its prompt is being read), then running, then gone."""

    def __init__(self, entrance: Entrance) -> None:
        self.outbox = Outbox()
        self._entrance = entrance
        self._entering: dict[int, asyncio.Task[None]] = {}
        self._running: dict[int, tuple[RunningTable, str]] = {}
        self._traces: dict[int, Arrived] = {}
        """Of requests whose answers are to be recorded."""

    @property
    def num_entering(self) -> int:
        return len(self._entering)

    def receive(self, batch: pb.ClientBatch) -> None:
        for submit in batch.submits:
            handles = range(submit.handle, submit.handle + max(1, min(submit.num_choices, MAX_CHOICES)))
            if self._refuse_misnumbered(submit, handles):
                continue
            task = asyncio.create_task(self._enter(submit, handles))
            self._entering |= dict.fromkeys(handles, task)
            task.add_done_callback(partial(self._entered, handles))
        for handle in batch.cancels:
            self._cancel(handle)

    def close(self) -> None:
        """The gateway is gone: free what it held, within one step."""
        for task in self._entering.values():
            task.cancel()
        for table, engine_id in self._running.values():
            table.forget(engine_id)
        self._running.clear()

    def add(self, handle: int, delta: Delta) -> None:
        self.outbox.add(handle, delta)

    def finish(self, handle: int, ending: Ending) -> None:
        self._running.pop(handle, None)
        if trace := self._traces.pop(handle, None):
            tracing.record_answer(trace, ending.reason, ending.usage, ending.phases)
        self.outbox.finish(handle, ending)

    async def _enter(self, submit: pb.Submit, handles: range) -> None:
        try:
            await self._start(submit, handles)
        except ServiceError as error:
            self._refuse(handles, error)
        except Exception:
            logger.exception("request %s: its prompt could not be read", submit.request_id)
            self._refuse(handles, EngineFailed("the prompt could not be turned into tokens."))

    async def _start(self, submit: pb.Submit, handles: range) -> None:
        REQUEST_ID.set(submit.request_id)
        request = convert.request_from_pb(submit)
        deadline = None if request.deadline_ms is None else time.monotonic() + request.deadline_ms / 1000
        table = self._entrance.admit(request.num_choices)
        prompt = await self._entrance.read_prompt(table, request, submit.ByteSize())
        if submit.traceparent and tracing.is_on():
            self._traces |= dict.fromkeys(handles, Arrived(submit.traceparent, request.request_id, request.model))
        engine_ids = table.submit(request.request_id, prompt, handles, self, deadline)
        for handle in handles:  # the next message has this before all news
            self.outbox.accept(handle, Accepted(len(prompt.token_ids), prompt.in_thought))
        for handle, engine_id in zip(handles, engine_ids, strict=True):
            self._running[handle] = (table, engine_id)

    def _refuse_misnumbered(self, submit: pb.Submit, handles: range) -> bool:
        """A gateway that uses a handle twice is at fault. The request that has it goes on and ends once, as if the
        other had not come; of the other, the handles that are free end with an error. Returns whether it is refused."""
        free = [
            each for each in handles if each <= MAX_HANDLE and not (each in self._entering or each in self._running)
        ]
        if len(free) == len(handles):
            return False
        logger.warning("request %s: handles %s are in use or too large", submit.request_id, handles)
        self._refuse(free, InvalidRequest("the gateway gave handles to this request that are in use or too large."))
        return True

    def _refuse(self, handles: Iterable[int], error: ServiceError) -> None:
        for handle in handles:
            self.finish(handle, Ending(FinishReason.ERROR, error=error))

    def _entered(self, handles: range, task: asyncio.Task[None]) -> None:
        """Also called for a task that was cancelled before its first line ran."""
        for handle in handles:
            del self._entering[handle]
            if task.cancelled():
                self.finish(handle, Ending(FinishReason.ABORT))

    def _cancel(self, handle: int) -> None:
        if task := self._entering.get(handle):
            task.cancel()
        elif running := self._running.get(handle):
            table, engine_id = running
            table.abort(engine_id)
