"""Who may ask: by the Host that is asked for, by the page that asks, and by what it calls its body."""

import json

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from serving.config import ConfigError, GatewayConfig
from serving.gateway.access import AccessRules
from tests.fakes import FAKE_NAME
from tests.services import running_app

COMPLETIONS = "/v1/completions"
BODY = json.dumps({"model": FAKE_NAME, "prompt": "abc", "max_tokens": 3})
JSON = {"content-type": "application/json"}
PAGE = "https://chat.example.com"
AS_JSON = {"origin": "http://localhost:3000", **JSON}


def rules(host="127.0.0.1", hosts=(), origins=()):
    return AccessRules.of(GatewayConfig(host=host, allow_hosts=hosts, allow_origins=origins))


def test_on_loopback_only_its_names_are_served_and_those_that_are_named():
    served = ("localhost", "127.0.0.1", "127.1.2.3", "[::1]", "app.localhost", "localhost.")
    for host in ("127.0.0.1", "localhost", "::1"):
        assert all(map(rules(host).serves_host, served))
        assert not any(map(rules(host).serves_host, ("evil.com", "10.0.0.7", "localhost.evil.com", "127.0.0.1.nip.io")))
    assert rules(hosts=("Gate.Lan",)).serves_host("gate.lan")
    assert rules(hosts=("*",)).serves_host("evil.com")


def test_elsewhere_any_name_is_served_until_some_are_named():
    assert rules("0.0.0.0").serves_host("anything")
    named = rules("0.0.0.0", hosts=("gate.lan",))
    assert all(map(named.serves_host, ("gate.lan", "localhost", "10.0.0.7", "[fe80::1]")))
    assert not named.serves_host("evil.com")


@pytest.mark.parametrize(
    ("of", "origin", "allowed"),
    [
        (rules(), "http://localhost:3000", True),
        (rules(), "http://127.0.0.1:5173", True),
        (rules(), "http://[::1]:5173", True),
        (rules(), PAGE, False),
        (rules(), "null", False),
        (rules(), "http://localhost.evil.com", False),
        (rules(), "app://localhost", False),
        (rules(origins=(PAGE,)), PAGE, True),
        (rules(origins=(PAGE,)), "http://chat.example.com", False),
        (rules(origins=("null",)), "null", True),
        (rules(origins=("*",)), PAGE, True),
        (rules("0.0.0.0"), "http://localhost:3000", False),
        (rules("0.0.0.0", origins=(PAGE,)), PAGE, True),
    ],
)
def test_origins(of, origin, allowed):
    assert of.allows_origin(origin) is allowed


def test_a_page_of_the_server_itself_may_ask_unless_its_name_could_be_anyones():
    assert rules("0.0.0.0").allows_origin("http://10.0.0.7:8000", "10.0.0.7:8000")
    assert rules("0.0.0.0", hosts=("gate.lan",)).allows_origin("http://gate.lan:8000", "gate.lan:8000")
    assert not rules("0.0.0.0").allows_origin("http://evil.com:8000", "evil.com:8000")
    assert not rules("0.0.0.0").allows_origin("http://10.0.0.7:9000", "10.0.0.7:8000")


@pytest.mark.parametrize(
    "wrong",
    [
        {"allow_origins": ("chat.example.com",)},
        {"allow_origins": (PAGE + "/",)},
        {"allow_hosts": (PAGE,)},
        {"allow_hosts": ("gate.lan:8000",)},
    ],
)
def test_names_that_cannot_match_are_refused_at_start(wrong):
    with pytest.raises(ConfigError, match="reads like"):
        GatewayConfig(**wrong)


@pytest.mark.parametrize(
    ("headers", "status", "way_out"),
    [
        ({"host": "evil.com"}, 403, "--allow-host evil.com"),
        ({"host": "evil.com:8000", "origin": "http://evil.com:8000"}, 403, "--allow-host evil.com"),
        ({"origin": PAGE, **JSON}, 403, f"--allow-origin {PAGE}"),
        ({"origin": "null", **JSON}, 403, "--allow-origin null"),
        ({"sec-fetch-site": "cross-site", **JSON}, 403, "--allow-origin"),
        ({"origin": "http://localhost:3000", "content-type": "text/plain;charset=UTF-8"}, 415, "application/json"),
        ({"origin": "http://localhost:3000"}, 415, "application/json"),
        ({"sec-fetch-site": "same-origin", "content-type": "text/plain"}, 415, "application/json"),
        (AS_JSON, 200, ""),
        ({"origin": "http://localhost:3000", "content-type": "application/json; charset=utf-8"}, 200, ""),
        ({"content-type": "text/plain"}, 200, ""),
        ({"sec-fetch-mode": "cors", "content-type": "text/plain;charset=UTF-8"}, 200, ""),  # fetch of Node
        ({}, 200, ""),
    ],
)
async def test_a_request_is_answered_or_told_what_would_let_it_pass(http, headers, status, way_out):
    answer = await http.post(COMPLETIONS, content=BODY, headers=headers)
    assert answer.status_code == status
    assert way_out in answer.text and "x-request-id" in answer.headers


async def test_a_link_may_be_followed_but_nothing_embedded(http):
    there = {"sec-fetch-site": "cross-site"}
    assert (await http.get("/health", headers=there | {"sec-fetch-mode": "navigate"})).status_code == 200
    assert (await http.get("/health", headers=there | {"sec-fetch-mode": "no-cors"})).status_code == 403
    form = there | {"sec-fetch-mode": "navigate"} | JSON
    assert (await http.post(COMPLETIONS, content=BODY, headers=form)).status_code == 403


ASKS = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}


async def test_a_preflight_of_an_allowed_page_is_answered(shared):
    async with running_app(shared.address, allow_origins=(PAGE,)) as http:
        for origin in (PAGE, "http://localhost:3000"):
            private = {"access-control-request-private-network": "true"}
            asked = await http.options(COMPLETIONS, headers={"origin": origin, **ASKS, **private})
            assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (200, origin)
            assert "POST" in asked.headers["access-control-allow-methods"]
            assert asked.headers["access-control-allow-headers"] == "authorization,content-type"
            assert asked.headers["access-control-allow-private-network"] == "true"
            answer = await http.post(COMPLETIONS, content=BODY, headers={"origin": origin, **JSON})
            assert answer.headers["access-control-allow-origin"] == origin
            assert answer.headers["access-control-expose-headers"] == "*"
            assert "Origin" in answer.headers["vary"]


async def test_an_allowed_page_can_read_why_it_is_refused(http):
    wrong = await http.post(COMPLETIONS, content="{", headers=AS_JSON)
    untyped = await http.post(COMPLETIONS, content=BODY, headers={"origin": AS_JSON["origin"]})
    assert (wrong.status_code, untyped.status_code) == (400, 415)
    assert {each.headers["access-control-allow-origin"] for each in (wrong, untyped)} == {AS_JSON["origin"]}


async def test_a_preflight_of_another_page_is_refused(http):
    asked = await http.options(COMPLETIONS, headers={"origin": PAGE, **ASKS})
    assert asked.status_code == 403 and "access-control-allow-origin" not in asked.headers


async def test_without_loopback_no_page_may_ask_that_is_not_named(shared):
    async with running_app(shared.address, host="0.0.0.0") as http:
        refused = await http.post(COMPLETIONS, content=BODY, headers=AS_JSON)
        plain = await http.post(COMPLETIONS, content=BODY, headers={"host": "anything.svc"})
    assert refused.status_code == 403 and "access-control-allow-origin" not in refused.headers
    assert plain.status_code == 200


@pytest.mark.parametrize("headers", [{"origin": PAGE}, {"host": "evil.com"}, {"sec-fetch-site": "cross-site"}])
async def test_a_socket_asks_under_the_same_rules(shared_gateway, headers):
    url = shared_gateway.url.replace("http", "ws") + "/v1/chat/ws"
    if "host" in headers:  # the client's own would be a second one
        url, at = "ws://evil.com/v1/chat/ws", shared_gateway.url.removeprefix("http://").split(":")
        opening = connect(url, proxy=None, host=at[0], port=int(at[1]))
    else:
        opening = connect(url, proxy=None, additional_headers=headers)
    with pytest.raises(InvalidStatus) as refused:
        await opening
    assert refused.value.response.status_code == 403


async def test_a_socket_of_an_allowed_page_is_opened(shared_gateway):
    url = shared_gateway.url.replace("http", "ws") + "/v1/chat/ws"
    async with connect(url, proxy=None, origin="http://localhost:3000") as socket:
        await socket.send("{}")
        assert json.loads(await socket.recv())["type"] == "error"
