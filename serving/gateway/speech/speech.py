"""Speech: one answer's text as it comes, and the pieces that it says. `SpeechPlan` is how a request's are read."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from serving.dialect import THINK, THOUGHT, ToolDialect
from serving.gateway.speech.dialects import READERS, Reader, read_forced_arguments, read_forced_list, read_plain
from serving.gateway.speech.pieces import Content, Piece
from serving.gateway.speech.sayer import Sayer
from serving.gateway.speech.source import Reading, Source
from serving.request import FinishReason

MAX_PUSH = 4096


@dataclass(frozen=True, slots=True)
class SpeechPlan:
    """The default is text and nothing else."""

    dialect: ToolDialect = ToolDialect.NONE
    names: frozenset[str] = field(default_factory=frozenset)
    """Tools that may be called."""
    max_calls: int | None = None
    must_call: bool = False
    """The answer is a list of calls; with `forced_name`, the arguments of one."""
    forced_name: str | None = None
    thinks: bool = False

    @property
    def is_plain(self) -> bool:
        """All text is content."""
        return not (self.names or self.thinks)

    def new_speech(self, *, in_thought: bool = False) -> "Speech":
        """For one answer; `in_thought` if the prompt has opened its thought."""
        if self.is_plain:
            return PlainSpeech()
        return ReadSpeech(self, in_thought=in_thought and self.thinks)

    def reader(self) -> Reader:
        if not self.names:
            return read_plain
        if self.forced_name is not None:
            return read_forced_arguments(self.forced_name)
        return read_forced_list if self.must_call else READERS[self.dialect]


class PlainSpeech:
    """All text is content."""

    is_cut = False

    def push(self, text: str) -> Sequence[Piece]:
        return (Content(text),) if text else ()

    def finish(self) -> Sequence[Piece]:
        return ()

    def finish_reason(self, reason: FinishReason) -> str:
        return reason.value


class ReadSpeech:
    """Text that a reader takes apart."""

    def __init__(self, plan: SpeechPlan, *, in_thought: bool) -> None:
        self._plan = plan
        self._source = Source()
        self._sayer = Sayer(plan.names, plan.max_calls)
        self._reading = self._read(plan, in_thought)

    def push(self, text: str) -> Sequence[Piece]:
        pieces: list[Piece] = []
        for start in range(0, len(text), MAX_PUSH):  # a source moves what is left of its text with every step
            self._source.add(text[start : start + MAX_PUSH])
            pieces += self._go_on()
        return pieces

    def finish(self) -> Sequence[Piece]:
        """The rest: the answer has ended, wherever it stands."""
        self._source.ended = True
        return self._go_on()

    @property
    def is_cut(self) -> bool:
        """The answer has ended within a call, by a limit, a stop string or the model's own end."""
        return self._sayer.is_cut

    def finish_reason(self, reason: FinishReason) -> str:
        """A tool that the client named itself is no reason, says OpenAI's table, and a call that is not whole is none
        either."""
        called = self._sayer.num_calls and not self.is_cut and self._plan.forced_name is None
        return "tool_calls" if called and reason is FinishReason.STOP else reason.value

    def _go_on(self) -> Sequence[Piece]:
        next(self._reading, None)
        return self._sayer.take()

    def _read(self, plan: SpeechPlan, in_thought: bool) -> Reading[None]:
        if plan.thinks:
            yield from read_thought(self._source, self._sayer, in_thought)
        yield from plan.reader()(self._source, self._sayer)


Speech = PlainSpeech | ReadSpeech


def read_thought(source: Source, sayer: Sayer, in_thought: bool) -> Reading[None]:
    """What comes before the answer proper, without the white space around it. Content that does not begin with a
    thought is left as it is."""
    source.remember()
    yield from source.skip()
    opened = yield from source.take_mark(THINK)
    raw = source.forget()
    if not (opened or in_thought):
        source.text = raw + source.text
        return
    yield from source.skip()
    yield from source.tell_until((THOUGHT,), sayer.reasoning)
    yield from source.skip()
