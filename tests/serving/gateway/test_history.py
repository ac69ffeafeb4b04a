"""What the server has said, it accepts back: real answers, through the official client, into all that take a history.

The model says its prompt, so the last message is what it answers."""

import json

import openai
import pytest
from pydantic import BaseModel
from websockets.asyncio.client import connect

from serving.gateway.schema import parse_chat
from tests.fakes import END_TEXT, FAKE_NAME, FakeEngineLoop, fake_card
from tests.services import running_gateway, running_replica

END = "§"
TEMPLATE = (
    "{% for m in messages %}{% if loop.last %}{{ m['content'] }}{% endif %}{% endfor %}{# tools <tool_call> </think> #}"
)
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"], "additionalProperties": False}
FUNCTION = {"name": "look", "parameters": SCHEMA, "strict": True}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call>'
SAID = {
    "text": "just text",
    "nothing": "",
    "a thought": "<think>hm</think>yes",
    "a thought alone": "<think>hm",
    "calls": "<think>hm</think>See.\n" + CALL + CALL,
    "a call that was cut": '<tool_call>\n{"name": "look", "arguments": {"at": "é',
    "a call cut before its name": '<tool_call>\n{"na',
    "arguments that are no object": '<tool_call>{"name": "look", "arguments": [1]}</tool_call>',
    "arguments without bottom": '<tool_call>{"name": "look", "arguments": ' + '{"a":' * 150 + "1" + "}" * 151,
    "a form": '{"at": "é"}',
}
DUMPS = [{}, {"exclude_none": True}, {"exclude_unset": True}, {"mode": "json", "by_alias": True}]


@pytest.fixture(scope="module")
async def shared_gateway():
    async with (
        running_replica(FakeEngineLoop(max_seq_len=4000), card=fake_card(TEMPLATE)) as replica,
        running_gateway(replica.address) as gateway,
    ):
        yield gateway


@pytest.fixture(scope="module")
async def client(shared_gateway):
    async with openai.AsyncOpenAI(base_url=f"{shared_gateway.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def chat(says, **fields):
    messages = [{"role": "user", "content": says + END}]
    return {"model": FAKE_NAME, "messages": messages, "stop": END, "tools": TOOLS, "max_tokens": 1000, **fields}


async def created(client, says):
    return (await client.chat.completions.create(**chat(says))).choices[0].message


async def streamed(client, says):
    async with client.chat.completions.stream(**chat(says)) as stream:
        return (await stream.get_final_completion()).choices[0].message


async def parsed(client, says):
    return (await client.chat.completions.parse(**chat(says))).choices[0].message


async def accepted(gateway, message):
    """By every endpoint that takes messages; results of its calls follow it."""
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "7"} for call in message.get("tool_calls") or ()]
    messages = [{"role": "user", "content": "?"}, message, *results, {"role": "user", "content": "ok"}]
    asked = {"model": FAKE_NAME, "messages": messages, "max_tokens": 2}
    answers = [await gateway.http.post("/v1/chat/completions", json=asked)]
    assert answers[0].json()["choices"][0]["message"]["content"] == "ok", answers[0].text
    answers.append(await gateway.http.post("/v1/chat", json={**asked, "stream": False}))
    answers.append(await gateway.http.post("/tokenize", json={"model": FAKE_NAME, "messages": messages}))
    assert [answer.status_code for answer in answers] == [200] * 3, [answer.text for answer in answers]
    async with connect(f"{gateway.url.replace('http', 'ws')}/v1/chat/ws", proxy=None) as socket:
        await socket.send(json.dumps({"type": "chat", **asked}))
        told = ""
        while (event := json.loads(await socket.recv()))["type"] == "text":
            told += event["text"]
        assert (told, event["type"]) == ("ok", "end"), event


UNREADABLE = ("a call that was cut", "arguments that are no object", "arguments without bottom")
"""Arguments that the client itself cannot parse when it is asked to."""


@pytest.mark.parametrize(
    ("ask", "name"),
    [(ask, name) for ask in (created, streamed, parsed) for name in SAID if ask is created or name not in UNREADABLE],
)
async def test_a_message_of_chat_completions(shared_gateway, client, name, ask):
    message = await ask(client, SAID[name])
    for how in DUMPS:
        await accepted(shared_gateway, message.model_dump(**how))


async def test_a_message_that_was_parsed(shared_gateway, client):
    answer = await client.chat.completions.parse(
        **chat("x", stop=None, max_tokens=2000, tools=openai.omit), response_format=At
    )
    message = answer.choices[0].message
    assert message.parsed == At(at="x")
    for how in DUMPS:
        await accepted(shared_gateway, message.model_dump(**how, warnings=False))
    calling = await client.chat.completions.parse(**chat(CALL))
    (call,) = calling.choices[0].message.tool_calls
    assert call.function.parsed_arguments == {"at": "é"}
    for how in DUMPS:
        await accepted(shared_gateway, calling.choices[0].message.model_dump(**how))


class At(BaseModel, extra="forbid"):
    at: str = "x"

    model_config = {"json_schema_extra": lambda schema: schema["properties"].update(at={"const": "x"})}


@pytest.mark.parametrize("name", SAID)
async def test_an_answer_of_the_short_form(shared_gateway, name):
    answer = (await shared_gateway.http.post("/v1/chat", json=chat(SAID[name], stream=False))).json()
    message = {"role": "assistant", "content": answer["text"], "reasoning_content": answer.get("reasoning")}
    await accepted(shared_gateway, {**message, "tool_calls": answer.get("tool_calls", [])})


async def test_what_was_streamed_may_keep_its_index(shared_gateway, client):
    stream = await client.chat.completions.create(**chat(CALL), stream=True)
    calls = []
    async for chunk in stream:
        for call in chunk.choices[0].delta.tool_calls or ():
            if call.index == len(calls):
                calls.append(call.model_dump())
            else:
                calls[call.index]["function"]["arguments"] += call.function.arguments
    await accepted(shared_gateway, {"role": "assistant", "content": None, "tool_calls": calls})


@pytest.mark.parametrize("name", SAID)
async def test_items_of_responses(shared_gateway, client, name):
    tools = [{"type": "function", **FUNCTION}]
    says = SAID[name] or "."
    asked = {"model": FAKE_NAME, "input": says, "tools": tools, "max_output_tokens": len(says.encode())}
    answers = [await client.responses.create(**asked)]
    ended = {**asked, "input": says + END_TEXT, "max_output_tokens": 1000}  # the client wants it to be completed
    async with client.responses.stream(**(ended if name not in UNREADABLE else ended | {"tools": []})) as stream:
        answers.append(await stream.get_final_response())
    if name in ("text", "calls"):
        answers.append(await client.responses.parse(**asked))
    for answer in answers:
        results = [
            {"type": "function_call_output", "call_id": item.call_id, "output": [{"type": "input_text", "text": "7"}]}
            for item in answer.output
            if item.type == "function_call"
        ]
        for how in DUMPS:
            items = [*(item.model_dump(**how) for item in answer.output), *results, {"role": "user", "content": "ok"}]
            again = {"model": FAKE_NAME, "input": items, "max_output_tokens": 2}
            response = await shared_gateway.http.post("/v1/responses", json=again)
            assert response.json()["output"][0]["content"][0]["text"] == "ok", response.text


def test_a_cut_call_keeps_its_text_and_a_whole_one_is_an_object():
    def arguments(written):
        call = {"id": "1", "type": None, "function": {"name": "f", "arguments": written, "parsed_arguments": {"x": 1}}}
        messages = [{"role": "assistant", "content": None, "parsed": {"y": 2}, "tool_calls": [call]}]
        (message,) = parse_chat({"model": "m", "messages": messages}).to_request("r").prompt.messages
        assert message.keys() == {"role", "content", "tool_calls"}
        return message["tool_calls"][0]["function"]["arguments"]

    assert arguments('{"a": [1') == '{"a": [1'
    assert arguments('{"a": [1]}') == {"a": [1]}
    assert arguments("") == {} and arguments("[1]") == "[1]"


def test_what_an_assistant_refused_with_is_what_it_said():
    messages = [{"role": "assistant", "content": None, "refusal": "No.", "annotations": [{"type": "url_citation"}]}]
    (message,) = parse_chat({"model": "m", "messages": messages}).to_request("r").prompt.messages
    assert message == {"role": "assistant", "content": "No."}
