"""Guard: calls without the shared secret are refused before anything of them is read. Health stays open for probes."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc

from serving.secret import Secret

OPEN = "/grpc.health.v1.Health/"
WORDS = "this replica serves those who know its secret; give it with --secret-file."


class Guard(grpc.aio.ServerInterceptor):
    def __init__(self, secret: Secret) -> None:
        self._secret = secret

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        is_open = handler_call_details.method.startswith(OPEN)
        if is_open or self._secret.is_known_to(tuple(handler_call_details.invocation_metadata)):
            return await continuation(handler_call_details)
        return grpc.stream_stream_rpc_method_handler(_refuse)  # on the wire, calls of all kinds begin and end alike


async def _refuse(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, WORDS)
