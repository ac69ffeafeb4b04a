"""ReplicaService: the gRPC service around one engine, and its state from starting to drained.

1. The server listens before the model is loaded: GetStatus and every stream tell what it is doing.
2. `serve` hands it the loaded model; the engine's thread starts, its steps come over to this event loop.
3. A stream that breaks takes its requests with it. Draining refuses new requests and lets the running ones finish.
"""

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import TypeVar

import grpc
from google.protobuf.message import DecodeError

from serving.engine.api import EngineLoop, EngineState, StepOutput
from serving.errors import EngineFailed, Overloaded, ReplicaUnavailable, ServiceError
from serving.replica import convert
from serving.replica.adapters import AdapterTable
from serving.replica.gateway_stream import GatewayStream
from serving.replica.lanes import Lanes
from serving.replica.profiler import Profiler
from serving.replica.prompts import PromptReader, ReadPrompt
from serving.replica.proto import replica_pb2 as pb
from serving.replica.proto.replica_pb2_grpc import ReplicaServicer
from serving.replica.running import RunningTable
from serving.replica.served import ServedModel
from serving.replica.status import ReplicaState, ReplicaStatus
from serving.replica.step_watch import WATCH_S, StepWatch
from serving.request import Load, Request

logger = logging.getLogger(__name__)

POLL_S = 0.05

RequestT = TypeVar("RequestT", pb.TokenizeRequest, pb.DetokenizeRequest)
ReplyT = TypeVar("ReplyT")


class ReplicaService(ReplicaServicer):
    """Owns the streams and the table of running requests. All methods run on one event loop."""

    def __init__(self, stuck_s: float = 10.0, profile_folder: str | None = None) -> None:
        """A step of the engine that takes more than `stuck_s` is stuck (`StepWatch`). Traces are written below
        `profile_folder`."""
        self._profile_folder = profile_folder
        self._watch = StepWatch(stuck_s)
        self._status = ReplicaStatus()
        self._table: RunningTable | None = None
        self._profiler: Profiler | None = None
        self._streams: set[GatewayStream] = set()
        self._num_reading = 0
        self._watching: asyncio.Task[None] | None = None
        self._lanes = Lanes()

    @property
    def status(self) -> ReplicaStatus:
        table = self._table
        if table is None:
            return self._status
        return dataclasses.replace(self._status, load=table.load, stats=table.stats, adapters=table.adapters())

    def report(self, detail: str) -> None:
        """Say what loading is doing."""
        self._change(detail=detail)

    def serve(self, served: ServedModel) -> None:
        """Start the engine and become ready, unless a drain came first."""
        loop = asyncio.get_running_loop()
        self._table = table = RunningTable(served)
        self._profiler = Profiler(served.engine, lambda: table.stats.num_steps, self._profile_folder)

        def on_step(step: StepOutput) -> None:  # on the engine's thread
            loop.call_soon_threadsafe(table.on_step, step)

        served.adapters.on_change = self._change
        served.engine.start(on_step)
        self._change(
            model=served.name,
            source=served.source,
            max_seq_len=served.engine.max_seq_len,
            created_unix_s=served.created_unix_s,
            tool_dialect=served.reader.tool_dialect,
            thinks=served.reader.thinks,
            max_adapters=served.engine.num_adapters,
        )
        if self._status.state is ReplicaState.STARTING:
            self._change(state=ReplicaState.READY, detail="")
        self._watching = asyncio.create_task(self._watch_steps(served.engine), name="watch-steps")

    def fail(self, detail: str) -> None:
        """Nothing will be answered any more; what is in flight ends now."""
        self._change(state=ReplicaState.FAILED, detail=detail)
        if self._table is not None:
            self._table.fail_all(EngineFailed(detail))

    async def _watch_steps(self, engine: EngineLoop) -> None:
        """While a step is stuck nobody should wait for it: what is in flight fails, and the replica is not ready. If it
        ends after all, its requests are aborted and the replica is as before; if not, `engine_failed` tells."""
        watch = self._watch
        while not watch.is_lost:
            await asyncio.sleep(WATCH_S)
            watch.look(engine.num_steps_begun, engine.step_s)
            state = self._status.state
            if watch.is_stuck and state is ReplicaState.READY:
                words = f"a step of the engine runs since {watch.seen_s:.0f} s and counts as stuck"
                logger.error("%s; what is in flight fails", words)
                self._change(state=ReplicaState.STUCK, detail=words)
                if self._table is not None:
                    self._table.fail_all(EngineFailed(f"{words}; send the request again."))
            elif not watch.is_stuck and state is ReplicaState.STUCK:
                logger.warning("the step has ended: the replica is ready again")
                self._change(state=ReplicaState.READY, detail="")

    def drain(self) -> None:
        if self._status.state in (ReplicaState.STARTING, ReplicaState.READY, ReplicaState.STUCK):
            self._change(state=ReplicaState.DRAINING, detail="no new requests, running ones finish")

    async def drained(self) -> None:
        """Wait until every answer is finished and sent."""
        await _poll(lambda: not self._num_requests() and all(stream.outbox.sent for stream in self._streams))

    async def engine_failed(self) -> None:
        """Wait until the engine reports that it cannot go on, or its step is given up."""
        await _poll(lambda: self._engine_state() is EngineState.FAILED or self._watch.is_lost)

    @property
    def engine_failure(self) -> str:
        """Why it cannot go on; empty while it can."""
        if self._watch.is_lost:
            return "a step of the engine does not end"
        return "" if self._table is None else self._table.served.engine.failure

    @property
    def has_waiting_threads(self) -> bool:
        """Threads that nothing can interrupt: in a step that is stuck, or where an adapter is read from. Python would
        wait for them at its end."""
        return self._watch.is_stuck or (self._table is not None and self._table.served.adapters.is_reading)

    async def close(self) -> None:
        """End the engine's thread, then the rest; steps can still arrive until then."""
        if self._watching is not None:
            self._watching.cancel()
        self._lanes.close()
        if self._table is not None:
            self._table.served.adapters.close()
        if self._table is not None and not self._watch.is_stuck:
            await asyncio.to_thread(self._table.served.engine.stop)  # may wait for the step in progress
            await _poll(lambda: self._engine_state() in (EngineState.STOPPED, EngineState.FAILED))

    def admit(self, num_choices: int) -> RunningTable:
        """The table that takes so many more answers. Raises ReplicaUnavailable or Overloaded."""
        if self._table is None or not self._status.ready:
            raise ReplicaUnavailable(f"the replica is {self._status.state}: {self._status.detail}.", retry_after_s=1)
        capacity = self._table.served.capacity
        if self._num_reading + self._table.num_requests + num_choices > capacity:
            raise Overloaded(f"the replica already holds {capacity:,} requests; try again later.")
        return self._table

    async def read_prompt(self, table: RunningTable, request: Request, num_bytes: int) -> ReadPrompt:
        """In a thread; the request holds its place meanwhile."""
        self._num_reading += request.num_choices
        read = partial(table.served.reader.read, request)
        try:
            return await self._lanes.run(read, num_bytes, grammar=request.grammar is not None)
        finally:
            self._num_reading -= request.num_choices

    async def Generate(
        self,
        requests: AsyncIterator[pb.ClientBatch],
        context: grpc.aio.ServicerContext[pb.ClientBatch, pb.ServerBatch],
    ) -> None:
        """One gateway's stream, for as long as it holds."""
        stream = GatewayStream(self)
        self._streams.add(stream)
        stream.outbox.set_status(self.status)
        writer = asyncio.create_task(self._write(stream, context))
        writer.add_done_callback(_forget_failure)
        try:
            async for batch in requests:
                await stream.outbox.room()
                stream.receive(batch)
        except DecodeError:
            stream.close()
            await _poll(lambda: stream.outbox.sent)  # gRPC takes no status while a message is being written
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the message is none of this protocol.")
        finally:  # gRPC may cancel this task a second time: nothing here may wait
            self._streams.discard(stream)
            stream.close()
            writer.cancel()

    async def Tokenize(self, request: pb.TokenizeRequest, context: object) -> pb.TokenizeReply:
        try:
            return await self._in_thread(self._tokenize, request)
        except ServiceError as error:
            return pb.TokenizeReply(error=convert.error_to_pb(error))

    async def Detokenize(self, request: pb.DetokenizeRequest, context: object) -> pb.DetokenizeReply:
        try:
            return await self._in_thread(self._detokenize, request)
        except ServiceError as error:
            return pb.DetokenizeReply(error=convert.error_to_pb(error))

    async def LoadAdapter(self, request: pb.LoadAdapterRequest, context: object) -> pb.AdapterReply:
        try:
            await self._adapters().load(request.name, request.path)
        except ServiceError as error:
            return pb.AdapterReply(error=convert.error_to_pb(error))
        return self._adapter_reply()

    async def UnloadAdapter(self, request: pb.UnloadAdapterRequest, context: object) -> pb.AdapterReply:
        try:
            self._adapters().unload(request.name)
        except ServiceError as error:
            return pb.AdapterReply(error=convert.error_to_pb(error))
        return self._adapter_reply()

    def _adapter_reply(self) -> pb.AdapterReply:
        return pb.AdapterReply(adapters=convert.adapters_to_pb(self.status.adapters))

    def _adapters(self) -> AdapterTable:
        if self._table is None or not self._status.ready:
            raise ReplicaUnavailable(f"the replica is {self._status.state}: {self._status.detail}.", retry_after_s=1)
        return self._table.served.adapters

    async def _in_thread(self, work: Callable[[PromptReader, RequestT], ReplyT], request: RequestT) -> ReplyT:
        if self._table is None:
            raise ReplicaUnavailable(f"the replica is {self._status.state}: {self._status.detail}.", retry_after_s=1)
        return await self._lanes.run(partial(work, self._table.served.reader, request), request.ByteSize())

    @staticmethod
    def _tokenize(reader: PromptReader, request: pb.TokenizeRequest) -> pb.TokenizeReply:
        ids = reader.tokenize(
            request.model,
            convert.tokenize_from_pb(request),
            with_bos=not request.no_bos,
            add_generation_prompt=not request.no_generation_prompt,
        )
        texts = [reader.tokenizer.token_bytes(token_id).decode(errors="replace") for token_id in ids]
        return pb.TokenizeReply(ids=ids, texts=texts)

    @staticmethod
    def _detokenize(reader: PromptReader, request: pb.DetokenizeRequest) -> pb.DetokenizeReply:
        return pb.DetokenizeReply(text=reader.detokenize(request.model, request.ids))

    async def GetStatus(self, request: pb.StatusRequest, context: object) -> pb.Status:
        return convert.status_to_pb(self.status)

    async def Drain(self, request: pb.DrainRequest, context: object) -> pb.Status:
        self.drain()
        return convert.status_to_pb(self.status)

    async def Profile(
        self,
        request: pb.ProfileRequest,
        context: grpc.aio.ServicerContext[pb.ProfileRequest, pb.ProfileReply],
    ) -> pb.ProfileReply:
        try:
            if self._profiler is None:
                raise ReplicaUnavailable(f"the replica is {self._status.state}: {self._status.detail}.")
            steps, folder = await self._profiler.trace(request.steps, request.name, request.wait_s)
            return pb.ProfileReply(steps=steps, folder=folder)
        except ServiceError as error:
            await context.abort(grpc.StatusCode[error.grpc_status], str(error))

    async def _write(
        self, stream: GatewayStream, context: grpc.aio.ServicerContext[pb.ClientBatch, pb.ServerBatch]
    ) -> None:
        while True:
            batch = await stream.outbox.take()
            batch.load.CopyFrom(convert.load_to_pb(self._load))
            await context.write(batch)  # waits while the gateway does not read
            stream.outbox.mark_sent()

    @property
    def _load(self) -> Load:
        return self._status.load if self._table is None else self._table.load

    def _engine_state(self) -> EngineState:
        return EngineState.STARTING if self._table is None else self._table.served.engine.state

    def _num_requests(self) -> int:
        num_running = 0 if self._table is None else self._table.num_requests
        return num_running + sum(stream.num_entering for stream in self._streams)

    def _change(self, **changes: object) -> None:
        self._status = dataclasses.replace(self._status, **changes)  # type: ignore[arg-type]
        for stream in self._streams:
            stream.outbox.set_status(self.status)


def _forget_failure(writer: asyncio.Task[None]) -> None:
    """A write fails when the gateway is gone, and then the reader ends the stream."""
    if not writer.cancelled():
        writer.exception()


async def _poll(condition: Callable[[], bool]) -> None:
    """For states that change on another thread or in many places, and are waited for rarely."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(POLL_S)
