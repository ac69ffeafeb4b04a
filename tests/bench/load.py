"""A closed-loop load: N streams, each sending its next completion when the last one has ended. Loopback only."""

import asyncio
import random
import time
from dataclasses import dataclass, field

import httpx
import orjson
from httpx_sse import aconnect_sse


@dataclass
class Level:
    """What one number of streams gave; times in seconds."""

    streams: int
    wall_s: float = 0.0
    output_tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)
    itl_s: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        return {
            "streams": self.streams,
            "output_tokens_per_s": round(self.output_tokens / self.wall_s, 1),
            "ttft_p50_ms": _milliseconds(self.ttft_s, 0.50),
            "ttft_p95_ms": _milliseconds(self.ttft_s, 0.95),
            "itl_p50_ms": _milliseconds(self.itl_s, 0.50),
            "itl_p95_ms": _milliseconds(self.itl_s, 0.95),
        }


def random_prompt(rng: random.Random, num_tokens: int) -> list[int]:
    """Plain tokens, different in every request, so that no prefix repeats."""
    return [rng.randrange(1_000, 20_000) for _ in range(num_tokens)]


async def run_level(url: str, model: str, streams: int, requests: int, prompt: int, output: int) -> Level:
    assert url.startswith("http://127.0.0.1:"), "load is sent to this machine only"
    level, rng = Level(streams), random.Random(streams)
    prompts = [random_prompt(rng, prompt) for _ in range(requests)]
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=None)) as client:

        async def worker() -> None:
            while prompts:
                await _one(client, model, prompts.pop(), output, level)

        started = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(streams):
                group.create_task(worker())
        level.wall_s = time.perf_counter() - started
    return level


async def _one(client: httpx.AsyncClient, model: str, prompt: list[int], output: int, level: Level) -> None:
    body = {
        "model": model, "prompt": prompt, "max_tokens": output, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    sent = last = time.perf_counter()
    async with aconnect_sse(client, "POST", "/v1/completions", json=body) as source:
        source.response.raise_for_status()
        async for event in source.aiter_sse():
            if event.data == "[DONE]":
                break
            now, chunk = time.perf_counter(), orjson.loads(event.data)
            if chunk.get("usage"):
                level.output_tokens += chunk["usage"]["completion_tokens"]
            if chunk["choices"]:
                (level.ttft_s if last == sent else level.itl_s).append(now - last)
                last = now


def _milliseconds(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return round(1_000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2)
