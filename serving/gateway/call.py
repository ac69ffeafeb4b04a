"""Call: one client's request on its way through the gateway, from admission to its one end, with its latencies."""

import time
from dataclasses import dataclass

from serving.errors import Overloaded, ServiceError
from serving.gateway.admission import Admission
from serving.metrics import Metrics, ModelMetrics
from serving.replica.client import Generation, ReplicaClient
from serving.replica.events import Accepted, Delta, Event, Finished
from serving.request import FinishReason, Request, Usage


@dataclass(frozen=True, slots=True)
class Services:
    """What the gateway's endpoints share."""

    replica: ReplicaClient
    admission: Admission
    metrics: Metrics


class Call:
    """`open`, `next` until Finished, and `close` whatever happened: that frees the slot of an unfinished answer."""

    def __init__(self, services: Services, request: Request) -> None:
        self._services = services
        self._request = request
        self._started = time.perf_counter()
        self._entered = False
        self._generation: Generation | None = None
        self._watch: Stopwatch | None = None

    async def open(self) -> None:
        """Admit, send, and wait until the replica accepts. Raises ServiceError."""
        self._services.admission.enter()
        self._entered = True
        self._generation = self._services.replica.generate(self._request)
        model = self._services.replica.status.model  # the served name: a client's spelling must not become a label
        self._watch = Stopwatch(self._services.metrics.of_model(model), self._started)
        await self._take()

    async def next(self) -> Delta | Finished:
        """Raises ServiceError when the answer fails on its way."""
        event = await self._take()
        assert not isinstance(event, Accepted), "a request is accepted once, in open()"
        return event

    def close(self) -> None:
        """May be called twice."""
        if self._generation is not None and self._watch is not None:
            self._generation.close()
            self._watch.end(FinishReason.ABORT)
        if self._entered:
            self._entered = False
            self._services.admission.leave(time.perf_counter() - self._started)

    async def _take(self) -> Event:
        assert self._generation is not None and self._watch is not None, "open() comes first"
        try:
            event = await anext(self._generation)
        except ServiceError as error:
            self._watch.end(FinishReason.ERROR)
            if isinstance(error, Overloaded) and error.retry_after_s is None:
                error.retry_after_s = self._services.admission.retry_after_s
            raise
        self._watch.see(event)
        return event


class Stopwatch:
    """Turns the events of one request into latencies. The first end counts."""

    def __init__(self, metrics: ModelMetrics, started: float) -> None:
        self._metrics = metrics
        self._started = self._last = started
        self._seen_token = self._ended = False

    def see(self, event: Event) -> None:
        match event:
            case Delta(num_tokens=num_tokens) if num_tokens:
                self._see_tokens(num_tokens)
            case Finished(reason=reason, usage=usage):
                self.end(reason, usage)

    def end(self, reason: FinishReason, usage: Usage | None = None) -> None:
        if not self._ended:
            self._ended = True
            self._metrics.finish(reason, time.perf_counter() - self._started, usage)

    def _see_tokens(self, num_tokens: int) -> None:
        now = time.perf_counter()
        if self._seen_token:
            self._metrics.next_tokens(now - self._last, num_tokens)
        else:
            self._seen_token = True
            self._metrics.first_token(now - self._started)
        self._last = now
