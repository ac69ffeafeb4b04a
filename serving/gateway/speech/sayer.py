"""Sayer: collects what readers find out. Decides whether something is a call of a tool at all."""

import secrets
import string

from serving.gateway.speech.pieces import Content, Piece, Reasoning, ToolArguments, ToolStart

ID_LETTERS = string.ascii_letters + string.digits
ID_LENGTH = 9  # what Mistral's templates insist on


def new_call_id() -> str:
    return "".join(secrets.choice(ID_LETTERS) for _ in range(ID_LENGTH))


class Sayer:
    """Of one answer. `names` are the tools that may be called, so often as `max_calls` says (None: any number)."""

    def __init__(self, names: frozenset[str], max_calls: int | None = None) -> None:
        self.num_calls = 0
        self._names = names
        self._max_calls = max_calls
        self._pieces: list[Piece] = []
        self._muted = False

    def take(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def content(self, text: str) -> None:
        if text:
            self._pieces.append(Content(text))

    def reasoning(self, text: str) -> None:
        if text:
            self._pieces.append(Reasoning(text))

    def call(self, name: object) -> bool:
        """A call begins; False if there is no such tool, and then the text is content like any other. One call more
        than allowed is read and not told."""
        if not isinstance(name, str) or name not in self._names:
            return False
        self._muted = self._max_calls is not None and self.num_calls >= self._max_calls
        if not self._muted:
            self._pieces.append(ToolStart(self.num_calls, f"call_{new_call_id()}", name))
            self.num_calls += 1
        return True

    def arguments(self, text: str) -> None:
        """More of the newest call's."""
        if text and not self._muted:
            self._pieces.append(ToolArguments(self.num_calls - 1, text))
