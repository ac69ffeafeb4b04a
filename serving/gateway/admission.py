"""Admission: how many answers may be in flight at once; decides at once, queues nothing itself."""

import asyncio
import time
from collections.abc import Callable

from serving.errors import DeadlineExceeded, InvalidRequest, Overloaded, ReplicaUnavailable
from serving.gateway.queue_time import DrainRate, expected_wait_s, plan_return


class Admission:
    """A counter with a limit, and the rate at which answers end, to tell the refused when to come back."""

    def __init__(self, max_queued: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`max_queued` counts answers in flight, those that run included. `clock` is in seconds."""
        self._max_queued = max_queued
        self._clock = clock
        self._num_in_flight = 0
        self._num_slots = 1
        self._rate = DrainRate()
        self._promised_until_s = 0.0
        self._draining = False
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def num_in_flight(self) -> int:
        return self._num_in_flight

    @property
    def draining(self) -> bool:
        return self._draining

    def drain(self) -> None:
        """Refuse everything from now on."""
        self._draining = True

    def enter(self, answers: int = 1, *, slots: int = 1, deadline_s: float | None = None) -> None:
        """`slots` is how many answers can be made at once now; `deadline_s` how long this request may wait for one.

        Raises ReplicaUnavailable, Overloaded, DeadlineExceeded, or InvalidRequest for what will never have room;
        otherwise `leave` must follow.
        """
        if self._draining:
            raise ReplicaUnavailable("the gateway is shutting down; send the request again.", retry_after_s=1)
        if answers > self._max_queued:
            raise InvalidRequest(f"n is {answers}, this gateway makes {self._max_queued} answers at once.", param="n")
        self._pass_time()
        self._num_slots = max(1, slots)
        if self._num_in_flight + answers > self._max_queued:
            raise Overloaded(
                f"{self._num_in_flight:,} answers are in flight, this gateway takes {self._max_queued:,}; "
                "try again later.",
                retry_after_s=self.plan_return(answers),
            )
        if deadline_s is not None:
            self._check_deadline(deadline_s)
        self._num_in_flight += answers
        self._empty.clear()

    def leave(self, answers: int = 1, *, served: bool = True) -> None:
        """What was refused further on says nothing about the time that answers take: `served` is False then."""
        self._pass_time()
        self._num_in_flight -= answers
        if served:
            self._rate.end(answers)
        if not self._num_in_flight:
            self._empty.set()

    async def emptied(self, timeout_s: float) -> bool:
        """Wait until nothing is in flight; False when that took longer than the time-out."""
        try:
            await asyncio.wait_for(self._empty.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def plan_return(self, answers: int) -> int:
        """Seconds after which a request that was refused will find room; each one pushes the next one back."""
        wait_s, self._promised_until_s = plan_return(
            self._clock(), answers, self._num_waiting, self._drain_rate, self._max_queued, self._promised_until_s
        )
        return wait_s

    @property
    def _num_waiting(self) -> int:
        return max(0, self._num_in_flight - self._num_slots)

    @property
    def _drain_rate(self) -> float:
        return self._rate.per_second(self._num_slots)

    def _pass_time(self) -> None:
        self._rate.pass_time(self._clock(), min(self._num_in_flight, self._num_slots))

    def _check_deadline(self, deadline_s: float) -> None:
        wait_s = expected_wait_s(max(0, self._num_in_flight + 1 - self._num_slots), self._drain_rate)
        if wait_s > deadline_s:
            raise DeadlineExceeded(
                f"{self._num_waiting:,} answers wait already, about {wait_s:.1f} s, and deadline_ms is "
                f"{1000 * deadline_s:,.0f}; it cannot be met.",
                param="deadline_ms",
            )
