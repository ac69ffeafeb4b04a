"""HTTP as it is spoken: by clients that want another protocol, by old ones, and in forms that few of them use."""

import asyncio
import json

import pytest

from tests.fakes import FAKE_NAME, sse_events

COMPLETIONS = "/v1/completions"
WHOLE = json.dumps({"model": FAKE_NAME, "prompt": "abc", "max_tokens": 5})
STREAM = json.dumps({"model": FAKE_NAME, "prompt": "abc", "max_tokens": 5, "stream": True})
H2C = "connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
GET = "GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n"


def post(body, headers="", *, version="1.1", method="POST", path=COMPLETIONS):
    host = "host: 127.0.0.1\r\n" if version == "1.1" else ""
    return f"{method} {path} HTTP/{version}\r\n{host}{headers}content-length: {len(body)}\r\n\r\n{body}"


def chunked(body, headers=""):
    start = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: 127.0.0.1\r\n{headers}transfer-encoding: chunked\r\n\r\n"
    return f"{start}{len(body):x}\r\n{body}\r\n0\r\n\r\n"


class Wire:
    """A connection on which what is written and what comes is seen byte by byte."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer

    def say(self, *pieces):
        for piece in pieces:
            self.writer.write(piece.encode())

    async def hear(self):
        """One response with its length told: status, headers, body."""
        head = (await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 5)).decode().split("\r\n")
        headers = dict(line.split(": ", 1) for line in head[1:-2])
        body = await self.reader.readexactly(int(headers.get("content-length", "0")))
        return int(head[0].split()[1]), headers, body.decode()

    async def rest(self):
        """All until the server closes."""
        return (await asyncio.wait_for(self.reader.read(), 5)).decode()


@pytest.fixture
async def wire(shared_gateway):
    reader, writer = await asyncio.open_connection(*shared_gateway.url.removeprefix("http://").split(":"))
    yield Wire(reader, writer)
    writer.close()


def text_of(body):
    return json.loads(body)["choices"][0]["text"]


@pytest.mark.parametrize(
    "request_text",
    [post(WHOLE, H2C), chunked(WHOLE, H2C), post(WHOLE, H2C.replace("h2c", "foo/2, h2c")), post(WHOLE, H2C.upper())],
)
async def test_an_upgrade_that_is_not_spoken_is_ignored(wire, request_text):
    wire.say(request_text)
    status, _, body = await wire.hear()
    assert (status, text_of(body)) == (200, "abcab")
    wire.say(GET)
    assert (await wire.hear())[::2] == (200, '{"status":"ok"}')


async def test_requests_that_ask_for_upgrades_come_in_any_pieces(wire):
    for byte in post(WHOLE, H2C):
        wire.say(byte)
        await asyncio.sleep(0)
    assert text_of((await wire.hear())[2]) == "abcab"
    wire.say(*[post(WHOLE, H2C)] * 2, chunked(WHOLE, H2C), GET)
    assert [text_of((await wire.hear())[2]) for _ in range(3)] == ["abcab"] * 3
    assert (await wire.hear())[0] == 200


async def test_a_thousand_upgrades_at_once_are_answered_one_after_the_other(wire):
    count = 1200
    wire.say((f"GET /live HTTP/1.1\r\nhost: 127.0.0.1\r\n{H2C}\r\n") * count)
    assert {(await wire.hear())[0] for _ in range(count)} == {200}


async def test_only_a_get_becomes_a_websocket(wire):
    wire.say(post(WHOLE, "connection: upgrade\r\nupgrade: websocket\r\n"))
    assert text_of((await wire.hear())[2]) == "abcab"


async def test_a_websocket_may_be_one_of_several_offers(wire):
    key = "sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    upgrade = "connection: keep-alive, Upgrade\r\nupgrade: h2c, WebSocket\r\n"
    wire.say(f"GET /v1/chat/ws HTTP/1.1\r\nhost: 127.0.0.1\r\n{upgrade}{key}\r\n")
    status, headers, _ = await wire.hear()
    assert (status, headers["Sec-WebSocket-Accept"]) == (101, "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=")


@pytest.mark.parametrize("headers", ["", "connection: keep-alive\r\n", H2C, "expect: 100-continue\r\n"])
async def test_a_stream_for_http_1_0_ends_with_the_connection(wire, headers):
    wire.say(post(STREAM, headers, version="1.0"))
    head, _, body = (await wire.rest()).partition("\r\n\r\n")
    assert "transfer-encoding" not in head and "connection: close" in head and " 200 " in head.split("\r\n")[0]
    assert "".join(event["choices"][0]["text"] for event in sse_events(body)[:-1]) == "abcab"
    assert body.startswith("data: ") and body.endswith("data: [DONE]\n\n")


async def test_http_1_0_keeps_a_connection_only_where_it_asks_to(wire):
    for _ in range(2):
        wire.say(post(WHOLE, "connection: keep-alive\r\n", version="1.0"))
        status, headers, body = await wire.hear()
        assert (status, headers["connection"], text_of(body)) == (200, "keep-alive", "abcab")
    wire.say(post(WHOLE, version="1.0"))
    assert (await wire.hear())[1]["connection"] == "close"
    assert await wire.rest() == ""


PLAIN = ["/health", "/live", "/ready", "/metrics", "/v1/models", f"/v1/models/{FAKE_NAME}", "/openapi.json", "/nothing"]


@pytest.mark.parametrize("path", PLAIN)
async def test_head_says_what_get_would(shared_gateway, path):
    get, head = await shared_gateway.http.get(path), await shared_gateway.http.head(path)
    changing = {"date", "x-request-id"} | ({"content-length"} if path in ("/metrics", "/nothing") else set())
    assert head.status_code == get.status_code and head.content == b""
    assert {k: v for k, v in head.headers.items() if k not in changing} == {
        k: v for k, v in get.headers.items() if k not in changing
    }


async def test_a_connection_goes_on_after_a_head(wire):
    wire.say("HEAD /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
    head = (await asyncio.wait_for(wire.reader.readuntil(b"\r\n\r\n"), 5)).decode()
    assert "content-length: 15" in head
    wire.say(GET)
    assert (await wire.hear())[2] == '{"status":"ok"}'


ALLOWED = {
    "/health": "GET, HEAD, OPTIONS",
    "/v1/responses/x": "DELETE, GET, HEAD, OPTIONS",
    COMPLETIONS: "POST, OPTIONS",
}


@pytest.mark.parametrize("path", ALLOWED)
async def test_a_wrong_method_is_told_the_right_ones(shared_gateway, path):
    wrong, asked = [await shared_gateway.http.request(method, path) for method in ("PUT", "OPTIONS")]
    assert (wrong.status_code, wrong.headers["allow"]) == (405, ALLOWED[path])
    assert (asked.status_code, asked.headers["allow"], asked.content) == (204, ALLOWED[path], b"")


async def test_a_body_waits_for_its_invitation(wire):
    head, _, body = post(WHOLE, "expect: 100-continue\r\n").partition("\r\n\r\n")
    wire.say(head + "\r\n\r\n")
    assert (await wire.hear())[0] == 100
    wire.say(body)
    assert text_of((await wire.hear())[2]) == "abcab"


async def test_who_is_not_invited_may_go(wire):
    """Whether the body comes all the same nobody knows, so nothing else can come on this connection."""
    head = post(WHOLE, "expect: 100-continue\r\n").partition("\r\n\r\n")[0].rpartition(":")[0]
    wire.say(head + ": 99999999\r\n\r\n")
    status, headers, _ = await wire.hear()
    assert (status, headers["connection"]) == (413, "close")
    assert await wire.rest() == ""


SAME = {
    "its type is left out": post(WHOLE),
    "its path is quoted": post(WHOLE, path="/v1/%63ompletions"),
    "its target is absolute": post(WHOLE, path=f"http://127.0.0.1{COMPLETIONS}"),
    "trailers are welcome": post(WHOLE, "te: trailers\r\n"),
    "it is as it is": post(WHOLE, "content-encoding: identity\r\n"),
}


@pytest.mark.parametrize("name", SAME)
async def test_a_request_is_the_same_if(wire, name):
    wire.say(SAME[name])
    status, _, body = await wire.hear()
    assert (status, text_of(body)) == (200, "abcab")


REFUSED = {
    "two lengths": (post(WHOLE, f"content-length: {len(WHOLE)}\r\n"), 400),
    "a length and chunks": (chunked(WHOLE, "content-length: 5\r\n"), 400),
    "chunks of gzip": (chunked(WHOLE).replace("chunked", "gzip, chunked"), 415),
    "gzip": (post(WHOLE, "content-encoding: gzip\r\n"), 415),
    "a method in lower case": (post(WHOLE, method="post"), 400),
    "no host": (GET.replace("host: 127.0.0.1\r\n", ""), 400),
    "two hosts": (GET.replace("host", "host: localhost\r\nhost"), 400),
    "a host that is none": (GET.replace("127.0.0.1", "a b"), 400),
    "a tunnel": ("CONNECT example.com:443 HTTP/1.1\r\nhost: example.com:443\r\n\r\n", 400),
    "a path with a slash too many": (post(WHOLE, path=COMPLETIONS + "/"), 404),
    "an absolute target without a path": (GET.replace("/health", "http://127.0.0.1"), 404),
    "HTTP/2 at once": ("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_it_is_refused_for(wire, name):
    text, status = REFUSED[name]
    wire.say(text)
    assert (await wire.hear())[0] == status


async def test_a_client_that_leaves_amid_its_body_is_no_news(shared_gateway, wire, caplog):
    wire.say(post(WHOLE)[:-5])
    await asyncio.sleep(0.05)
    wire.writer.close()
    await asyncio.sleep(0.05)
    assert (await shared_gateway.http.get("/health")).status_code == 200
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
