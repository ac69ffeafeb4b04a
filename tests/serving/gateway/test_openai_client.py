"""The official client as a second reader."""

import openai
import pytest

from tests.fakes import FAKE_NAME

MESSAGES = [{"role": "user", "content": "héllo "}]


@pytest.fixture(scope="module")
async def client(shared_gateway):
    async with openai.AsyncOpenAI(base_url=f"{shared_gateway.url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_chat_streamed_and_whole(client):
    ask = {"model": FAKE_NAME, "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    whole = await client.chat.completions.create(**ask)
    stream = await client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert whole.choices[0].message.content == text == "héllo héll"
    assert whole.choices[0].finish_reason == "length"
    assert chunks[-1].usage == whole.usage


async def test_completion_streamed_and_whole(client):
    ask = {"model": FAKE_NAME, "prompt": "abc", "max_tokens": 5}
    whole = await client.completions.create(**ask)
    stream = await client.completions.create(**ask, stream=True)
    assert whole.choices[0].text == "".join([chunk.choices[0].text async for chunk in stream]) == "abcab"


async def test_models(client):
    assert [model.id async for model in client.models.list()] == [FAKE_NAME]
    assert (await client.models.retrieve(FAKE_NAME)).id == FAKE_NAME


async def test_errors_have_their_classes(client):
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="gpt-9", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError) as too_long:
        await client.completions.create(model=FAKE_NAME, prompt="x" * 600)
    assert missing.value.code == "model_not_found"
    assert too_long.value.code == "context_length_exceeded"


async def test_an_error_in_a_stream_is_raised(client, gateway, engine):
    engine.step_delay_s = 0.005
    client = client.with_options(base_url=f"{gateway.url}/v1")
    stream = await client.chat.completions.create(model=FAKE_NAME, messages=MESSAGES, stream=True)
    with pytest.raises(openai.APIError, match="the fake engine failed"):
        async for _ in stream:
            engine.fail()
