"""The short form of chats, over SSE and WebSocket."""

import asyncio
import json

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosedError

from tests.fakes import FAKE_NAME, fake_card, sse_events
from tests.services import running_gateway, until

CHAT = "/v1/chat"
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{# tools <tool_call> </think> #}"
TOOL = {"type": "function", "function": {"name": "look"}}
ANSWER = '<think>hm</think>\nSee.\n<tool_call>\n{"name": "look", "arguments": {"at": 3}}\n</tool_call>'


@pytest.fixture(scope="module")
def service():
    return {"card": fake_card(TEMPLATE)}


def body(text="abc", **fields):
    return {"messages": [{"role": "user", "content": text}], "max_tokens": len(text.encode()), **fields}


def join(events):
    """Neighbours of one kind as one."""
    joined = []
    for event in events:
        same = joined and event["type"] in ("text", "reasoning", "tool_arguments")
        if same and joined[-1]["type"] == event["type"]:
            joined[-1]["text"] += event["text"]
        else:
            joined.append(dict(event))
    return joined


async def test_events_are_text_then_the_end_then_usage(http):
    *events, end, usage = sse_events((await http.post(CHAT, json=body())).text)
    assert join(events) == [{"type": "text", "text": "abc"}]
    assert end == {"type": "end", "finish_reason": "length"}
    assert (usage["type"], usage["prompt_tokens"], usage["completion_tokens"]) == ("usage", 3, 3)


async def test_thoughts_and_calls(http):
    *events, end, _ = sse_events((await http.post(CHAT, json=body(ANSWER, tools=[TOOL]))).text)
    reasoning, text, call, arguments = join(events)
    assert (reasoning["text"], text["text"]) == ("hm", "See.")
    assert (call["type"], call["index"], call["name"]) == ("tool_call", 0, "look")
    assert (arguments["index"], arguments["text"]) == (0, '{"at": 3}')
    whole = (await http.post(CHAT, json=body(ANSWER, tools=[TOOL], stream=False))).json()
    assert (whole["text"], whole["reasoning"], whole["finish_reason"]) == ("See.", "hm", end["finish_reason"])
    assert whole["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"at": 3}'}


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"messages": []}, "messages"), ({"n": 2}, "n"), ({"logprobs": True}, "logprobs"), ({"what": 1}, "what")],
)
async def test_a_field_is_refused_by_name(http, fields, param):
    response = await http.post(CHAT, json=body() | fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_another_model(http):
    assert (await http.post(CHAT, json=body(model="gpt-9"))).status_code == 404
    assert (await http.post(CHAT, json=body(model=FAKE_NAME))).status_code == 200


async def test_an_error_is_the_last_event(gateway, engine):
    engine.step_delay_s = 0.005
    async with gateway.http.stream("POST", CHAT, json=body(max_tokens=400)) as response:
        frames = response.aiter_text()
        await anext(frames)
        engine.fail()
        events = sse_events("".join([piece async for piece in frames]))
    assert (events[-1]["type"], events[-1]["error"]["code"]) == ("error", "engine_failed")


def connected(gateway):
    return connect(gateway.url.replace("http", "ws") + "/v1/chat/ws", proxy=None)


@pytest.fixture
async def socket(shared_gateway):
    async with connected(shared_gateway) as socket:
        yield socket


@pytest.fixture
async def own_socket(gateway):
    async with connected(gateway) as socket:
        yield socket


async def say(socket, **message):
    await socket.send(json.dumps(message))


async def turn(socket):
    events = []
    while not events or events[-1]["type"] not in ("usage", "error"):
        events.append(json.loads(await asyncio.wait_for(socket.recv(), 5)))
    return events


async def test_several_turns_on_one_socket_are_those_of_sse(socket, http):
    for text in ("abc", ANSWER):
        asked = body(text, tools=[TOOL])
        await say(socket, type="chat", **asked)
        told = join(await turn(socket))
        over_sse = join(sse_events((await http.post(CHAT, json=asked)).text))
        assert [{**e, "id": 0} for e in told] == [{**e, "id": 0} for e in over_sse]


async def test_a_turn_can_be_cancelled_and_the_next_one_goes_on(own_socket, engine, gateway):
    engine.step_delay_s = 0.005
    await say(own_socket, type="chat", **body(max_tokens=400))
    await own_socket.recv()
    await say(own_socket, type="cancel")
    while (event := json.loads(await own_socket.recv()))["type"] != "end":
        pass
    assert event["finish_reason"] == "cancelled"
    await until(lambda: engine.aborted)
    await until(lambda: gateway.admission.num_in_flight == 0)
    await say(own_socket, type="chat", **body())
    assert (await turn(own_socket))[-1]["completion_tokens"] == 3


async def test_a_client_that_leaves_frees_its_slot(gateway, engine):
    engine.step_delay_s = 0.005
    async with connected(gateway) as socket:
        await say(socket, type="chat", **body(max_tokens=400))
        await socket.recv()
    await until(lambda: engine.aborted)
    await until(lambda: gateway.admission.num_in_flight == 0)


@pytest.mark.parametrize("message", ["{", "[]", '{"type": "dance"}', '{"type": "chat", "messages": []}', "{}"])
async def test_a_bad_message_is_told_and_the_socket_goes_on(socket, message):
    await socket.send(message)
    (error,) = await turn(socket)
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    await say(socket, type="chat", **body())
    assert (await turn(socket))[-1]["type"] == "usage"


async def test_one_turn_at_a_time(own_socket, engine):
    engine.go.clear()
    await say(own_socket, type="chat", **body())
    await say(own_socket, type="chat", **body())
    (error,) = await turn(own_socket)
    assert "a turn is running" in error["error"]["message"]
    engine.go.set()
    assert (await turn(own_socket))[-1]["type"] == "usage"


async def test_a_message_that_is_too_large_closes_the_socket(shared):
    async with (
        running_gateway(shared.address, max_body_bytes=1000) as gateway,
        connected(gateway) as socket,
    ):
        await say(socket, type="chat", **body("x" * 2000))
        with pytest.raises(ConnectionClosedError):
            await socket.recv()
        assert (await gateway.http.get("/ready")).status_code == 200
