"""The Responses API: text, calls and thoughts, whole and as events, and conversations that are kept."""

import json

import openai
import pytest

from tests.fakes import FAKE_NAME, fake_card

RESPONSES = "/v1/responses"
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{# tools <tool_call> </think> #}"
TOOL = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}
ANSWER = '<think>hm</think>\nSee.\n<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call>'


@pytest.fixture(scope="module")
def service():
    return {"card": fake_card(TEMPLATE)}


def body(text="abc", **fields):
    return {"model": FAKE_NAME, "input": text, "max_output_tokens": len(text.encode()), **fields}


def events_of(response):
    frames = [frame.split("\n") for frame in response.text.split("\n\n") if frame]
    events = [json.loads(data.removeprefix("data: ")) for _, data in frames]
    assert [name.removeprefix("event: ") for name, _ in frames] == [event["type"] for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def plain(response):
    """Without what differs from one to the next."""
    items = [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in response["output"]]
    return {**response, "output": items, "id": "", "created_at": 0}


async def test_text(http):
    response = (await http.post(RESPONSES, json=body(metadata={"a": "b"}))).json()
    assert (response["object"], response["status"], response["metadata"]) == ("response", "incomplete", {"a": "b"})
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    (item,) = response["output"]
    assert item["content"][0]["text"] == "abc"
    assert (response["usage"]["input_tokens"], response["usage"]["output_tokens"]) == (3, 3)


@pytest.mark.parametrize("text", ["abc", ANSWER, ANSWER.partition("\nSee.")[0], "<think>hm"])
async def test_the_last_event_is_the_whole_response_and_deltas_join_to_it(http, text):
    asked = body(text, tools=[TOOL], max_output_tokens=len(text.encode()))
    whole = (await http.post(RESPONSES, json=asked)).json()
    events = events_of(await http.post(RESPONSES, json={**asked, "stream": True}))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == f"response.{whole['status']}"
    assert plain(events[-1]["response"]) == plain(whole)
    for index, item in enumerate(events[-1]["response"]["output"]):
        mine = [event for event in events if event.get("output_index") == index]
        assert mine[0]["type"] == "response.output_item.added"
        assert mine[-1]["type"] == "response.output_item.done" and mine[-1]["item"] == item
        assert {event["item_id"] for event in mine if "item_id" in event} == {item["id"]}
        joined = "".join(event["delta"] for event in mine if event["type"].endswith(".delta"))
        assert joined == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])


async def test_thoughts_text_and_calls_are_items(http):
    response = (await http.post(RESPONSES, json=body(ANSWER, tools=[TOOL]))).json()
    assert [item["type"] for item in response["output"]] == ["reasoning", "message", "function_call"]
    assert response["output"][2]["arguments"] == '{"at": "é"}'


async def test_a_forced_call_follows_its_schema(http):
    asked = body("x", tools=[TOOL], tool_choice={"type": "function", "name": "look"}, max_output_tokens=60)
    (item,) = (await http.post(RESPONSES, json=asked)).json()["output"]
    assert (item["type"], item["name"]) == ("function_call", "look")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "look"}], ids=["required", "named"])
async def test_a_call_that_a_limit_cuts_is_incomplete_and_the_conversation_goes_on(http, choice):
    schema = {"type": "object", "properties": {"at": {"const": "x"}}, "required": ["at"], "additionalProperties": False}
    tool = {**TOOL, "parameters": schema}
    asked = body("x", tools=[tool], tool_choice=choice, parallel_tool_calls=False)
    for limit in range(1, 300, 19):
        response = (await http.post(RESPONSES, json={**asked, "max_output_tokens": limit})).json()
        *_, last = events_of(await http.post(RESPONSES, json={**asked, "max_output_tokens": limit, "stream": True}))
        assert plain(last["response"]) == plain(response)
        if response["status"] != "incomplete":
            break
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        for item in response["output"]:
            assert (item["type"], item["name"]) == ("function_call", "look")
            assert (item["status"] == "completed") == item["arguments"].endswith("}"), "whole, though its list is not"
        again = {**body("y", max_output_tokens=1), "previous_response_id": response["id"]}
        assert (await http.post(RESPONSES, json=again)).status_code == 200
    (item,) = response["output"]
    assert limit > 12 and item["status"] == "completed" and json.loads(item["arguments"]).keys() == {"at"}


async def test_a_conversation_goes_on_from_a_stored_response(http):
    first = (await http.post(RESPONSES, json=body("ab", instructions="I"))).json()
    again = body("c", previous_response_id=first["id"], max_output_tokens=5)
    second = (await http.post(RESPONSES, json=again)).json()
    assert second["output"][0]["content"][0]["text"] == "abIac", "ab, its answer Ia, c; the instructions do not stay"
    assert (await http.get(f"{RESPONSES}/{first['id']}")).json() == first
    assert (await http.delete(f"{RESPONSES}/{first['id']}")).json()["deleted"]
    refused = await http.post(RESPONSES, json=again)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "previous_response_id")
    missing = await http.get(f"{RESPONSES}/{first['id']}")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "response_not_found")


async def test_what_shall_not_be_stored_is_not(http):
    response = (await http.post(RESPONSES, json=body(store=False))).json()
    assert (await http.get(f"{RESPONSES}/{response['id']}")).status_code == 404


async def test_items_go_in_as_they_came_out(http):
    first = (await http.post(RESPONSES, json=body(ANSWER, tools=[TOOL]))).json()
    result = {"type": "function_call_output", "call_id": first["output"][2]["call_id"], "output": "7"}
    items = [{"role": "user", "content": [{"type": "input_text", "text": "?"}]}, *first["output"], result]
    answer = await http.post(RESPONSES, json=body(tools=[TOOL]) | {"input": items, "max_output_tokens": 6})
    assert answer.json()["output"][0]["content"][0]["text"] == "?See.7"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"input": [{"type": "file_search_call"}]}, "input"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"reasoning": {"effort": "none"}}, "reasoning"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "yaml"}}}, "text"),
        ({"temperature": 9}, "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"conversation": "x"}, "conversation"),
        ({"metadata": {"a": 3}}, "metadata"),
    ],
)
async def test_a_field_is_refused_by_name(http, fields, param):
    response = await http.post(RESPONSES, json=body() | fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


async def test_the_official_client(shared_gateway):
    async with openai.AsyncOpenAI(base_url=f"{shared_gateway.url}/v1", api_key="none", max_retries=0) as client:
        whole = await client.responses.create(**body(ANSWER, tools=[TOOL]))
        assert whole.output_text == "See."
        async with client.responses.stream(**body("abc<|end|>")) as stream:
            async for _ in stream:
                pass
            assert (await stream.get_final_response()).output_text == "abc"


async def test_a_stream_that_fails_ends_with_a_failed_response(gateway, engine):
    engine.step_delay_s = 0.005
    asked = body(stream=True, max_output_tokens=400)
    async with gateway.http.stream("POST", RESPONSES, json=asked) as response:
        frames = response.aiter_text()
        await anext(frames)
        engine.fail()
        rest = "".join([piece async for piece in frames])
    last = json.loads(rest.strip().rpartition("data: ")[2])
    assert (last["type"], last["response"]["error"]["code"]) == ("response.failed", "engine_failed")
