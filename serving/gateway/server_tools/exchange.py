"""ToolExchange: answers during which the gateway runs the tools that the model calls.

The first call of the replica makes all answers to the one prompt. Each of them that calls tools goes on by itself from
there (`Rounds`), while the others are still written.
"""

from collections.abc import Callable, Mapping

from serving.gateway.call import Call, Services
from serving.gateway.exchange import CallExchange
from serving.gateway.schema import ChatBody
from serving.gateway.server_tools.config import ServerTool
from serving.gateway.server_tools.rounds import Rounds
from serving.gateway.transcript import Said
from serving.replica.inbox import Sink
from serving.request import Usage


class ToolExchange:
    """The first call holds the place in the gateway of all answers, until the last of them is complete."""

    see_plain = None
    """Calls are looked for in all that is said."""

    def __init__(self, services: Services, body: ChatBody, request_id: str, tools: Mapping[str, ServerTool]) -> None:
        """`tools` are those of the server that the body offers."""
        self._first = CallExchange(
            Call(services, body.to_request(request_id)), body.speech_plan(services.replica.status)
        )
        self._rounds = [Rounds(services, body, request_id, tools, choice) for choice in range(self.num_choices)]

    @property
    def num_choices(self) -> int:
        return self._first.num_choices

    @property
    def prompt_tokens(self) -> int:
        return self._first.prompt_tokens + sum(rounds.prompt_tokens for rounds in self._rounds)

    @property
    def is_complete(self) -> bool:
        return all(rounds.is_complete for rounds in self._rounds)

    @property
    def usage(self) -> Usage:
        return sum((rounds.usage for rounds in self._rounds), self._first.usage)

    async def open(self) -> None:
        await self._first.open()

    def listen(self, on_news: Callable[[], None], sink: Sink | None = None) -> None:
        self._first.listen(on_news, sink)
        for rounds in self._rounds:
            rounds.listen(on_news, sink)

    def poll(self) -> Said | None:
        said = self._first.poll()
        if said is not None:
            return self._rounds[said.choice].hear(said)
        return next((said for rounds in self._rounds if (said := rounds.poll()) is not None), None)

    def hear_text(self, choice: int, text: str, num_tokens: int) -> Said:
        rounds = self._rounds[choice]
        said = (
            rounds.own.hear_text(0, text, num_tokens) if rounds.own else self._first.hear_text(choice, text, num_tokens)
        )
        return rounds.hear(said)

    def close(self) -> None:
        for rounds in self._rounds:
            rounds.close()
        self._first.close()
