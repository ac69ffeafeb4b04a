"""ReplicaClient: a gateway's end of the one long-lived stream to a replica. Imports no JAX.

1. `start` runs a task that connects, and connects again with backoff whenever the stream breaks.
2. `generate` queues a submit; the writer sends everything queued since its last write as one batch.
3. The reader spreads each step's message over the inboxes of its requests.
4. A broken stream ends everything in flight at once with ReplicaUnavailable: nobody waits for a replica that is gone.
"""

import asyncio
import dataclasses
import logging
from collections import deque
from collections.abc import Sequence
from typing import Any

import grpc

from serving.context import TRACEPARENT
from serving.errors import ReplicaUnavailable, ServiceError
from serving.replica import convert
from serving.replica.events import Accepted, Finished
from serving.replica.generation import Generation
from serving.replica.inbox import Inbox
from serving.replica.proto import replica_pb2 as pb
from serving.replica.proto.replica_pb2_grpc import ReplicaStub
from serving.replica.status import ReplicaStatus
from serving.replica.transport import open_channel
from serving.request import ChatPrompt, FinishReason, Request, TextPrompt, TokenPrompt, check_prompt_length
from serving.secret import Secret

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 0.5
ASK_TIMEOUT_S = 30.0
LOAD_TIMEOUT_S = 300.0
"""For an adapter, which may come from far away, after others."""
MAX_BATCH_BYTES = 4 << 20  # several batches rather than one beyond gRPC's limit

Call = grpc.aio.StreamStreamCall[pb.ClientBatch, pb.ServerBatch]


class ReplicaClient:
    """One replica, one stream, any number of requests on it."""

    def __init__(self, address: str, secret: Secret | None = None) -> None:
        self._address = address
        self._metadata = () if secret is None else secret.metadata
        self._refusal = ""
        """What the replica said when it refused this client, until it does not."""
        self._channel = open_channel(address)
        self._stub = ReplicaStub(self._channel)  # type: ignore[no-untyped-call]
        self._inboxes: dict[int, Inbox] = {}
        self._submits: deque[pb.Submit] = deque()
        self._cancels: list[int] = []
        self._queued = asyncio.Event()
        self._next_handle = 1
        self._connected = False
        self._broken = "the replica went away while it answered; send the request again."
        self._status = ReplicaStatus()
        self._load: pb.Load | None = None
        """Newer than the status."""
        self._task: asyncio.Task[None] | None = None

    @property
    def status(self) -> ReplicaStatus:
        """The newest that is known; stale while not connected."""
        if self._load is not None:
            self._status, self._load = dataclasses.replace(self._status, load=convert.load_from_pb(self._load)), None
        return self._status

    @property
    def address(self) -> str:
        return self._address

    @property
    def connected(self) -> bool:
        return self._connected

    @property
    def ready(self) -> bool:
        """Whether a request sent now can be answered."""
        return self._connected and self._status.ready

    @property
    def trouble(self) -> str:
        """Why nothing can be answered, while not connected."""
        if self._refusal:
            return f"the replica at {self._address} refuses this gateway: {self._refusal}"
        return f"no replica answers at {self._address}; it is starting or being restarted, try again in a moment."

    @property
    def num_in_flight(self) -> int:
        return len(self._inboxes)

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="replica-stream")

    async def close(self) -> None:
        """End the stream; what is in flight ends with ReplicaUnavailable."""
        self._broken = "the gateway is shutting down; send the request again."
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await self._channel.close()

    def generate(self, request: Request) -> Generation:
        """Send a request. Raises ReplicaUnavailable at once when nothing could answer it, and PromptTooLong for more
        tokens than are worth sending."""
        if not self.ready:
            raise ReplicaUnavailable(self._why_not_ready(), retry_after_s=1)
        if isinstance(request.prompt, TokenPrompt):
            check_prompt_length(len(request.prompt.token_ids), self._status.max_seq_len, "prompt")
        handles = range(self._next_handle, self._next_handle + request.num_choices)
        self._next_handle = handles.stop
        inboxes = [Inbox(choice, plain=_is_plain(request)) for choice in range(request.num_choices)]
        self._inboxes |= zip(handles, inboxes, strict=True)
        submit = convert.submit_to_pb(handles.start, request)
        submit.traceparent = TRACEPARENT.get()
        self._submits.append(submit)
        self._queued.set()
        return Generation(self.release, handles, inboxes)

    def release(self, handle: int) -> None:
        """The reader of this request is gone."""
        inbox = self._inboxes.pop(handle, None)
        if inbox is not None and self._connected:
            self._cancels.append(handle)
            self._queued.set()

    async def tokenize(
        self, model: str, prompt: TextPrompt | ChatPrompt, *, with_bos: bool = True, add_generation_prompt: bool = True
    ) -> tuple[list[int], list[str]]:
        """Token ids and the text of each. Raises ServiceError."""
        request = convert.tokenize_to_pb(model, prompt)
        request.no_bos, request.no_generation_prompt = not with_bos, not add_generation_prompt
        reply = await self._ask(self._stub.Tokenize, request)
        return list(reply.ids), list(reply.texts)

    async def detokenize(self, model: str, token_ids: Sequence[int]) -> str:
        """Raises ServiceError."""
        return str((await self._ask(self._stub.Detokenize, pb.DetokenizeRequest(model=model, ids=token_ids))).text)

    async def load_adapter(self, name: str, path: str) -> None:
        """Raises ServiceError."""
        request = pb.LoadAdapterRequest(name=name, path=path)
        self._see_adapters(await self._ask(self._stub.LoadAdapter, request, LOAD_TIMEOUT_S))

    async def unload_adapter(self, name: str) -> None:
        """Raises ServiceError."""
        self._see_adapters(await self._ask(self._stub.UnloadAdapter, pb.UnloadAdapterRequest(name=name)))

    def _see_adapters(self, reply: pb.AdapterReply) -> None:
        """Who asked to change them sees it at once."""
        self._status = dataclasses.replace(self._status, adapters=convert.adapters_from_pb(reply.adapters))

    async def _ask(self, method: Any, request: Any, timeout_s: float = ASK_TIMEOUT_S) -> Any:
        try:
            reply = await method(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise ReplicaUnavailable(f"the replica at {self._address} does not answer: {error.details()}.") from error
        if reply.HasField("error"):
            raise convert.error_from_pb(reply.error)
        return reply

    async def fetch_status(self, timeout_s: float = 1.0) -> ReplicaStatus:
        """Ask now. Raises ReplicaUnavailable when there is no answer in time."""
        try:
            status = convert.status_from_pb(
                await self._stub.GetStatus(pb.StatusRequest(), timeout=timeout_s, metadata=self._metadata)
            )
            self._status, self._load = status, None
        except grpc.aio.AioRpcError as error:
            raise ReplicaUnavailable(f"the replica at {self._address} does not answer: {error.details()}.") from error
        return self._status

    async def _run(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        while not _is_cancelled():
            was_connected = await self._hold_stream()
            backoff_s = FIRST_BACKOFF_S if was_connected else min(2 * backoff_s, MAX_BACKOFF_S)
            await asyncio.sleep(backoff_s)

    async def _hold_stream(self) -> bool:
        """One stream from connect to break; returns whether it ever carried anything."""
        call: Call = self._stub.Generate(metadata=self._metadata)
        writer = asyncio.create_task(self._write(call))
        writer.add_done_callback(lambda _: call.cancel())  # a stream that cannot be written is of no use
        try:
            await self._read(call)
        except grpc.aio.AioRpcError as error:
            self._log_break(error)
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            logger.warning("the stream to the replica could not be written")
        finally:
            was_connected = self._disconnect()
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)
        return was_connected

    async def _read(self, call: Call) -> None:
        while isinstance(batch := await call.read(), pb.ServerBatch):
            if batch.HasField("status"):
                self._status = convert.status_from_pb(batch.status)
            self._connected, self._refusal = True, ""
            self._spread(batch)

    async def _write(self, call: Call) -> None:
        while not _is_cancelled():
            await self._queued.wait()
            await call.write(self._take_batch())

    def _take_batch(self) -> pb.ClientBatch:
        """Cancels travel after the submits that they may concern."""
        batch = pb.ClientBatch()
        size = 0
        while self._submits and size < MAX_BATCH_BYTES:
            submit = self._submits.popleft()
            size += submit.ByteSize()
            batch.submits.append(submit)
        if not self._submits:
            batch.cancels.extend(self._cancels)
            self._cancels.clear()
            self._queued.clear()
        return batch

    def _spread(self, batch: pb.ServerBatch) -> None:
        self._load = batch.load  # turned into a Load when somebody asks
        inboxes = self._inboxes
        for accepted in batch.accepted:
            if inbox := inboxes.get(accepted.handle):
                inbox.accept(Accepted(accepted.prompt_tokens, accepted.in_thought))
        for delta in batch.deltas:
            if inbox := inboxes.get(delta.handle):
                if inbox.plain:
                    inbox.add_text(delta.text, delta.num_tokens)
                else:
                    inbox.add(convert.delta_from_pb(delta, inbox.choice))
        for finished in batch.finished:
            if inbox := inboxes.pop(finished.handle, None):
                inbox.end(_unasked_abort_is_failure(convert.end_from_pb(finished)))

    def _disconnect(self) -> bool:
        """Nothing more will come for what is in flight. Returns whether the stream had been up."""
        was_connected, self._connected = self._connected, False
        self._submits.clear()
        self._cancels.clear()
        self._queued.clear()
        inboxes, self._inboxes = self._inboxes, {}
        for inbox in inboxes.values():
            inbox.end(ReplicaUnavailable(self._broken))
        return was_connected

    def _why_not_ready(self) -> str:
        if not self._connected:
            return self.trouble
        return f"the replica is {self._status.state}: {self._status.detail or 'no token can be made yet'}."

    def _log_break(self, error: grpc.aio.AioRpcError) -> None:
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            if not self._refusal:
                logger.error("the replica at %s refuses this gateway: %s", self._address, error.details())
            self._refusal = error.details() or "it says no more."
        elif self._connected and self._status.ready:  # else it was announced
            logger.warning("the stream to the replica broke (%s): %s", error.code().name, error.details())


def _is_plain(request: Request) -> bool:
    """Its answers bring text and nothing else."""
    sampling = request.sampling
    return sampling.logprobs is None and sampling.prompt_logprobs is None and not request.embed


def _is_cancelled() -> bool:
    """Whether this task is being cancelled. gRPC raises the same error when only the call was; and while a call is set
    up, it keeps the error to itself: the task learns of it nowhere else."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _unasked_abort_is_failure(end: Finished | ServiceError) -> Finished | ServiceError:
    """A request that this side cancelled has no inbox any more, so an abort seen here was the replica's doing."""
    if isinstance(end, Finished) and end.reason is FinishReason.ABORT:
        return ReplicaUnavailable("the replica stopped before the answer was complete; send the request again.")
    return end
