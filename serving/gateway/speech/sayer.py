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
        self.is_cut = False
        """The answer breaks off within a call."""
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

    def is_named(self, beginning: str) -> bool:
        """Whether a tool's name may begin so."""
        return any(name.startswith(beginning) for name in self._names)

    def break_off(self) -> None:
        """The newest call has no end."""
        self.is_cut = self.is_cut or not self._muted

    def break_off_unnamed(self) -> None:
        """What would have become a call has no end, and not even a name: nobody is told of it."""
        self.is_cut = self.is_cut or self._max_calls is None or self.num_calls < self._max_calls

    def arguments(self, text: str) -> None:
        """More of the newest call's."""
        if text and not self._muted:
            self._pieces.append(ToolArguments(self.num_calls - 1, text))
