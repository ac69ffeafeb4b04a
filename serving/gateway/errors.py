"""Errors as OpenAI clients expect them: {"error": {message, type, param, code}} with the right status."""

import logging
from collections.abc import Mapping

import orjson
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from serving.errors import EngineFailed, InvalidRequest, ReplicaError, RequestError, ServiceError
from serving.gateway.methods import allowed_methods

logger = logging.getLogger(__name__)

MAX_MESSAGE_CHARS = 2_000
MAX_PARAM_CHARS = 200


class BodyTooLarge(InvalidRequest):
    http_status, code = 413, "request_too_large"


class BodyTooSlow(RequestError):
    http_status, code = 408, "request_timeout"


class TooManyBodies(ReplicaError):
    http_status, code = 503, "too_many_bodies"


class NoSuchPath(RequestError):
    http_status, code = 404, "not_found"


class WrongMethod(RequestError):
    http_status, code = 405, "method_not_allowed"


def error_json(error: ServiceError) -> bytes:
    return orjson.dumps({"error": error_fields(error)})


def error_fields(error: ServiceError) -> dict[str, str | None]:
    """What was sent may stand in them, so they are cut: nobody reads megabytes of it."""
    message, param = str(error), error.param
    if len(message) > MAX_MESSAGE_CHARS:
        message = f"{message[:MAX_MESSAGE_CHARS]} ..."
    return {
        "message": message,
        "type": error.openai_type,
        "param": param if param is None else param[:MAX_PARAM_CHARS],
        "code": error.code,
    }


def error_response(error: ServiceError, headers: Mapping[str, str] | None = None) -> Response:
    all_headers = dict(headers or {})
    if error.retry_after_s is not None:
        all_headers["retry-after"] = str(error.retry_after_s)
    if error.should_retry is not None:
        all_headers["x-should-retry"] = str(error.should_retry).lower()
    return Response(error_json(error), error.http_status, all_headers, media_type="application/json")


def add_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(ServiceError, _on_service_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_bug)


async def _on_service_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServiceError)
    return error_response(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """What the router raises: no such path, or the path with another method."""
    assert isinstance(error, HTTPException)
    if error.status_code == WrongMethod.http_status:
        allow = {"allow": ", ".join(allowed_methods(request.app.routes, request.scope))}
        if request.method == "OPTIONS":
            return Response(status_code=204, headers=allow)
        return error_response(WrongMethod(f"{request.url.path} does not take {request.method}."), allow)
    return error_response(NoSuchPath(f"there is nothing at {request.method} {request.url.path}."))


async def _on_disconnect(request: Request, error: Exception) -> Response:
    """The client went before its body was there, which is its right: nobody reads this, and nothing is logged."""
    return error_response(InvalidRequest("the body has no end."))


async def _on_bug(request: Request, error: Exception) -> Response:
    """The server logs the traceback after this answer."""
    return error_response(EngineFailed("the gateway failed on this request; its log says why."))
