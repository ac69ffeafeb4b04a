"""Call: one client's request on its way through the gateway, from admission to its one end, with its latencies."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from serving.errors import Overloaded, ServiceError
from serving.gateway.admission.admission import Admission
from serving.gateway.admission.places import Place
from serving.gateway.server_tools.caller import ToolCaller
from serving.gateway.server_tools.config import ServerTools
from serving.metrics import Metrics, ModelMetrics
from serving.replica.client import ReplicaClient
from serving.replica.events import Accepted, Delta, Event, Finished
from serving.replica.generation import Generation
from serving.replica.inbox import Sink
from serving.request import FinishReason, Request, Usage


@dataclass(frozen=True, slots=True)
class Services:
    """What the gateway's endpoints share."""

    replica: ReplicaClient
    admission: Admission
    metrics: Metrics
    tools: ServerTools
    tool_caller: ToolCaller


class Call:
    """`open`, `listen` and `poll` until every choice is Finished, and `close` whatever happened: that frees the slots
    of unfinished answers, so one that fails takes the others with it.

    A request with a deadline is open once its answer has begun, so that one that comes too late has its proper status.
    """

    def __init__(self, services: Services, request: Request, *, admitted: bool = False) -> None:
        """`admitted` if somebody else has a place for it in the gateway."""
        self._admitted = admitted
        self._services = services
        self._request = request
        self._started = time.perf_counter()
        self.prompt_tokens = 0
        """Once open."""
        self.in_thought = False
        """Once open: whether the answer begins within the model's thought."""
        self._place: Place | None = None
        self._accepted = False
        self._first: Event | None = None
        self._generation: Generation | None = None
        self._watch: Stopwatch | None = None

    @property
    def num_choices(self) -> int:
        return self._request.num_choices

    async def open(self) -> None:
        """Admit, send, and wait until the replica accepts. Raises ServiceError."""
        services, request = self._services, self._request
        deadline_s = None if request.deadline_ms is None else request.deadline_ms / 1000
        if not self._admitted:
            slots = services.replica.status.load.total_slots
            self._place = await services.admission.enter(request, slots=slots, deadline_s=deadline_s)
        if request.deadline_ms is not None:  # who came back to a full house has waited already
            waited_ms = int(1000 * (time.perf_counter() - self._started))
            request = dataclasses.replace(request, deadline_ms=max(1, request.deadline_ms - waited_ms))
        self._generation = services.replica.generate(request)
        model = services.replica.status.model  # the served name: a client's spelling must not become a label
        self._watch = Stopwatch(services.metrics.of_model(model), self._started, request.num_choices)
        accepted = await self._take()
        assert isinstance(accepted, Accepted), "a request is accepted before anything else"
        self.prompt_tokens, self.in_thought = accepted.prompt_tokens, accepted.in_thought
        services.metrics.of_model(model).ask(request.num_choices, request.sampling.max_tokens)
        if deadline_s is not None:
            self._first = await self._take()
        self._accepted = True

    def listen(self, on_news: Callable[[], None], sink: Sink | None = None) -> None:
        """From now on `on_news` is called when there is something for `poll`. `sink` as the Generation has it; of what
        it takes `see_tokens` must be told."""
        assert self._generation is not None, "open() comes first"
        self._generation.listen(on_news, sink)

    @property
    def see_tokens(self) -> Callable[[int, int], None]:
        """To time what a sink has taken: called with the choice and the number of tokens."""
        assert self._watch is not None, "open() comes first"
        return self._watch.see_tokens

    def poll(self) -> Delta | Finished | None:
        """What comes next, if it is there. Raises ServiceError when the answer fails on its way."""
        assert self._generation is not None and self._watch is not None, "open() comes first"
        event, self._first = self._first, None
        if event is None:
            try:
                event = self._generation.poll()
            except ServiceError as error:
                self._fail(error)
                raise
            if event is None:
                return None
            self._watch.see(event)
        assert not isinstance(event, Accepted), "a request is accepted once, in open()"
        return event

    def close(self) -> None:
        """May be called twice."""
        if self._generation is not None and self._watch is not None:
            self._generation.close()
            self._watch.end(FinishReason.ABORT)
        if self._place is not None:
            place, self._place = self._place, None
            self._services.admission.leave(place, served=self._accepted)

    async def _take(self) -> Event:
        assert self._generation is not None and self._watch is not None, "open() comes first"
        try:
            event = await anext(self._generation)
        except ServiceError as error:
            self._fail(error)
            raise
        self._watch.see(event)
        return event

    def _fail(self, error: ServiceError) -> None:
        assert self._watch is not None, "open() comes first"
        self._watch.end(FinishReason.ERROR)
        if isinstance(error, Overloaded) and error.retry_after_s is None:
            error.retry_after_s = self._services.admission.plan_return(self._request)


class Stopwatch:
    """Turns the events of one request into latencies. The first end counts, which is the last one of its answers."""

    def __init__(self, metrics: ModelMetrics, started: float, num_choices: int = 1) -> None:
        self._metrics = metrics
        self._started = started
        self._first: dict[int, float] = {}  # by choice
        self._last: dict[int, float] = {}
        self._finished: list[Finished] = []
        self._num_choices = num_choices
        self._ended = False

    def see(self, event: Event) -> None:
        if isinstance(event, Delta):
            if event.num_tokens:
                self.see_tokens(event.choice, event.num_tokens)
        elif isinstance(event, Finished):
            self._finished.append(event)
            if event.phases is not None:
                self._metrics.spent(event.phases)
            if event.choice in self._last:
                duration_s = self._last[event.choice] - self._first[event.choice]
                self._metrics.decoded(duration_s, event.usage.completion_tokens)
            if len(self._finished) == self._num_choices:
                longest = max(finished.usage.completion_tokens for finished in self._finished)
                self.end(event.reason, total_usage(self._finished), longest)

    def end(self, reason: FinishReason, usage: Usage | None = None, longest: int | None = None) -> None:
        if not self._ended:
            self._ended = True
            self._metrics.finish(reason, time.perf_counter() - self._started, usage, longest)

    def see_tokens(self, choice: int, num_tokens: int) -> None:
        """New ones of one answer; 1 or more."""
        now, last = time.perf_counter(), self._last.get(choice)
        if last is not None:
            self._metrics.next_tokens(now - last, num_tokens)
        else:
            if not self._last:
                self._metrics.first_token(now - self._started)
            self._first[choice] = now
        self._last[choice] = now


def total_usage(answers: Sequence[Finished]) -> Usage:
    """Of all answers to one prompt, which counts once. What was cached is what the first one found."""
    first = min(answers, key=lambda answer: answer.choice).usage
    summed = ("completion_tokens", "drafted_tokens", "accepted_tokens", "reasoning_tokens")
    return dataclasses.replace(
        first, **{name: sum(getattr(answer.usage, name) for answer in answers) for name in summed}
    )
