"""Exchange: one request and all that is said in answer to it, whatever the protocol. `CallExchange` is one call of the
replica; `server_tools.ToolExchange` may be several."""

from collections.abc import Callable
from typing import Protocol

from serving.gateway.call import Call, total_usage
from serving.gateway.speech.speech import SpeechPlan
from serving.gateway.transcript import Said, Transcript
from serving.replica.inbox import Sink
from serving.request import Usage


class Exchange(Protocol):
    """`open`, `next` until it is complete, and `close` whatever happened."""

    @property
    def num_choices(self) -> int: ...

    @property
    def prompt_tokens(self) -> int:
        """Of all that was asked so far, once it is open."""
        ...

    @property
    def is_complete(self) -> bool:
        """Every choice has told its end."""
        ...

    @property
    def usage(self) -> Usage:
        """Of all of it, once it is complete."""
        ...

    async def open(self) -> None:
        """Wait until the replica accepts. Raises ServiceError."""
        ...

    async def next(self) -> Said:
        """Raises ServiceError when the answer fails on its way."""
        ...

    def close(self) -> None:
        """Frees what is still held. May be called twice."""
        ...


class CallExchange:
    """What one call says, as a plan reads it."""

    def __init__(self, call: Call, plan: SpeechPlan = SpeechPlan()) -> None:  # noqa: B008 - frozen
        self._call = call
        self._plan = plan
        self._transcript = Transcript(plan, call.num_choices)

    @property
    def num_choices(self) -> int:
        return self._call.num_choices

    @property
    def prompt_tokens(self) -> int:
        return self._call.prompt_tokens

    @property
    def is_complete(self) -> bool:
        return self._transcript.is_complete

    @property
    def usage(self) -> Usage:
        return total_usage(self._transcript.finished)

    async def open(self) -> None:
        await self._call.open()
        if self._call.in_thought:
            self._transcript = Transcript(self._plan, self._call.num_choices, in_thought=True)

    async def next(self) -> Said:
        return self._transcript.hear(await self._call.next())

    def listen(self, on_news: Callable[[], None], sink: Sink | None = None) -> None:
        """From now on `on_news` is called when there is something for `poll`, and `next` is not. `sink` gets text
        before which nothing waits, as it comes; of what it takes it must ask `hear_text` what it says, or where all
        text is content tell `see_tokens`."""
        self._call.listen(on_news, sink)

    @property
    def says_plain_text(self) -> bool:
        """All text is content, as it comes."""
        return self._plan.is_plain

    @property
    def see_tokens(self) -> Callable[[int, int], None]:
        return self._call.see_tokens

    def hear_text(self, choice: int, text: str, num_tokens: int) -> Said:
        if num_tokens:
            self._call.see_tokens(choice, num_tokens)
        return self._transcript.hear_text(choice, text, num_tokens)

    def poll(self) -> Said | None:
        """What `next` would return if it is there already. Raises as it does."""
        event = self._call.poll()
        return None if event is None else self._transcript.hear(event)

    def close(self) -> None:
        self._call.close()
