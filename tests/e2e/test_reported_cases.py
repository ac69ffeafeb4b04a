"""Cases that other servers were reported to get wrong and that need a real model."""

import threading
import time

import httpx
import pytest

from tests.e2e.test_faults import eventually

pytestmark = pytest.mark.e2e

COUNT = [{"role": "user", "content": "Name the numbers from one to ten, please, in words and in their order."}]


def ask(server, messages=COUNT, **params):
    settings = {"temperature": 0, "max_tokens": 8, **params}
    return server.client.chat.completions.create(model=server.model, messages=messages, **settings)


def test_a_bias_bans_and_forces_tokens(server):
    def written(**params):
        return [entry.token for entry in ask(server, logprobs=True, **params).choices[0].logprobs.content]

    def id_of(token):
        body = {"prompt": token, "add_special_tokens": False}
        (token_id,) = httpx.post(f"{server.url}/tokenize", json=body).json()["tokens"]
        return str(token_id)

    tokens = written()
    assert tokens[0] not in written(logit_bias={id_of(tokens[0]): -100})
    assert written(logit_bias={id_of(" lighthouse"): 100}, max_tokens=3) == [" lighthouse"] * 3


@pytest.mark.parametrize("stream", [False, True])
def test_cached_tokens_are_told_streamed_or_not(server, stream):
    messages = [{"role": "system", "content": f"You are careful. {stream} " * 12}, *COUNT]

    def cached():
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        answer = ask(server, messages, **options)
        usage = list(answer)[-1].usage if stream else answer.usage
        return usage.prompt_tokens_details.cached_tokens, usage.prompt_tokens

    first, second = cached(), cached()
    assert first[0] < 16, "nobody has asked this before"
    assert second[0] >= second[1] - 16 > 32, "all full pages but the last"


def test_an_interactive_request_goes_before_batch_ones_and_takes_their_slot(server):
    """Twice as many batch answers as slots, all long; the interactive one does not wait for any of them."""
    ended, leave = [], threading.Event()

    def read(stream):
        with stream:
            for chunk in stream:
                if chunk.choices and chunk.choices[0].finish_reason:
                    ended.append(chunk)
                if leave.is_set():
                    return

    long = {"stream": True, "max_tokens": 400, "extra_body": {"priority": "batch", "ignore_eos": True}}
    preempted = server.metric("vllm:num_preemptions_total")
    streams = [ask(server, [{"role": "user", "content": f"Tale {number}?"}], **long) for number in range(8)]
    readers = [threading.Thread(target=read, args=(stream,)) for stream in streams]
    for reader in readers:
        reader.start()
    try:
        eventually(lambda: server.metric("vllm:num_requests_running") == 4)
        started = time.monotonic()
        assert ask(server, max_tokens=4).usage.completion_tokens == 4
        took = time.monotonic() - started
        assert not ended and server.metric("vllm:num_requests_waiting") >= 4, f"in {took:.1f} s"
    finally:
        leave.set()
        for reader in readers:
            reader.join(30)
    assert server.metric("vllm:num_preemptions_total") > preempted
    eventually(lambda: server.metric("vllm:num_requests_running") == 0)
