"""Tools and thoughts through the API. The model repeats its prompt, so the prompt is what it says."""

import dataclasses
import itertools
import json

import openai
import pytest

from serving.config import EngineConfig
from serving.dialect import ToolDialect
from serving.errors import InvalidRequest
from serving.gateway.schema import parse_chat
from serving.replica.served import ServedModel
from tests.fakes import FAKE_NAME, FakeEngineLoop, fake_card, sse_events
from tests.services import running_app, running_replica

CHAT = "/v1/chat/completions"
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{# tools <tool_call> </think> #}"
END = "§"


def tool(name, **properties):
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [tool("look", city={"$ref": "#/$defs/City"}), tool("wait")]
TOOLS[0]["function"]["parameters"]["$defs"] = {"City": {"enum": ["Oslo", "Rome"]}}
CALLS = (
    'Let me see.\n<tool_call>\n{"name": "look", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call>'
)


def body(says="", **fields):
    return {
        "model": FAKE_NAME,
        "messages": [{"role": "user", "content": says + END}],
        "stop": END,
        "max_tokens": 300,
        "tools": TOOLS,
        **fields,
    }


@pytest.fixture(scope="module")
def service():
    return {"card": fake_card(TEMPLATE)}


async def whole(http, **fields):
    response = await http.post(CHAT, json=body(**fields))
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    return choice["message"], choice["finish_reason"]


async def streamed(http, **fields):
    """The stream joined, in the shape of a whole message."""
    *chunks, done = sse_events((await http.post(CHAT, json=body(stream=True, **fields))).text)
    assert done == "[DONE]"
    message, reason = {"role": "assistant", "content": "", "refusal": None}, None
    for choice in (chunk["choices"][0] for chunk in chunks):
        assert reason is None, "nothing comes after the end"
        reason = choice["finish_reason"]
        for name, value in choice["delta"].items():
            if name == "tool_calls":
                for call in value:
                    join_call(message.setdefault(name, []), call)
            elif name != "role":
                message[name] = message.get(name, "") + value
    if ("tool_calls" in message or "reasoning_content" in message) and not message["content"]:
        message["content"] = None
    return message, reason


def join_call(calls, delta):
    index = delta.pop("index")
    if index == len(calls):
        assert delta["id"] and delta["function"]["name"]
        calls.append(delta)
    else:
        assert set(delta) == {"function"} and set(delta["function"]) == {"arguments"}, "id and name come once"
        calls[index]["function"]["arguments"] += delta["function"]["arguments"]


def without_ids(message):
    for call in message.get("tool_calls", ()):
        del call["id"]
    return message


@pytest.mark.parametrize(
    "says",
    [
        CALLS,
        "just text",
        "<think>\nhm\n</think>\n\nyes",
        "<think>hm</think>" + CALLS,
        "",
        "<think>never ends",
        "<tool_call>{",
    ],
)
async def test_a_stream_joined_is_the_whole_answer(http, says):
    message, reason = await whole(http, says=says)
    joined, joined_reason = await streamed(http, says=says)
    assert (without_ids(joined), joined_reason) == (without_ids(message), reason)


async def test_two_calls_and_content(http):
    message, reason = await whole(http, says=CALLS)
    assert message["content"] == "Let me see."
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "look", "arguments": '{"city": "Oslo"}'},
        {"name": "wait", "arguments": "{}"},
    ]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert reason == "tool_calls"


async def test_content_is_null_beside_calls_alone(http):
    assert (await whole(http, says=CALLS.removeprefix("Let me see.\n")))[0]["content"] is None


async def test_thoughts_have_their_own_field(http):
    message, reason = await whole(http, says="<think>\nhm\n</think>\n\nyes", tools=None)
    assert (message["reasoning_content"], message["content"], reason) == ("hm", "yes", "stop")


async def test_tokens_of_thoughts_are_counted(http):
    asked = body("<think>hm</think>yes", tools=None)
    usage = (await http.post(CHAT, json=asked)).json()["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": len("<think>hm</think>")}
    streamed = await http.post(CHAT, json={**asked, "stream": True, "stream_options": {"include_usage": True}})
    assert sse_events(streamed.text)[-2]["usage"] == usage


async def test_a_thought_that_the_budget_cuts_is_no_content(http):
    message, reason = await whole(http, says="<think>a long thought</think>yes", max_tokens=12)
    assert (message["reasoning_content"], message["content"], reason) == ("a lon", None, "length")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_required_call_follows_its_schema(http, stream):
    message, reason = await (streamed if stream else whole)(
        http, says="x", tool_choice="required", stop=None, parallel_tool_calls=False
    )
    assert reason == "tool_calls" and message["content"] is None
    for call in message["tool_calls"]:
        arguments = json.loads(call["function"]["arguments"])
        assert arguments == {} if call["function"]["name"] == "wait" else arguments["city"] in ("Oslo", "Rome")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_named_call_is_made_and_ends_with_stop(http, stream):
    named = {"type": "function", "function": {"name": "look"}}
    message, reason = await (streamed if stream else whole)(http, says="x", tool_choice=named, stop=None)
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "look"
    assert json.loads(call["function"]["arguments"])["city"] in ("Oslo", "Rome")
    assert (message["content"], reason) == (None, "stop")


NAMED = {"type": "function", "function": {"name": "look"}}


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
async def test_a_forced_call_may_be_cut_by_any_limit(http, choice):
    asked = {"says": "x", "tool_choice": choice, "stop": None, "parallel_tool_calls": False}
    (true,) = without_ids((await whole(http, **asked))[0])["tool_calls"]
    for limit in itertools.count(1, 4):  # where it is cut makes no difference to readers, as test_speech shows
        message, reason = await whole(http, **asked, max_tokens=limit)
        joined, joined_reason = await streamed(http, **asked, max_tokens=limit)
        assert (without_ids(joined), joined_reason) == (without_ids(message), reason)
        assert not message["content"]
        calls = message.get("tool_calls", [])
        assert all(true["function"]["arguments"].startswith(call["function"]["arguments"]) for call in calls)
        assert all(call["function"]["name"] == true["function"]["name"] for call in calls)
        if reason != "length":
            break
    assert (calls, limit > 15) == ([true], True)


@pytest.mark.parametrize("choice", ["required", NAMED, "auto"], ids=["required", "named", "auto"])
@pytest.mark.parametrize(("stop", "arguments"), [('"city"', "{"), ('o"', None), ("}", None)])
async def test_a_stop_string_within_a_call_is_the_reason(http, choice, stop, arguments):
    says = CALLS.partition("\n")[2] if choice == "auto" else "x"
    message, reason = await whole(http, says=says, tool_choice=choice, stop=stop, parallel_tool_calls=False)
    assert (message["content"], reason) == (None, "stop")
    (call,) = message["tool_calls"]
    assert arguments is None or call["function"]["arguments"].strip() == arguments
    with pytest.raises(json.JSONDecodeError):
        json.loads(call["function"]["arguments"])


async def test_without_parallel_calls_there_is_one(http):
    message, _ = await whole(http, says=CALLS, parallel_tool_calls=False)
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["look"]


@pytest.mark.parametrize("fields", [{"tool_choice": "none"}, {"tools": None}, {"tools": []}])
async def test_without_tools_everything_is_content(http, fields):
    message, reason = await whole(http, says=CALLS, **fields)
    assert (message["content"], reason) == (CALLS, "stop")
    assert "tool_calls" not in message


async def test_logprobs_are_of_all_tokens_streamed_and_whole(http):
    says = "<think>hm</think>" + CALLS
    fields = {"logprobs": True}
    response = (await http.post(CHAT, json=body(says, **fields))).json()["choices"][0]
    *chunks, _ = sse_events((await http.post(CHAT, json=body(says, stream=True, **fields))).text)
    entries = [e for c in chunks if (p := c["choices"][0]["logprobs"]) for e in p["content"]]
    assert "".join(entry["token"] for entry in entries) == says
    assert entries == response["logprobs"]["content"]


async def test_a_conversation_with_calls_and_results_goes_on(http):
    message, _ = await whole(http, says=CALLS)
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "7"} for call in message["tool_calls"]]
    messages = [{"role": "user", "content": "?"}, message, *results]
    answer, _ = await whole(http, messages=messages, max_tokens=4)
    assert answer["content"] == "?Let"


async def test_a_template_without_tools_has_them_described():
    async with running_replica(FakeEngineLoop(max_seq_len=2048)) as replica, running_app(replica.address) as http:
        asked = body("x", max_tokens=40, stop=None, messages=[{"role": "system", "content": "Be kind."}])
        message, _ = await whole(http, **{**asked, "says": ""})
        assert message["content"] == "Be kind.\n\nYou may call one or more of these"[:40]


async def test_the_official_client_reads_calls(shared_gateway):
    async with (
        openai.AsyncOpenAI(base_url=f"{shared_gateway.url}/v1", api_key="none", max_retries=0) as client,
        client.chat.completions.stream(**body(CALLS)) as stream,
    ):
        message = (await stream.get_final_completion()).choices[0].message
    assert [(c.function.name, c.function.arguments) for c in message.tool_calls] == [
        ("look", '{"city": "Oslo"}'),
        ("wait", "{}"),
    ]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": [{"type": "function"}]}, "tools", "tools[0].function"),
        ({"tools": [tool("no spaces please")]}, "tools", "tools[0].function.name"),
        ({"tools": [tool("f"), tool("f")]}, "tools", "twice"),
        ({"tools": [tool(f"f{i}") for i in range(129)]}, "tools", "at most 128"),
        ({"tools": [{"type": "web_search"}]}, "tools", "tools[0].type"),
        ({"tool_choice": "maybe"}, "tool_choice", "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "h"}}}, "tool_choice", "'h'"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice", "no tools"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "need each other"),
        ({"messages": [{"role": "user", "content": None}]}, "messages", "content is missing"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [
            {"id": "1", "function": {"name": "f", "arguments": "{}"}}]}]}, "messages", "only an assistant"),
        ({"messages": [{"role": "assistant", "tool_calls": [
            {"id": "1", "function": {"name": "f", "arguments": 3}}]}]}, "messages", "arguments"),
    ],
)  # fmt: skip
def test_refusals(fields, param, words):
    with pytest.raises(InvalidRequest) as refused:
        parse_chat(body("x", **fields)).to_request("r")
    assert refused.value.param == param
    assert words in str(refused.value)


async def test_a_schema_of_a_forced_call_that_cannot_be_enforced_is_refused_by_its_field(http):
    odd = tool("f", a={"type": "array", "uniqueItems": True})
    response = await http.post(CHAT, json=body("x", tools=[odd], tool_choice="required"))
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "tools" and "'uniqueItems'" in error["message"]


def test_the_template_for_tools_tells_how_they_are_called(engine):
    card = fake_card("{{ tools }}[TOOL_CALLS]</think>")
    card = dataclasses.replace(card, text=dataclasses.replace(card.text, tool_template="{{ tools }}<tool_call>"))
    reader = ServedModel.build(EngineConfig("nowhere"), engine, card).reader
    assert (reader.tool_dialect, reader.thinks) == (ToolDialect.HERMES, True)


async def test_a_dialect_may_be_chosen_or_unknown(engine):
    config = EngineConfig("nowhere", tool_dialect="none", reasoning=False)
    async with (
        running_replica(engine, card=fake_card(TEMPLATE), config=config) as replica,
        running_app(replica.address) as http,
    ):
        refused = await http.post(CHAT, json=body("x"))
        assert refused.status_code == 400 and "not known here" in refused.json()["error"]["message"]
        message, _ = await whole(http, says="x", tool_choice="required", stop=None)
        assert message["tool_calls"]
        thought = "<think>x</think>y"
        assert (await whole(http, says=thought, tools=None))[0]["content"] == thought


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("form", "is_call"), [({"guided_choice": ["yes"]}, True), ({"guided_regex": "00"}, False)])
async def test_with_a_form_the_answer_is_a_call_or_in_the_form(http, form, is_call, stream):
    """The fake model takes the lowest letter that may come: `0` is lower than `<`, with which a call begins."""
    asked = {"says": "x", "stop": None, "parallel_tool_calls": False, **form}
    message, reason = await (streamed if stream else whole)(http, **asked)
    if is_call:
        (call,) = message["tool_calls"]
        assert (call["function"]["name"], reason) == ("look", "tool_calls")
        assert json.loads(call["function"]["arguments"]) == {"city": "Oslo"}
    else:
        assert (message["content"], reason) == ("00", "stop")
        assert "tool_calls" not in message
    forced, forced_reason = await whole(http, **asked, tool_choice="required")
    assert forced["tool_calls"] and forced_reason == "tool_calls", "a call that is forced has no form"


async def test_a_form_applies_to_what_follows_the_thought(engine):
    """The template has opened the thought, and the model begins with its end."""
    template = "{# </think> #}{{ messages[0]['content'] }}<think>"
    async with running_replica(engine, card=fake_card(template)) as replica, running_app(replica.address) as http:
        fields = {"guided_regex": "x", "tools": None, "stop": None, "logit_bias": {"60": 100}}
        response = await http.post(CHAT, json=body("y", **fields, max_tokens=3))
    message = response.json()["choices"][0]["message"]
    assert message["content"] is None and len(message["reasoning_content"]) > 0
