"""Values that change nothing pass, for every field that OpenAI documents; what asks for something else is refused.

The fields are those of the installed client, so that a new one has to be thought of here."""

import dataclasses
import json
import typing

import pytest
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from websockets.asyncio.client import connect

from serving.errors import InvalidRequest
from serving.gateway.embeddings import EmbeddingsBody
from serving.gateway.parse import parse_body
from serving.gateway.responses.body import ResponseBody
from serving.gateway.schema import parse_chat, parse_completion
from tests.fakes import FAKE_NAME, fake_card
from tests.services import running_app, running_replica

NOTHING = (None, {}, [], False)
MESSAGES = [{"role": "user", "content": "abc"}]
SAMPLING = {
    "frequency_penalty": [0], "presence_penalty": [0.0], "logit_bias": [], "n": [1], "seed": [], "stop": [],
    "stream_options": [{"include_usage": False}], "temperature": [1], "top_p": [1.0], "user": [""],
}  # fmt: skip
LABELS = {
    "metadata": [], "prompt_cache_key": [""], "prompt_cache_options": [{"mode": "implicit"}],
    "prompt_cache_retention": ["in_memory", "24h"], "safety_identifier": [""],
    "service_tier": ["auto", "default", "fast"], "moderation": [], "parallel_tool_calls": [True],
    "tool_choice": ["auto", "none"], "tools": [],
}  # fmt: skip
CHAT = {
    **SAMPLING, **LABELS, "audio": [], "function_call": ["none", "auto"], "functions": [], "logprobs": [],
    "max_completion_tokens": [], "max_tokens": [], "modalities": [["text"]], "prediction": [],
    "reasoning_effort": ["none"], "response_format": [{"type": "text"}], "store": [], "top_logprobs": [0],
    "verbosity": ["medium"], "web_search_options": [],
}  # fmt: skip
COMPLETION = {**SAMPLING, "best_of": [1], "echo": [], "logprobs": [], "max_tokens": [16], "suffix": [""]}
RESPONSE = {
    **{name: SAMPLING[name] for name in ("temperature", "top_p", "user")}, **LABELS,
    "stream_options": [{"include_obfuscation": False}], "access_programs": [], "background": [],
    "background_options": [], "context_management": [], "conversation": [], "image": [], "include": [],
    "instructions": [""], "max_output_tokens": [], "max_tool_calls": [], "previous_response_id": [], "prompt": [],
    "reasoning": [{"effort": None, "summary": None}, {"effort": "none"}, {"summary": "auto"}], "store": [True],
    "text": [{"format": {"type": "text"}}, {"format": {"type": "text"}, "verbosity": "medium"}, {"verbosity": None}],
    "top_logprobs": [0], "truncation": ["disabled"],
}  # fmt: skip
EMBEDDING = {"dimensions": [], "encoding_format": ["float"], "user": [""]}

BODIES = {
    "/v1/chat/completions": ({"model": FAKE_NAME, "messages": MESSAGES}, CHAT),
    "/v1/completions": ({"model": FAKE_NAME, "prompt": "abc"}, COMPLETION),
    "/v1/responses": ({"model": FAKE_NAME, "input": "abc"}, RESPONSE),
    "/v1/embeddings": ({"model": FAKE_NAME, "input": "abc"}, EMBEDDING),
}
"""What must be there, and the defaults of all else."""
DOCUMENTED = {
    "/v1/chat/completions": chat_create_params.CompletionCreateParamsBase,
    "/v1/completions": completion_create_params.CompletionCreateParamsBase,
    "/v1/responses": response_create_params.ResponseCreateParamsBase,
    "/v1/embeddings": embedding_create_params.EmbeddingCreateParams,
}


@pytest.mark.parametrize("path", BODIES)
def test_all_documented_fields_are_thought_of(path):
    required, defaults = BODIES[path]
    assert {*required, *defaults} == {*typing.get_type_hints(DOCUMENTED[path])}


def request_of(path, fields):
    """What the fields come to, of which a value that says nothing must change nothing."""
    match path:
        case "/v1/chat/completions":
            return parse_chat(fields).to_request("r")
        case "/v1/completions":
            return parse_completion(fields).to_request("r")
        case "/v1/responses":
            return parse_body(ResponseBody, fields).model_dump()
        case "/v1/embeddings":
            return parse_body(EmbeddingsBody, fields).to_requests("r")


@pytest.mark.parametrize("path", BODIES)
def test_what_says_nothing_changes_nothing(path):
    required, defaults = BODIES[path]
    bare = request_of(path, required)
    for name in (*defaults, "stream", "a_field_of_tomorrow"):
        for value in NOTHING:
            got = request_of(path, {**required, name: value})
            if value is None or name not in ("parallel_tool_calls", "store", "background", "stream"):
                assert got == bare, (name, value)
    everything = dict.fromkeys(defaults)
    assert request_of(path, {**required, **everything}) == bare


@pytest.mark.parametrize("path", BODIES)
def test_defaults_pass(path):
    required, defaults = BODIES[path]
    for name, values in defaults.items():
        for value in values:
            request_of(path, {**required, name: value})
    assert request_of(path, {**required, **{n: v[0] for n, v in defaults.items() if v}})


def test_a_default_that_is_written_is_the_default():
    given = {name: values[0] for name, values in CHAT.items() if values}
    bare = parse_chat(BODIES["/v1/chat/completions"][0]).to_request("r")
    request = parse_chat({**BODIES["/v1/chat/completions"][0], **given}).to_request("r")
    assert dataclasses.replace(request, unset=bare.unset) == bare


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"web_search_options": {"search_context_size": "low"}}, "web_search_options"),
        ({"moderation": {"model": "m"}}, "moderation"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"verbosity": "low"}, "verbosity"),
        ({"store": True}, "store"),
        ({"reasoning_effort": "endless"}, "reasoning_effort"),
        ({"a_field_of_tomorrow": 0}, "a_field_of_tomorrow"),
        ({"a_field_of_tomorrow": True}, "a_field_of_tomorrow"),
    ],
)
def test_what_asks_for_something_is_refused_by_name(fields, param):
    with pytest.raises(InvalidRequest) as refused:
        parse_chat({**BODIES["/v1/chat/completions"][0], **fields})
    assert refused.value.param == param


def test_what_says_nothing_passes_within_messages_and_tools_too():
    for value in NOTHING:
        tool = {"type": "function", "function": {"name": "f", "tomorrow": value}, "tomorrow": value}
        messages = [{"role": "user", "content": "abc", "tomorrow": value, "audio": value, "tool_calls": None}]
        fields = {"model": "m", "messages": messages, "tools": [tool], "reasoning": value}
        assert parse_chat(fields).to_request("r").prompt.messages == ({"role": "user", "content": "abc"},)
        parse_body(ResponseBody, {"model": "m", "input": [{"role": "user", "content": "abc", "tomorrow": value}]})


async def ask(http, path, **fields):
    return await http.post(path, json={**BODIES[path][0], **fields})


async def test_what_is_ignored_is_said_in_a_header(http):
    for stream in (False, True):
        answer = await ask(http, "/v1/chat/completions", reasoning_effort="high", max_tokens=2, stream=stream)
        assert (answer.status_code, answer.headers["x-podstream-ignored"]) == (200, "reasoning_effort")
        fields = {"reasoning": {"effort": "low"}, "include": ["reasoning.encrypted_content"], "stream": stream}
        answer = await ask(http, "/v1/responses", **fields, max_output_tokens=2)
        assert (answer.status_code, answer.headers["x-podstream-ignored"]) == (200, "reasoning.effort, include")
    answer = await ask(http, "/v1/chat/completions", reasoning_effort="none", max_tokens=2)
    assert answer.status_code == 200 and "x-podstream-ignored" not in answer.headers, "it does not think"


async def test_a_web_socket_says_it_with_the_usage(shared_gateway):
    async with connect(f"{shared_gateway.url.replace('http', 'ws')}/v1/chat/ws", proxy=None) as socket:
        asked = {"type": "chat", "messages": MESSAGES, "max_tokens": 2, "reasoning_effort": "low"}
        await socket.send(json.dumps(asked))
        while (event := json.loads(await socket.recv()))["type"] != "usage":
            pass
        assert event["ignored"] == ["reasoning_effort"]


async def test_a_model_that_thinks_cannot_be_kept_from_it():
    card = fake_card("{{ messages[0]['content'] }}{# </think> #}")
    async with running_replica(card=card) as replica, running_app(replica.address) as http:
        refused = await ask(http, "/v1/chat/completions", reasoning_effort="none")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "reasoning_effort")
        refused = await ask(http, "/v1/responses", reasoning={"effort": "none"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "reasoning")
        hinted = await ask(http, "/v1/chat/completions", reasoning_effort="medium", max_tokens=2)
        assert (hinted.status_code, hinted.headers["x-podstream-ignored"]) == (200, "reasoning_effort")
