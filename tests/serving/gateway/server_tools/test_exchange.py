"""Tools that the gateway runs. The model says its prompt, or if results of tools came last, those."""

import asyncio
import json
from contextlib import asynccontextmanager
from functools import partialmethod

import pytest
from websockets.asyncio.client import connect

from serving.context import REQUEST_ID
from serving.gateway.server_tools import caller
from serving.gateway.server_tools.config import ServerTool, ServerTools
from serving.replica.client import ReplicaClient
from tests.fakes import FAKE_NAME, FakeEngineLoop, fake_card, sse_events
from tests.services import running_app, running_gateway, running_replica, until

CHAT = "/v1/chat/completions"
END = "§"
TEMPLATE = (
    "{% set results = messages | selectattr('role', 'equalto', 'tool') | map(attribute='content') | join(' ') %}"
    "{% if messages[-1]['role'] == 'tool' %}{{ results }}§{% else %}"
    "{% for m in messages %}{{ m['content'] }}{% endfor %}{% endif %}{# tools <tool_call> </think> #}"
)
OWN = {"type": "function", "function": {"name": "own", "parameters": {"type": "object"}}}


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


class Tools:
    """An HTTP server on a port of its own. `answers` holds a body by path, or (status, body); "" never answers."""

    def __init__(self):
        self.answers = {}
        self.asked = []
        self.num_open = 0

    @asynccontextmanager
    async def running(self, **changes):
        async with await asyncio.start_server(self._serve, "127.0.0.1") as server:
            port = server.sockets[0].getsockname()[1]
            names = ("weather", "clock", "slow")
            yield ServerTools(
                tool=[
                    ServerTool(name=name, url=f"http://127.0.0.1:{port}/{name}", timeout_s=0.2 if name == "slow" else 5,
                               headers={"x-key": "secret"}) for name in names
                ], **changes,
            )  # fmt: skip

    async def _serve(self, reader, writer):
        self.num_open += 1
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
                path = head.split()[1].strip("/")
                self.asked.append((path, json.loads(await reader.readexactly(length)), head.lower()))
                answer = self.answers.get(path, "")
                status, body = answer if isinstance(answer, tuple) else (200, answer)
                if not body:
                    await reader.read()
                    break
                writer.write(f"HTTP/1.1 {status} x\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())
        except (asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self.num_open -= 1
            writer.close()


@pytest.fixture(scope="module")
async def shared():
    async with running_replica(FakeEngineLoop(max_seq_len=2000), card=fake_card(TEMPLATE)) as running:
        yield running


@pytest.fixture(scope="module")
async def shared_tools():
    tools = Tools()
    async with tools.running() as served:
        yield tools, served


@pytest.fixture(scope="module")
async def http(shared, shared_tools):
    async with running_app(shared.address, tools=shared_tools[1]) as client:
        yield client


@pytest.fixture
def tools(shared_tools):
    tools = shared_tools[0]
    tools.answers, tools.asked = {}, []
    return tools


@pytest.fixture
def own_tools():
    return Tools()


def body(says, **fields):
    messages = [{"role": "user", "content": says + END}]
    return {"model": FAKE_NAME, "messages": messages, "stop": END, "max_tokens": 300, **fields}


def choices_of(chunks):
    """Text, calls and reason of each choice of a stream, which ends once."""
    found = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        told = found.setdefault(choice["index"], ["", [], None])
        assert told[2] is None, "one end, whatever the number of rounds"
        told[0] += choice["delta"].get("content", "")
        told[1] += choice["delta"].get("tool_calls", ())
        told[2] = choice["finish_reason"]
    return [tuple(found[index]) for index in sorted(found)]


async def whole(http, says, **fields):
    response = await http.post(CHAT, json=body(says, **fields))
    assert response.status_code == 200, response.text
    answer = response.json()
    return answer["choices"][0]["message"], answer["choices"][0]["finish_reason"], answer["usage"]


async def streamed(http, says, **fields):
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage, done = sse_events((await http.post(CHAT, json=body(says, **options, **fields))).text)
    assert done == "[DONE]"
    return *choices_of(chunks)[0], usage["usage"]


async def test_a_tool_is_run_and_the_answer_goes_on_with_its_result(http, tools):
    tools.answers["weather"] = "7 degrees"
    says = "Let me see. " + call("weather", city="Oslo")
    message, reason, usage = await whole(http, says)
    assert (message["content"], reason) == ("Let me see.\n\n7 degrees", "stop")
    assert "tool_calls" not in message
    assert await streamed(http, says) == (message["content"], [], "stop", usage)
    path, arguments, head = tools.asked[0]
    assert (path, arguments) == ("weather", {"city": "Oslo"})
    assert "x-key: secret" in head and "x-request-id: " in head
    assert usage["completion_tokens"] == len(f"{says}{END}7 degrees{END}".encode())
    assert usage["prompt_tokens"] == len(f"{says}{END}7 degrees{END}".encode())


async def test_calls_of_one_round_run_together_and_answer_in_order(http, tools):
    tools.answers |= {"weather": "rain", "clock": "noon"}
    message, _, _ = await whole(http, call("clock") + call("weather", city="Oslo"))
    assert message["content"] == "noon rain"


SEVERAL = {"n": 3, "seed": 0, "messages": [{"role": "user", "content": "x" + call("clock") + END}]}
"""The fake engine's seed is where it begins: with words before a call, the call, and what is none any more."""


async def test_each_of_several_answers_has_its_own_rounds(http, tools):
    """They are what single requests get, whose seeds count on; the prompt of the first round is computed once."""
    tools.answers["clock"] = "noon"
    answer = (await http.post(CHAT, json=body("", **SEVERAL))).json()
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert texts == ["x\n\nnoon", "oon", call("clock")[1:]] and len(tools.asked) == 2
    alone = [(await http.post(CHAT, json=body("", **SEVERAL | {"n": 1, "seed": seed}))).json() for seed in range(3)]
    assert [{**one["choices"][0], "index": index} for index, one in enumerate(alone)] == answer["choices"]
    sums = {name: sum(one["usage"][name] for one in alone) for name in ("prompt_tokens", "completion_tokens")}
    sums["prompt_tokens"] -= 2 * len(SEVERAL["messages"][0]["content"].encode())
    assert sums.items() <= answer["usage"].items()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage, _ = sse_events((await http.post(CHAT, json=body("", **SEVERAL, **options))).text)
    assert choices_of(chunks) == [(text, [], "stop") for text in texts]
    assert usage["usage"] == answer["usage"]


async def test_answers_without_calls_do_not_wait_for_the_tools_of_others(shared, own_tools):
    own_tools.answers["clock"] = ""
    fields = SEVERAL | {"stream": True, "n": 4}
    async with own_tools.running() as served, running_gateway(shared.address, tools=served) as gateway:
        async with gateway.http.stream("POST", CHAT, json=body("", **fields)) as response:
            ended = set()
            async for line in response.aiter_lines():
                choice = json.loads(line[6:])["choices"][0] if line else {}
                ended |= {choice["index"]} if choice.get("finish_reason") else set()
                if ended == {2, 3}:
                    break
            assert gateway.admission.num_in_flight == 4, "the place is that of all"
        await until(lambda: not own_tools.num_open and gateway.admission.num_in_flight == 0)
        assert gateway.client.num_in_flight == 0


async def test_what_is_told_as_used_while_an_answer_is_written(http, tools):
    tools.answers["clock"] = "noon"
    options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    *chunks, usage, _ = sse_events((await http.post(CHAT, json=body(call("clock"), **options))).text)
    first, last = chunks[0]["usage"], chunks[-1]["usage"]
    assert first["prompt_tokens"] == len(call("clock") + END) + 1 < last["prompt_tokens"]
    assert last["prompt_tokens"] == usage["usage"]["prompt_tokens"]
    assert last["completion_tokens"] == usage["usage"]["completion_tokens"]


async def test_rounds_know_the_request_that_they_belong_to(http, tools, monkeypatch):
    """Traces and logs find it by context, whoever brings the news that begin a round."""
    tools.answers["clock"] = "noon"
    seen = []
    monkeypatch.setattr(ReplicaClient, "generate", partialmethod(_generate_and_tell, ReplicaClient.generate, seen))
    await http.post(CHAT, json=body(call("clock")), headers={"x-request-id": "mine"})
    assert seen == ["mine", "mine"]


def _generate_and_tell(client, generate, seen, request):
    seen.append(REQUEST_ID.get())
    return generate(client, request)


async def test_rounds_end_at_the_limit_and_then_nothing_can_be_called(shared, own_tools):
    own_tools.answers["clock"] = again = call("clock")
    async with own_tools.running(max_rounds=2) as served, running_app(shared.address, tools=served) as http:
        message, reason, _ = await whole(http, again)
    assert len(own_tools.asked) == 2
    assert (message["content"], reason) == (f"{again} {again}", "stop"), "what looks like a call is text then"


@pytest.mark.parametrize(
    ("says", "answers", "told"),
    [
        (call("weather"), {"weather": (500, "out of rain")}, "error: weather answered with status 500: out of rain"),
        (call("slow"), {}, "error: slow did not answer within 0.2 s."),
        (call("clock"), {"clock": "x" * 5000}, "error: the answer of clock is larger than 4,096 bytes."),
        ('<tool_call>{"name": "clock", "arguments": {"a": oops}}</tool_call>', {}, "error: the arguments of clock are"),
        ('<tool_call>{"name": "clock", "arguments": "[1]"}</tool_call>', {}, "error: the arguments of clock must be a"),
    ],
)  # fmt: skip
async def test_what_goes_wrong_is_told_to_the_model(http, tools, monkeypatch, says, answers, told):
    monkeypatch.setattr(caller, "MAX_RESULT_BYTES", 4096)
    tools.answers |= answers
    message, reason, _ = await whole(http, says)
    assert message["content"].startswith(told) and reason == "stop"


async def test_a_tool_that_is_not_there_is_told_to_the_model(shared):
    served = ServerTools(tool=[ServerTool(name="gone", url="http://127.0.0.1:9/")])
    async with running_app(shared.address, tools=served) as http:
        assert (await whole(http, call("gone")))[0]["content"] == "error: gone cannot be reached."
        figures = (await http.get("/metrics")).text
    assert 'podstream:server_tool_calls_total{outcome="failed",tool="gone"} 1.0' in figures


async def test_calls_of_the_clients_tools_end_the_answer_as_ever(http, tools):
    says = call("clock") + call("own", a=1)
    message, reason, _ = await whole(http, says, tools=[OWN])
    assert [(c["function"]["name"], c["function"]["arguments"]) for c in message["tool_calls"]] == [("own", '{"a": 1}')]
    assert reason == "tool_calls" and not tools.asked
    _, calls, reason, _ = await streamed(http, says, tools=[OWN])
    assert {c["index"] for c in calls} == {0} and reason == "tool_calls"


async def test_a_tool_of_the_clients_own_hides_the_servers(http, tools):
    own = {"type": "function", "function": {"name": "clock"}}
    message, reason, _ = await whole(http, call("clock"), tools=[own])
    assert message["tool_calls"][0]["function"]["name"] == "clock" and reason == "tool_calls"
    assert not tools.asked


async def test_a_forced_call_is_forced_once(http, tools):
    tools.answers["clock"] = "noon"
    named = {"type": "function", "function": {"name": "clock"}}
    for choice in ("required", named):
        fields = {"tool_choice": choice, "server_tools": ["clock"], "parallel_tool_calls": False}
        message, reason, _ = await whole(http, "x", **fields)
        assert (message["content"], reason) == ("noon", "stop")


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "clock"}}])
@pytest.mark.parametrize("cut", [{"stop": ["}"]}, {"max_tokens": 12}], ids=["stop", "length"])
async def test_a_call_that_is_cut_is_not_run(http, tools, choice, cut):
    """A stop string ends one that was forced by name for the same reason as its own end."""
    says = call("weather", city={"a": "Oslo and more than that"})
    message, reason, _ = await whole(http, says, tool_choice=choice, parallel_tool_calls=False, **cut)
    assert (message["content"], reason, tools.asked) == ("", "length" if "max_tokens" in cut else "stop", [])


async def test_the_limit_of_tokens_is_that_of_the_whole_answer(http, tools):
    tools.answers["clock"] = "noon and a bit"
    says = call("clock")
    limit = len(says) + 2 + 4  # the call, its end, and four letters more
    message, reason, usage = await whole(http, says, max_tokens=limit)
    assert (message["content"], reason, usage["completion_tokens"]) == ("noon", "length", limit)


@pytest.mark.parametrize("fields", [{"server_tools": []}, {"tool_choice": "none"}, {"server_tools": ["slow"]}])
async def test_what_is_not_offered_is_text(http, tools, fields):
    message, _, _ = await whole(http, call("clock"), **fields)
    assert message["content"] == call("clock") and not tools.asked


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"server_tools": ["rain"]}, "names 'rain'; this gateway runs weather, clock, slow"),
        ({"server_tools": "clock"}, "server_tools"),
    ],
)
async def test_refusals(http, fields, words):
    response = await http.post(CHAT, json=body("x", **fields))
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "server_tools" and words in error["message"]


async def test_no_round_may_use_more_than_is_left(http, tools):
    tools.answers["clock"] = call("clock")
    used = [len(call("clock") + END) + 1, *[len(call("clock") + END) + 1] * 2]
    _, reason, usage = await whole(http, call("clock"), max_tokens=sum(used))
    assert (usage["completion_tokens"], reason) == (sum(used), "length")


async def test_every_protocol_runs_them(shared, own_tools):
    own_tools.answers["clock"] = "noon"
    asked = body(call("clock"))
    async with own_tools.running() as served, running_gateway(shared.address, tools=served) as gateway:
        short = await gateway.http.post("/v1/chat", json=asked | {"stream": False})
        assert short.json()["text"] == "noon"
        named = {"type": "function", "name": "clock"}
        response = await gateway.http.post(
            "/v1/responses", json={"model": FAKE_NAME, "input": "x", "max_output_tokens": 60, "tool_choice": named}
        )
        (item,) = response.json()["output"]
        assert item["content"][0]["text"].startswith("noon")
        async with connect(f"{gateway.url.replace('http', 'ws')}/v1/chat/ws") as socket:
            await socket.send(json.dumps({"type": "chat", **asked}))
            events = []
            while not events or events[-1]["type"] != "usage":
                events.append(json.loads(await socket.recv()))
        assert "".join(event.get("text", "") for event in events) == "noon"
        assert [event["finish_reason"] for event in events if event["type"] == "end"] == ["stop"]
        await until(lambda: gateway.admission.num_in_flight == gateway.client.num_in_flight == 0)


async def test_a_client_that_leaves_ends_the_tool_and_gives_its_place_back(shared, own_tools):
    async with own_tools.running() as served, running_gateway(shared.address, tools=served) as gateway:
        asking = asyncio.create_task(gateway.http.post(CHAT, json=body(call("weather"), stream=True)))
        await until(lambda: own_tools.asked)
        assert gateway.admission.num_in_flight == 1, "its place is held while the tool runs"
        asking.cancel()
        await asyncio.wait([asking])
        await until(lambda: not own_tools.num_open and gateway.admission.num_in_flight == 0)
        assert gateway.client.num_in_flight == 0


async def test_a_replica_that_goes_away_meanwhile_is_an_error_in_the_stream(own_tools):
    async with (
        running_replica(FakeEngineLoop(max_seq_len=2000), card=fake_card(TEMPLATE)) as replica,
        own_tools.running() as served,
        running_gateway(replica.address, tools=served) as gateway,
    ):
        asking = asyncio.create_task(gateway.http.post(CHAT, json=body(call("slow"), stream=True)))
        await until(lambda: own_tools.asked)
        await replica.server.stop(0)
        events = sse_events((await asking).text)
    assert events[-1]["error"]["code"] == "replica_unavailable"
