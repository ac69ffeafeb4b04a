"""ToolCaller: runs a tool over HTTP. Whatever goes wrong there is told to the model, which may know a way out."""

import logging
import time

import httpx
import orjson
from prometheus_client import CollectorRegistry, Counter, Histogram

from serving.gateway.choice import ToolCall
from serving.gateway.request_id import HEADER
from serving.gateway.server_tools.config import ServerTool

logger = logging.getLogger(__name__)

MAX_RESULT_BYTES = 64 << 10
MAX_QUOTED = 200  # characters of what a tool says when it fails
SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class ToolFailed(Exception):
    """The sentence is for the model."""


class ToolCaller:
    """Shares its connections among all calls."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._http: httpx.AsyncClient | None = None  # made when it is needed: its certificates take time to read
        self._calls = Counter(
            "podstream:server_tool_calls", "Tools that the gateway ran.", ("tool", "outcome"), registry=registry
        )
        self._seconds = Histogram(
            "podstream:server_tool_seconds", "How long they took.", ("tool",), buckets=SECONDS, registry=registry
        )

    async def close(self) -> None:
        if self._http is not None:
            await self._http.aclose()

    async def run(self, tool: ServerTool, call: ToolCall, request_id: str) -> str:
        """The result, or what the model is told instead. Never raises but when it is cancelled."""
        started, outcome = time.perf_counter(), "cancelled"
        try:
            result = await self._post(tool, _arguments(call), request_id)
            outcome = "ok"
        except ToolFailed as failure:
            outcome, result = "failed", f"error: {failure}"
            logger.warning("request %s: the tool %s failed: %s", request_id, tool.name, failure)
        finally:
            self._calls.labels(tool.name, outcome).inc()
            self._seconds.labels(tool.name).observe(time.perf_counter() - started)
        return result

    async def _post(self, tool: ServerTool, arguments: bytes, request_id: str) -> str:
        headers = {"content-type": "application/json", HEADER: request_id, **tool.headers}
        if self._http is None:
            self._http = httpx.AsyncClient(trust_env=False, follow_redirects=False)
        try:
            async with self._http.stream(
                "POST", tool.url, content=arguments, headers=headers, timeout=tool.timeout_s
            ) as response:
                body = await _read_bounded(response, tool, time.perf_counter() + tool.timeout_s)
        except httpx.TimeoutException as error:
            raise _too_slow(tool) from error
        except httpx.HTTPError as error:
            raise ToolFailed(f"{tool.name} cannot be reached.") from error
        text = body.decode(errors="replace")
        if not response.is_success:
            raise ToolFailed(f"{tool.name} answered with status {response.status_code}: {text[:MAX_QUOTED]}")
        return text


def _arguments(call: ToolCall) -> bytes:
    try:
        arguments = orjson.loads(call.arguments)
    except orjson.JSONDecodeError as error:
        raise ToolFailed(f"the arguments of {call.name} are not valid JSON: {error}.") from error
    if not isinstance(arguments, dict):
        raise ToolFailed(f"the arguments of {call.name} must be a JSON object.")
    return orjson.dumps(arguments)


async def _read_bounded(response: httpx.Response, tool: ServerTool, until_s: float) -> bytes:
    """httpx times each read; a tool that dribbles is too slow as well."""
    parts: list[bytes] = []
    size = 0
    async for part in response.aiter_bytes():
        size += len(part)
        if size > MAX_RESULT_BYTES:
            raise ToolFailed(f"the answer of {tool.name} is larger than {MAX_RESULT_BYTES:,} bytes.")
        if time.perf_counter() > until_s:
            raise _too_slow(tool)
        parts.append(part)
    return b"".join(parts)


def _too_slow(tool: ServerTool) -> ToolFailed:
    return ToolFailed(f"{tool.name} did not answer within {tool.timeout_s:g} s.")
