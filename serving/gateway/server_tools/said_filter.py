"""SaidFilter: what the client sees of an answer that has rounds."""

from serving.gateway.choice import Choice, ToolCall
from serving.gateway.speech.pieces import Content, Piece, Reasoning, ToolArguments, ToolStart
from serving.gateway.transcript import Said

BETWEEN = "\n\n"
"""Stands between what is said in two rounds."""


class SaidFilter:
    """What the client sees of each round: all but the server's calls. Keeps what the round said, for the next one."""

    def __init__(self, server_names: frozenset[str]) -> None:
        self._server_names = server_names
        self._shown: dict[int, int] = {}
        """The client's calls of this round: their number there, and for the client."""
        self._num_shown = 0
        self._kinds: set[type[Piece]] = set()
        """Of text that earlier rounds have told, and this one has not."""
        self._told: set[type[Piece]] = set()
        self._places: dict[int, ToolCall] = {}
        self.round = Choice()
        """The words of this round, and the server's calls."""

    @property
    def num_shown_now(self) -> int:
        """Calls of the client's tools in this round."""
        return len(self._shown)

    def pass_on(self, said: Said) -> Said:
        pieces = [shown for piece in said.pieces if (shown := self._see(piece)) is not None]
        return said._replace(pieces=pieces)

    def next_round(self) -> None:
        self._shown, self._places, self.round = {}, {}, Choice()
        self._kinds = set(self._told)

    def _see(self, piece: Piece) -> Piece | None:
        match piece:
            case Content(text):
                self.round.parts.append(text)
                return Content(self._parted(piece) + text)
            case Reasoning(text):
                self.round.thoughts.append(text)
                return Reasoning(self._parted(piece) + text)
            case ToolStart(index, call_id, name):
                return self._see_call(index, call_id, name)
            case ToolArguments(index, text):
                if index in self._shown:
                    return ToolArguments(self._shown[index], text)
                self._places[index].parts.append(text)
                return None

    def _see_call(self, index: int, call_id: str, name: str) -> Piece | None:
        if name in self._server_names:
            self._places[index] = call = ToolCall(call_id, name)
            self.round.calls.append(call)
            return None
        self._shown[index] = self._num_shown
        self._num_shown += 1
        return ToolStart(self._shown[index], call_id, name)

    def _parted(self, piece: Piece) -> str:
        self._told.add(type(piece))
        if type(piece) not in self._kinds:
            return ""
        self._kinds.discard(type(piece))
        return BETWEEN
