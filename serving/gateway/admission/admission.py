"""Admission: lets requests in, or refuses them at once. What `Places` decides is done here."""

import asyncio
import time
from collections.abc import Callable

from serving.errors import DeadlineExceeded, InvalidRequest, Overloaded, ReplicaUnavailable
from serving.gateway.admission.caller import caller_of
from serving.gateway.admission.places import Place, Places
from serving.gateway.admission.queue_time import MOST_TOKENS
from serving.request import Request

_DRAINING = "the gateway is shutting down; send the request again."


class Admission:
    """One per gateway, on its event loop."""

    def __init__(self, max_queued: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`max_queued` counts answers in flight, those that run included. `clock` is in seconds."""
        self._places = Places(max_queued)
        self._clock = clock
        self._at_door: dict[Place, asyncio.Future[None]] = {}
        self._draining = False
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def num_in_flight(self) -> int:
        return self._places.num_in_flight

    @property
    def draining(self) -> bool:
        return self._draining

    def drain(self) -> None:
        """Refuse everything from now on."""
        self._draining = True
        for waiting in self._at_door.values():
            if not waiting.done():
                waiting.set_exception(ReplicaUnavailable(_DRAINING, retry_after_s=1))

    async def enter(
        self, request: Request, answers: int | None = None, *, slots: int = 1, deadline_s: float | None = None
    ) -> Place:
        """A place for so many answers at once, those that the request asks for by default. At once, but for one who
        comes back as he was told and finds nothing free: he waits. `slots` is how many answers can be made at once now;
        `deadline_s` how long this request may wait for one.

        Raises ReplicaUnavailable, Overloaded, DeadlineExceeded, or InvalidRequest for what will never have room;
        otherwise `leave` must follow.
        """
        if self._draining:
            raise ReplicaUnavailable(_DRAINING, retry_after_s=1)
        place, most = _place(request, answers), self._places.max_answers
        if place.answers > most:
            raise InvalidRequest(f"n is {place.answers}, this gateway makes {most} answers at once.", param="n")
        if deadline_s is not None:
            self._check_deadline(deadline_s, slots)
        wait_s = self._places.ask(self._clock(), place, slots, lambda: caller_of(request))
        if wait_s:
            raise Overloaded(
                f"{self.num_in_flight:,} answers are in flight, this gateway takes {most:,}; "
                f"come back in {wait_s:,} s with the same request, and it finds a place.",
                retry_after_s=wait_s,
            )
        if not place.entered:
            await self._wait(place, deadline_s)
        self._empty.clear()
        return place

    def leave(self, place: Place, *, served: bool = True) -> None:
        """What was refused further on says nothing about the time that answers take: `served` is False then."""
        self._let_in(self._places.leave(self._clock(), place, served=served))
        if not self.num_in_flight:
            self._empty.set()

    def plan_return(self, request: Request) -> int:
        """Seconds after which one who was let in, and refused further on, should come back."""
        return self._places.promise(self._clock(), _place(request), lambda: caller_of(request))

    async def emptied(self, timeout_s: float) -> bool:
        """Wait until nothing is in flight; False when that took longer than the time-out."""
        try:
            await asyncio.wait_for(self._empty.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def _wait(self, place: Place, deadline_s: float | None) -> None:
        """At the door. Whoever goes away, in whatever way, leaves nothing behind."""
        waiting = self._at_door[place] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(deadline_s):
                await waiting
        except BaseException as error:
            if place.entered:
                self.leave(place, served=False)
            else:
                self._let_in(self._places.give_up(place))
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(
                    f"no place was free within deadline_ms, {1000 * (deadline_s or 0):,.0f}.", param="deadline_ms"
                ) from None
            raise
        finally:
            del self._at_door[place]

    def _let_in(self, places: list[Place]) -> None:
        for place in places:
            waiting = self._at_door[place]
            if not waiting.done():
                waiting.set_result(None)

    def _check_deadline(self, deadline_s: float, slots: int) -> None:
        wait_s = self._places.expected_wait_s(self._clock(), slots)
        if wait_s > deadline_s:
            raise DeadlineExceeded(
                f"{self._places.num_waiting:,} answers wait already, about {wait_s:.1f} s, and deadline_ms is "
                f"{1000 * deadline_s:,.0f}; it cannot be met.",
                param="deadline_ms",
            )


def _place(request: Request, answers: int | None = None) -> Place:
    tokens = min(request.sampling.max_tokens or MOST_TOKENS, MOST_TOKENS)
    return Place(request.num_choices if answers is None else answers, tokens)
