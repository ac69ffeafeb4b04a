"""The least that streams of small events can cost a Python server: the same bytes to each connection, nothing else.

    python -m tests.bench.sse_floor --port 8000 --step-s 0.05

No HTTP is read, no gRPC, no JSON, no metrics: uvloop's `write`, and what the kernel takes for it. `--send` calls the
kernel from Python itself, which shows uvloop's share. `--once` answers with one event and the end.
"""

import argparse
import asyncio
import os

import uvloop

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
READY = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
EVENT = (
    b'data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk","created":1700000000,'
    b'"model":"scripted","choices":[{"index":0,"delta":{"content":" word"},"logprobs":null,"finish_reason":null}]}\n\n'
)
CHUNK = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


class Floor(asyncio.Protocol):
    def __init__(self, streams, *, once):
        self._streams, self._once = streams, once

    def connection_made(self, transport):
        self._transport = transport

    def data_received(self, data):
        if data.startswith(b"GET"):
            self._transport.write(READY)
            self._transport.close()
        elif self._once:
            self._transport.write(HEAD + CHUNK + END)
        else:
            self._transport.write(HEAD + CHUNK)
            self._streams[self._transport] = self._transport.get_extra_info("socket").fileno()

    def connection_lost(self, exc):
        self._streams.pop(self._transport, None)


async def serve(port: int, step_s: float, *, send: bool, once: bool) -> None:
    streams, loop = {}, asyncio.get_running_loop()
    await loop.create_server(lambda: Floor(streams, once=once), "127.0.0.1", port, backlog=2048)
    due = loop.time()
    while True:
        due = max(due + step_s, loop.time())
        await asyncio.sleep(due - loop.time())
        if send:
            for descriptor in [*streams.values()]:
                os.write(descriptor, CHUNK)
        else:
            for transport in [*streams]:
                transport.write(CHUNK)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--step-s", type=float, required=True)
    parser.add_argument("--send", action="store_true")
    parser.add_argument("--once", action="store_true")
    options = parser.parse_args()
    uvloop.run(serve(options.port, options.step_s, send=options.send, once=options.once))
