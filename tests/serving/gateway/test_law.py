"""The law of answers: a stream joined is the plain answer, and both are what the engine's tokens say."""

import asyncio
import threading

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes import FAKE_NAME, echo, sse_events
from tests.services import running_gateway, running_replica

COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def http():
    """A service on a thread of its own, for hypothesis, whose examples are not coroutines."""
    loop = asyncio.new_event_loop()
    urls: asyncio.Queue[str] = asyncio.Queue()
    stop = asyncio.Event()

    async def serve():
        async with running_replica() as replica, running_gateway(replica.address) as gateway:
            await urls.put(gateway.url)
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    url = asyncio.run_coroutine_threadsafe(urls.get(), loop).result(10)
    with httpx.Client(base_url=url, trust_env=False) as client:
        yield client
    loop.call_soon_threadsafe(stop.set)
    thread.join()
    loop.close()


texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
stops = st.lists(st.text("abé🙂", min_size=1, max_size=4), max_size=3)


def whole(http, body):
    answer = http.post(COMPLETIONS, json=body).json()
    return answer["choices"][0]["text"], answer["choices"][0]["finish_reason"], answer["usage"]


def streamed(http, body):
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage, done = sse_events(http.post(COMPLETIONS, json=body | options).text)
    assert done == "[DONE]"
    reasons = [c["choices"][0]["finish_reason"] for c in chunks]
    assert reasons[:-1] == [None] * (len(reasons) - 1)
    return "".join(c["choices"][0]["text"] for c in chunks), reasons[-1], usage["usage"]


@settings(max_examples=40, deadline=None)
@given(prompt=texts | st.text("abé🙂", min_size=1, max_size=8), max_tokens=st.integers(1, 40), stop=stops)
def test_streamed_equals_whole_equals_hand_made(http, prompt, max_tokens, stop):
    body = {"model": FAKE_NAME, "prompt": prompt, "max_tokens": max_tokens, "stop": stop}
    answer = whole(http, body)
    assert streamed(http, body) == answer
    text, reason, usage = answer
    cuts = [at for at in (echo(prompt, max_tokens).find(s) for s in stop) if at >= 0]
    assert reason == ("stop" if cuts else "length")
    if not cuts:
        assert (text, usage["completion_tokens"]) == (echo(prompt, max_tokens), max_tokens)
    assert echo(prompt, max_tokens).startswith(text)
    assert not any(s in text for s in stop)
