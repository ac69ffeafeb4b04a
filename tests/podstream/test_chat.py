"""The terminal chat against a scripted service."""

import io
import json

import httpx
import pytest
from rich.console import Console

from podstream.chat import Chat, ChatFailed


class Terminal(Console):
    """A console whose keyboard is a list of lines; an exception in it is raised."""

    def __init__(self, *lines):
        super().__init__(file=io.StringIO(), width=200)
        self._lines = iter([*lines, EOFError()])

    def input(self, *_, **__):
        line = next(self._lines)
        if isinstance(line, BaseException):
            raise line
        return line

    @property
    def text(self):
        return self.file.getvalue()


def stream(*texts, end="data: [DONE]\n\n"):
    chunks = [{"choices": [{"index": 0, "delta": {"content": text}}]} for text in texts]
    frames = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
    return httpx.Response(200, headers={"content-type": "text/event-stream"}, text=frames + end)


def talk(*lines, answers, model="m"):
    """Runs a conversation; returns the terminal and the bodies that were sent."""
    sent, replies = [], iter(answers)

    def handle(request):
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "first"}]})
        sent.append(json.loads(request.content))
        reply = next(replies)
        if isinstance(reply, BaseException):
            raise reply
        return reply

    terminal = Terminal(*lines)
    Chat("http://service/v1/", model, terminal, transport=httpx.MockTransport(handle)).run()
    return terminal, sent


def test_an_answer_is_printed_and_remembered():
    terminal, sent = talk("hi", "more", answers=[stream("Hel", "lo [b]"), stream("!")])
    assert "Hello [b]\n" in terminal.text
    assert sent[1]["messages"] == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Hello [b]"},
        {"role": "user", "content": "more"},
    ]
    assert sent[0]["stream"] is True


def test_clear_forgets_and_exit_leaves():
    _, sent = talk("hi", "/clear", "new", "/exit", "never", answers=[stream("a"), stream("b")])
    assert [len(body["messages"]) for body in sent] == [1, 1]


def test_without_a_model_the_first_one_is_taken():
    _, sent = talk("hi", answers=[stream("a")], model=None)
    assert sent[0]["model"] == "first"


def test_ctrl_c_stops_the_answer_and_then_leaves():
    terminal, sent = talk("hi", "again", KeyboardInterrupt(), "never", answers=[KeyboardInterrupt(), stream("a")])
    assert "(stopped)" in terminal.text
    assert [len(body["messages"]) for body in sent] == [1, 1]


def test_an_error_is_shown_and_the_chat_goes_on():
    error = {"error": {"message": "prompt has 9,120 tokens.", "type": "x", "param": None, "code": None}}
    refused = httpx.Response(400, json=error)
    broken = stream("a", end=f"data: {json.dumps(error)}\n\n")
    terminal, sent = talk("one", "two", "three", answers=[refused, broken, stream("ok")])
    assert terminal.text.count("prompt has 9,120 tokens.") == 2
    assert sent[2]["messages"] == [{"role": "user", "content": "three"}]


def test_an_answer_that_is_no_json_is_shown_as_it_is():
    terminal, _ = talk("hi", answers=[httpx.Response(502, text="<html>bad gateway")])
    assert "<html>bad gateway" in terminal.text


def test_nobody_there_is_one_clear_sentence():
    with pytest.raises(ChatFailed, match=r"nothing answers at http://127\.0\.0\.1:9 .*podstream serve"):
        Chat("http://127.0.0.1:9", None, Terminal()).run()
