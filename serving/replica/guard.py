"""Guard: who may call what on a replica's gRPC port; what is refused, is before anything of it is read.

1. With a secret, every call has to know it. Health stays open for probes and supervisors.
2. Without one, the replica listens at a Unix socket, whose file and folder say who may open it, or at loopback
   (`serving.config` sees to that). There any user of the machine may ask the model, as through the gateway; but what
   the gateway offers nobody, to stop the replica for good and to have it write files, is refused.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc

from serving.secret import Secret

OPEN = "/grpc.health.v1.Health/"
OPERATIONS = ("Drain", "Profile")
"""Calls of those who run the service, not of those who use it."""
WORDS = "this replica serves those who know its secret; give it with --secret-file."

Refusal = tuple[grpc.StatusCode, str]


class Guard(grpc.aio.ServerInterceptor):
    def __init__(self, secret: Secret | None, *, is_private: bool) -> None:
        """`is_private`: the replica listens at a Unix socket."""
        self._secret = secret
        self._is_private = is_private

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        metadata = tuple(handler_call_details.invocation_metadata or ())
        if refusal := self.refusal(handler_call_details.method, metadata):
            return _refuse(*refusal)
        return await continuation(handler_call_details)

    def refusal(self, method: str, metadata: tuple[tuple[str, str | bytes], ...]) -> Refusal | None:
        """Why a call of a method, such as `/package.Service/Name`, is refused; None when it is not."""
        if method.startswith(OPEN):
            return None
        if self._secret is not None:
            return None if self._secret.is_known_to(metadata) else (grpc.StatusCode.UNAUTHENTICATED, WORDS)
        if self._is_private or (name := method.rpartition("/")[2]) not in OPERATIONS:
            return None
        words = f"{name} at a port needs a secret; start the replica with --secret-file, or at a Unix socket."
        return grpc.StatusCode.PERMISSION_DENIED, words


def _refuse(code: grpc.StatusCode, words: str) -> Any:
    """A handler of streams: on the wire, calls of all kinds begin and end alike."""

    async def refuse(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:
        await context.abort(code, words)

    return grpc.stream_stream_rpc_method_handler(refuse)
