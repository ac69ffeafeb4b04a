"""The short form's body: a chat completion's, but that the model need not be named and streaming is the default."""

from collections.abc import Mapping
from typing import Any

from serving.errors import InvalidRequest
from serving.gateway.call import Services
from serving.gateway.chats import Chat
from serving.gateway.schema import ChatBody, parse_chat

NOT_TOLD = {"logprobs": False, "top_logprobs": 0, "stream_options": None, "prompt_logprobs": None}
"""Fields that the short form's events have no place for, at the value that asks for nothing."""


class ShortBody(ChatBody):
    """As /openapi.json describes it."""

    model: str = ""


def read_short(services: Services, fields: Mapping[str, Any]) -> Chat:
    """Raises InvalidRequest."""
    return Chat.read(services, fields, lambda offered: _parse(offered, services.replica.status.model))


def _parse(fields: Mapping[str, Any], served: str) -> ChatBody:
    for name, nothing in NOT_TOLD.items():
        if fields.get(name) not in (None, nothing):
            raise InvalidRequest(f"{name} is not told in the short form; use /v1/chat/completions.", param=name)
    if fields.get("n") not in (None, 1):
        raise InvalidRequest("the short form has one answer; leave n out.", param="n")
    return parse_chat({"stream": True, **fields, "model": fields.get("model") or served})
