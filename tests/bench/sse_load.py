"""Clients of one gateway that cost little themselves: sockets that count events, in a process of their own.

    python -m tests.bench.sse_load --port 8000 streams --count 1000 --tokens 1000 --seconds 5
    python -m tests.bench.sse_load --port 8000 arrivals --per-s 200 --seconds 10
    python -m tests.bench.sse_load --port 8000 idle --count 5000

Prints one JSON line. `streams` and `idle` first say how many are open, and wait for a line before they count, or until
their input ends.
"""

import argparse
import asyncio
import json
import os
import sys
import time

import uvloop

EVENT = b"data: {"
CONTENT = b'"content":"'
EMPTY = b'"content":""'
DONE = b"data: [DONE]"
OPEN_AT_ONCE = 200
LOOK_S = 0.02


class Client(asyncio.Protocol):
    """One request on one connection; counts what comes."""

    def __init__(self, request: bytes) -> None:
        loop = asyncio.get_running_loop()
        self._request = request
        self._tail = b""
        self.status, self.ended = loop.create_future(), loop.create_future()
        self.num_events = 0
        self.sent_s = self.first_s = self.last_s = 0.0

    def connection_made(self, transport):
        self.transport = transport
        self.sent_s = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data):
        if not self.status.done():
            self.status.set_result(data[9:12])
        self.num_events += data.count(EVENT)
        if not self.first_s and data.count(CONTENT) > data.count(EMPTY):
            self.first_s = time.perf_counter()
        self._tail = (self._tail + data)[-40:]
        if DONE in self._tail and not self.ended.done():
            self.last_s = time.perf_counter()
            self.ended.set_result(None)
            self.transport.close()

    def connection_lost(self, exc):
        for future in (self.status, self.ended):
            if not future.done():
                future.set_exception(exc or ConnectionError("closed early"))
                future.exception()


def request_bytes(port: int, text: str, tokens: int, path: str) -> bytes:
    messages = [{"role": "user", "content": text}]
    body = json.dumps({"model": "scripted", "messages": messages, "max_tokens": tokens, "stream": True}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


async def open_client(port: int, request: bytes) -> Client:
    loop = asyncio.get_running_loop()
    return (await loop.create_connection(lambda: Client(request), "127.0.0.1", port))[1]


async def streams(port: int, count: int, tokens: int, seconds: float, path: str) -> dict[str, float]:
    """Events of streams that are all under way, and none of which ends meanwhile."""
    clients = await open_clients(port, count, request_bytes(port, "go", tokens, path))
    await asyncio.to_thread(sys.stdin.readline)
    for client in clients:
        client.transport.pause_reading()
    sockets = [client.transport.get_extra_info("socket").fileno() for client in clients]
    started = time.perf_counter()
    events = count_events(sockets, started + seconds)
    return {"events": events, "wall_s": time.perf_counter() - started}


def count_events(sockets: list[int], until_s: float) -> int:
    """Looks from time to time: whoever sends to a client that waits pays for waking it, which clients on other machines
    would not ask of a server."""
    events = 0
    while time.perf_counter() < until_s:
        time.sleep(LOOK_S)
        for socket in sockets:
            try:
                data = os.read(socket, 1 << 16)
            except BlockingIOError:
                continue
            assert data and DONE not in data, "a stream ended while its events were counted"
            events += data.count(EVENT)
    return events


async def open_clients(port: int, count: int, request: bytes) -> list[Client]:
    clients: list[Client] = []
    while len(clients) < count:
        opened = [await open_client(port, request) for _ in range(min(OPEN_AT_ONCE, count - len(clients)))]
        statuses = await asyncio.gather(*(client.status for client in opened))
        assert set(statuses) == {b"200"}, set(statuses)
        clients += opened
    print(json.dumps({"open": len(clients)}), flush=True)
    return clients


async def arrivals(port: int, per_s: float, seconds: float, tokens: int, path: str) -> dict[str, float]:
    """Evenly spaced, whatever the answers do; each on a new connection."""
    request = request_bytes(port, "go", tokens, path)
    loop, clients = asyncio.get_running_loop(), []
    started = loop.time()

    async def one() -> None:
        client = await open_client(port, request)
        clients.append(client)
        await client.ended

    tasks = []
    for number in range(int(per_s * seconds)):
        await asyncio.sleep(max(0.0, started + number / per_s - loop.time()))
        tasks.append(asyncio.create_task(one()))
    await asyncio.gather(*tasks)
    ttft_ms = sorted(1000 * (client.first_s - client.sent_s) for client in clients)
    return {"requests": len(clients), "p50_ms": ttft_ms[len(ttft_ms) // 2], "p95_ms": ttft_ms[int(0.95 * len(ttft_ms))],
            "p99_ms": ttft_ms[int(0.99 * len(ttft_ms))], "wall_s": loop.time() - started}  # fmt: skip


async def idle(port: int, count: int, path: str) -> dict[str, float]:
    clients = await open_clients(port, count, request_bytes(port, "idle", 16, path))
    await asyncio.to_thread(sys.stdin.read)
    return {"still_open": sum(not client.ended.done() for client in clients)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--path", default="/v1/chat/completions")
    parser.add_argument("kind", choices=("streams", "arrivals", "idle"))
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--per-s", type=float, default=200)
    parser.add_argument("--seconds", type=float, default=10)
    options = parser.parse_args()
    match options.kind:
        case "streams":
            work = streams(options.port, options.count, options.tokens, options.seconds, options.path)
        case "arrivals":
            work = arrivals(options.port, options.per_s, options.seconds, options.tokens, options.path)
        case _:
            work = idle(options.port, options.count, options.path)
    print(json.dumps(uvloop.run(work)), flush=True)


if __name__ == "__main__":
    main()
