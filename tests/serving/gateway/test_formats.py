"""Chunks put together from bytes are the JSON that a dictionary would have become."""

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.errors import Overloaded
from serving.gateway import sse
from serving.gateway.choice import Choice
from serving.gateway.formats import AnswerHead, ChatFormat, CompletionFormat
from serving.gateway.speech.pieces import Content
from serving.gateway.transcript import Said
from serving.request import Usage

HEAD = AnswerHead("id-1", 7, 'na"me', include_usage=True)
TEXT = st.text(st.characters(exclude_categories=["Cs"]))


def read(event):
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2
    return orjson.loads(event[6:])


@given(TEXT.filter(bool))
def test_any_text_is_one_event(text):
    assert read(ChatFormat(HEAD).said(Said(0, (Content(text),)))) == {
        "id": "id-1",
        "object": "chat.completion.chunk",
        "created": 7,
        "model": 'na"me',
        "choices": [{"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": None}],
        "usage": None,
    }
    assert read(CompletionFormat(HEAD).said(Said(0, (Content(text),))))["choices"][0]["text"] == text


@pytest.mark.parametrize("answer", [ChatFormat(HEAD), CompletionFormat(HEAD)])
def test_usage_is_the_same_streamed_and_whole(answer):
    usage = Usage(3, 4, 2)
    whole = orjson.loads(answer.whole([Choice(["x"], [], "stop")], usage))
    assert read(answer.end(usage).removesuffix(sse.DONE))["usage"] == whole["usage"]
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert "completion_tokens_details" not in whole["usage"], "nothing was guessed"
    guessed = Usage(3, 4, drafted_tokens=7, accepted_tokens=5)
    details = orjson.loads(answer.whole([Choice()], guessed))["usage"]["completion_tokens_details"]
    assert details == {"accepted_prediction_tokens": 5, "rejected_prediction_tokens": 2}
    assert read(answer.said(Said(reason="stop")))["choices"][0]["finish_reason"] == "stop"


def test_without_include_usage_there_is_none():
    answer = ChatFormat(AnswerHead("id", 1, "m"))
    assert answer.end(Usage(1, 2)) == sse.DONE
    assert "usage" not in read(answer.said(Said(0, (Content("x"),))))


def test_an_error_event():
    error = read(sse.error_event(Overloaded("full")))["error"]
    assert error == {"message": "full", "type": "rate_limit_error", "param": None, "code": "queue_full"}
