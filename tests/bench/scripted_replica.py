"""A replica without a model, for measuring gateways: real gRPC and real messages, scripted tokens, no JAX.

    python -m tests.bench.scripted_replica --address unix:/tmp/replica.sock --step-s 0.05

Each step every running answer gets one token of text. A prompt that begins with `idle` is accepted and never gets one.
"""

import argparse
import asyncio
from dataclasses import dataclass

import grpc
import uvloop

from serving.replica.proto import replica_pb2 as pb
from serving.replica.proto.replica_pb2_grpc import ReplicaServicer, add_ReplicaServicer_to_server
from serving.replica.transport import SERVER_OPTIONS

MODEL = "scripted"
SLOTS = 100_000
TOKENS = (" the", " lighthouse", " keeper", " and", " her", " dog", " walked", ".")
IDLE = "idle"


@dataclass(slots=True)
class Answer:
    left: int
    count: int = 0


class ScriptedReplica(ReplicaServicer):
    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._load = pb.Load(total_slots=SLOTS, free_slots=SLOTS, total_pages=SLOTS, free_pages=SLOTS, page_size=16)

    def status(self) -> pb.Status:
        return pb.Status(state="ready", model=MODEL, max_seq_len=100_000, load=self._load)

    async def GetStatus(self, request, context):
        return self.status()

    async def Generate(self, requests, context):
        """The first token of an answer comes at once, with its acceptance; the others step by step."""
        running: dict[int, Answer] = {}
        unsent: asyncio.Queue[pb.ServerBatch] = asyncio.Queue(2)
        await context.write(pb.ServerBatch(status=self.status(), load=self._load))
        tasks = [asyncio.create_task(self._step(running, unsent)), asyncio.create_task(self._write(unsent, context))]
        try:
            async for batch in requests:
                for handle in batch.cancels:
                    running.pop(handle, None)
                if batch.submits:
                    await unsent.put(self._begin(batch.submits, running))
        finally:
            for task in tasks:
                task.cancel()

    @staticmethod
    async def _write(unsent, context):
        while True:
            await context.write(await unsent.get())

    def _begin(self, submits, running):
        news = pb.ServerBatch(load=self._load)
        begun = {}
        for submit in submits:
            news.accepted.add(handle=submit.handle, prompt_tokens=8)
            if IDLE not in (submit.text or submit.messages_json)[:60]:
                begun[submit.handle] = Answer(submit.sampling.max_tokens or 16)
        running |= begun
        self._tell(news, begun, running)
        return news

    async def _step(self, running, unsent):
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(due + self._step_s, loop.time())
            await asyncio.sleep(due - loop.time())
            if running:
                news = pb.ServerBatch(load=self._load)
                self._tell(news, running.copy(), running)
                await unsent.put(news)

    @staticmethod
    def _tell(news, answers, running):
        for handle, answer in answers.items():
            news.deltas.add(handle=handle, text=TOKENS[answer.count % len(TOKENS)], num_tokens=1)
            answer.count += 1
            answer.left -= 1
            if not answer.left:
                del running[handle]
                news.finished.add(
                    handle=handle, reason="length", prompt_tokens=8, completion_tokens=answer.count, cached_tokens=0
                )


async def serve(address: str, step_s: float) -> None:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    add_ReplicaServicer_to_server(ScriptedReplica(step_s), server)
    server.add_insecure_port(address)
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    parser.add_argument("--step-s", type=float, required=True)
    options = parser.parse_args()
    uvloop.run(serve(options.address, options.step_s))
