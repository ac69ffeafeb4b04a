"""Whether a process that runs still answers: one that is frozen, or whose event loop is, has to be replaced, too."""

import asyncio
from collections.abc import Awaitable, Callable

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

Answers = Callable[[], Awaitable[bool]]
"""Asks once, for ANSWER_S at most."""

ASK_S = 2.0
"""Between two questions."""
ANSWER_S = 5.0
"""An answer that comes later is none."""
MISSES = 5
"""So many in a row, some thirty seconds: a machine that is busy, or starts another program, holds up a few."""

FIRST_MISSES = 150
"""Before the first answer, five minutes or more: what a program imports may lie far away."""


async def until_hung(answers: Answers) -> None:
    """Return when a process does not answer any more, or never began to. Counts questions, not seconds, which also pass
    while this process itself stands still."""
    missed, limit = 0, FIRST_MISSES
    while missed < limit:
        await asyncio.sleep(ASK_S)
        if await answers():
            missed, limit = 0, MISSES
        else:
            missed += 1


def http_answers(url: str) -> Answers:
    """For a gateway, which says that it is alive."""

    async def ask() -> bool:
        try:
            # Without TLS, of which a client reads all certificates when it is made: fifty milliseconds each time.
            async with httpx.AsyncClient(timeout=ANSWER_S, trust_env=False, verify=False) as client:
                return (await client.get(f"{url}/health")).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    return ask


def grpc_answers(address: str) -> Answers:
    """For a replica, which answers whether it is ready or not."""

    async def ask() -> bool:
        async with grpc.aio.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
            try:
                await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=ANSWER_S)
            except grpc.aio.AioRpcError:
                return False
        return True

    return ask
