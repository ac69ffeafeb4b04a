"""Chat: a conversation in the terminal, streamed from a served model through its public API."""

import json
from typing import Any

import httpx
from httpx_sse import connect_sse
from rich.console import Console

from model.errors import PodstreamError

CONNECT_TIMEOUT_S = 5.0
HELP = "/clear forgets the conversation, /exit leaves; Ctrl-C stops an answer, once more leaves."


class ChatFailed(PodstreamError):
    """The service cannot be reached or refused; the message says which."""


class Chat:
    """Owns the history. Answers that were stopped or failed are not remembered."""

    def __init__(
        self,
        url: str,
        model: str | None,
        console: Console,
        *,
        temperature: float | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """Without a temperature the model's own recommendation counts."""
        self._url = url.rstrip("/").removesuffix("/v1")
        self._model = model
        self._temperature = temperature
        self._console = console
        self._client = httpx.Client(timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S), transport=transport)
        self._messages: list[dict[str, str]] = []

    def run(self) -> None:
        """Read and answer until /exit, the end of the input, or Ctrl-C at the prompt."""
        with self._client:
            self._model = self._model or self._first_model()
            self._console.print(f"[bold]{self._model}[/]. {HELP}", highlight=False)
            while (line := self._read_line()) is not None:
                self._obey(line)

    def _read_line(self) -> str | None:
        try:
            line = self._console.input("[bold cyan]> [/]").strip()
        except (EOFError, KeyboardInterrupt):
            self._console.print()
            return None
        return None if line == "/exit" else line

    def _obey(self, line: str) -> None:
        if line == "/clear":
            self._messages.clear()
        elif line.startswith("/"):
            self._console.print(HELP, highlight=False)
        elif line:
            self._ask(line)

    def _ask(self, question: str) -> None:
        asked = [*self._messages, {"role": "user", "content": question}]
        try:
            answer = self._stream(asked)
        except KeyboardInterrupt:
            self._console.print(" [dim](stopped)[/]")
        except ChatFailed as error:
            self._console.print(str(error), style="red", highlight=False, markup=False)
        else:
            self._messages = [*asked, {"role": "assistant", "content": answer}]

    def _stream(self, messages: list[dict[str, str]]) -> str:
        """Print the answer while it comes, and return it. Raises ChatFailed."""
        body = {"model": self._model, "messages": messages, "temperature": self._temperature, "stream": True}
        parts: list[str] = []
        try:
            with connect_sse(self._client, "POST", f"{self._url}/v1/chat/completions", json=body) as source:
                if source.response.is_error:
                    raise ChatFailed(_error_message(source.response.read()))
                for event in source.iter_sse():
                    parts.append(text := _text_of(event.data))
                    self._console.print(text, end="", highlight=False, markup=False, soft_wrap=True)
        except httpx.TransportError as error:
            raise self._unreachable(error) from error
        self._console.print()
        return "".join(parts)

    def _first_model(self) -> str:
        try:
            response = self._client.get(f"{self._url}/v1/models")
        except httpx.TransportError as error:
            raise self._unreachable(error) from error
        if response.is_error:
            raise ChatFailed(_error_message(response.content))
        return str(response.json()["data"][0]["id"])

    def _unreachable(self, error: httpx.TransportError) -> ChatFailed:
        return ChatFailed(f"nothing answers at {self._url} ({error}); start it with `podstream serve` or give --url.")


def _text_of(data: str) -> str:
    """The text of one event; raises ChatFailed for an error event."""
    if data == "[DONE]":
        return ""
    chunk: dict[str, Any] = json.loads(data)
    if "error" in chunk:
        raise ChatFailed(str(chunk["error"]["message"]))
    return "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])


def _error_message(body: bytes) -> str:
    """The sentence in an error body, or the beginning of whatever came instead."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the service answered with an error: {body[:200].decode(errors='replace')}"
