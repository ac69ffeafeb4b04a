"""Loads for any server with OpenAI's API: requests, and streams that never rest. Sent to this machine only.

Prompts are token ids, answers have the asked length (`ignore_eos`), so that every server does the same work.
"""

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import httpx
import orjson
from httpx_sse import aconnect_sse

TIMEOUT_S = 600


@dataclass(frozen=True)
class Ask:
    prompt: list[int]
    max_tokens: int
    fields: Mapping[str, object] = field(default_factory=dict)
    """More of the body, such as a priority."""


@dataclass
class Answer:
    """When what came; times in seconds of one clock. Fills while it streams, so a cancelled one tells what it got."""

    sent_s: float
    chunks_s: list[float] = field(default_factory=list)
    """Arrival of each chunk with text. A chunk can hold several tokens."""
    output_tokens: int = 0
    """As the server counts; 0 until the end."""

    @property
    def ttft_s(self) -> float | None:
        return self.chunks_s[0] - self.sent_s if self.chunks_s else None

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in zip(self.chunks_s, self.chunks_s[1:], strict=False)]

    @property
    def tpot_s(self) -> float | None:
        """Mean time of a token after the first."""
        if self.output_tokens < 2 or not self.chunks_s:
            return None
        return (self.chunks_s[-1] - self.chunks_s[0]) / (self.output_tokens - 1)


@dataclass
class Level:
    """What one number of streams gave."""

    streams: int
    wall_s: float = 0.0
    answers: list[Answer] = field(default_factory=list)

    def summary(self) -> dict[str, float | None]:
        tokens = sum(answer.output_tokens for answer in self.answers)
        return {
            "streams": self.streams,
            "output_tokens_per_s": round(tokens / self.wall_s, 1),
            "requests_per_s": round(len(self.answers) / self.wall_s, 2),
            **latencies(self.answers),
        }


def latencies(answers: Sequence[Answer]) -> dict[str, float | None]:
    """Milliseconds; gaps are pooled over the answers, time per output token (tpot) is one value an answer."""
    ttft_s = [answer.ttft_s for answer in answers if answer.ttft_s is not None]
    gaps_s = [gap for answer in answers for gap in answer.gaps_s]
    tpot_s = [answer.tpot_s for answer in answers if answer.tpot_s is not None]
    return {
        "ttft_p50_ms": milliseconds(ttft_s, 0.50),
        "ttft_p95_ms": milliseconds(ttft_s, 0.95),
        "itl_p50_ms": milliseconds(gaps_s, 0.50),
        "itl_p95_ms": milliseconds(gaps_s, 0.95),
        "itl_p99_ms": milliseconds(gaps_s, 0.99),
        "tpot_p50_ms": milliseconds(tpot_s, 0.50),
    }


def milliseconds(seconds: Sequence[float], share: float) -> float | None:
    """The value that `share` of all do not exceed; None of nothing."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    return round(1_000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2)


def random_prompt(rng: random.Random, num_tokens: int) -> list[int]:
    """Plain tokens, different in every request, so that no prefix repeats."""
    return [rng.randrange(1_000, 20_000) for _ in range(num_tokens)]


class Client:
    """Asks one server."""

    def __init__(self, url: str, model: str) -> None:
        assert url.startswith("http://127.0.0.1:"), "load is sent to this machine only"
        self._model = model
        self._http = httpx.AsyncClient(
            base_url=url, timeout=TIMEOUT_S, limits=httpx.Limits(max_connections=None), trust_env=False
        )

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def ask(self, ask: Ask, log: list[Answer]) -> Answer:
        """The answer is put into `log` when the request is sent. Raises httpx.HTTPError when it is not served."""
        body = {
            "model": self._model, "prompt": ask.prompt, "max_tokens": ask.max_tokens, "temperature": 0,
            "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}, **ask.fields,
        }  # fmt: skip
        answer = Answer(time.perf_counter())
        log.append(answer)
        async with aconnect_sse(self._http, "POST", "/v1/completions", json=body) as source:
            source.response.raise_for_status()
            async for event in source.aiter_sse():
                if event.data == "[DONE]":
                    break
                now, chunk = time.perf_counter(), orjson.loads(event.data)
                if chunk.get("usage"):
                    answer.output_tokens = chunk["usage"]["completion_tokens"]
                if any(choice.get("text") or not choice.get("finish_reason") for choice in chunk["choices"]):
                    answer.chunks_s.append(now)
        return answer


async def run_level(url: str, model: str, streams: int, asks: Sequence[Ask]) -> Level:
    """All of `asks` by `streams` clients, each of which sends its next when its last has ended."""
    level, todo = Level(streams), list(reversed(asks))
    async with Client(url, model) as client:

        async def worker() -> None:
            while todo:
                await client.ask(todo.pop(), level.answers)

        started = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(streams):
                group.create_task(worker())
        level.wall_s = time.perf_counter() - started
    return level
