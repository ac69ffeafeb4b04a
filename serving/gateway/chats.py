"""Chat: a chat that was understood, from whichever protocol, with the tools that the server runs for it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from serving.gateway.call import Call, Services
from serving.gateway.exchange import CallExchange, Exchange
from serving.gateway.schema import ChatBody, parse_chat
from serving.gateway.server_tools.config import ServerTool
from serving.gateway.server_tools.exchange import ToolExchange


@dataclass(frozen=True, slots=True)
class Chat:
    services: Services
    body: ChatBody
    tools: Mapping[str, ServerTool]

    @classmethod
    def read(
        cls,
        services: Services,
        fields: Mapping[str, Any],
        parse: Callable[[Mapping[str, Any]], ChatBody] = parse_chat,
    ) -> "Chat":
        """Raises InvalidRequest."""
        offered, tools = services.tools.offer(fields)
        return cls(services, parse(offered), tools)

    def exchange(self, request_id: str) -> Exchange:
        """Raises InvalidRequest for what only shows when all is put together."""
        services, body = self.services, self.body
        if self.tools:
            return ToolExchange(services, body, request_id, self.tools)
        call = Call(services, body.to_request(request_id))
        return CallExchange(call, body.speech_plan(services.replica.status))
