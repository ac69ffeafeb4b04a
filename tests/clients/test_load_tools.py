"""The requests of public load generators, as they send them, and what they read of the answers.

vLLM's `bench serve` and guidellm were run by hand against a gateway too; both take minutes to start.
"""

import pytest

from tests.fakes import FAKE_NAME, sse_events

USAGE = {"stream": True, "stream_options": {"include_usage": True}}
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
PARTS = [{"role": "user", "content": [{"type": "text", "text": "abc"}]}]
HEADERS = {"authorization": "Bearer none", "x-request-id": "bench-0"}


async def frames(http, path, body):
    response = await http.post(path, json=body, headers=HEADERS)
    assert response.status_code == 200, response.text
    assert response.headers["x-request-id"] == "bench-0"
    return sse_events(response.text)


@pytest.mark.parametrize("prompt", ["abc", [97, 98, 99]])
async def test_completions_of_bench_serve(http, prompt):
    fields = {"repetition_penalty": 1.0, "max_tokens": 12, "logprobs": None, "ignore_eos": True, "temperature": 0.0}
    *chunks, usage, done = await frames(http, COMPLETIONS, {"model": FAKE_NAME, "prompt": prompt, **fields, **USAGE})
    assert done == "[DONE]" and usage["usage"]["completion_tokens"] == 12
    assert chunks[0]["choices"][0]["text"], "the first chunk is the first token"


async def test_chats_of_bench_serve(http):
    fields = {"max_completion_tokens": 12, "ignore_eos": True}
    *chunks, usage, _ = await frames(http, CHAT, {"model": FAKE_NAME, "messages": PARTS, **fields, **USAGE})
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "abcabcabcabc"
    assert usage["usage"]["completion_tokens"] == 12


async def test_responses_of_bench_serve(http):
    body = {"model": FAKE_NAME, "input": "abc", "max_output_tokens": 16, "stream": True, "store": False}
    response = await http.post(RESPONSES, json=body | {"ignore_eos": True}, headers=HEADERS)
    assert response.status_code == 200 and "event: response.completed" not in response.text, "it was cut"
    assert response.text.count("event: response.output_text.delta") >= 1


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_usage_in_every_chunk_for_guidellm(http, path):
    options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    fields = {"stop": None, "ignore_eos": True, **options}
    asked = {"messages": PARTS, "max_completion_tokens": 12} if path == CHAT else {"prompt": "abc", "max_tokens": 12}
    *chunks, last, _ = await frames(http, path, {"model": FAKE_NAME, **asked, **fields})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 12
    assert {chunk["usage"]["prompt_tokens"] for chunk in [*chunks, last]} == {3}
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 12


async def test_embeddings_are_refused_in_a_sentence_where_there_are_none(http):
    refused = await http.post("/v1/embeddings", json={"model": FAKE_NAME, "input": "abc", "encoding_format": "float"})
    assert refused.status_code == 400 and "--embeddings" in refused.json()["error"]["message"]


async def test_tools_without_a_model_name_take_the_first(http):
    listed = (await http.get("/v1/models")).json()
    assert listed["data"][0]["id"] == FAKE_NAME
