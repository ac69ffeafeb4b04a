"""Admission: how many requests may be in flight at once; decides at once, queues nothing itself."""

import asyncio
import math

from serving.errors import Overloaded, ReplicaUnavailable

MAX_RETRY_AFTER_S = 60
DURATION_MEMORY = 0.9  # share of the old mean that a finished request leaves


class Admission:
    """A counter with a limit, and the mean duration of requests to tell the refused when to come back."""

    def __init__(self, max_queued: int) -> None:
        self._max_queued = max_queued
        self._num_in_flight = 0
        self._mean_s = 1.0
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

    def enter(self) -> None:
        """Raises ReplicaUnavailable or Overloaded; otherwise `leave` must follow."""
        if self._draining:
            raise ReplicaUnavailable("the gateway is shutting down; send the request again.", retry_after_s=1)
        if self._num_in_flight >= self._max_queued:
            raise Overloaded(
                f"{self._num_in_flight:,} requests are in flight, the most this gateway takes; try again later.",
                retry_after_s=self.retry_after_s,
            )
        self._num_in_flight += 1
        self._empty.clear()

    def leave(self, duration_s: float) -> None:
        self._num_in_flight -= 1
        if not self._num_in_flight:
            self._empty.set()
        self._mean_s = DURATION_MEMORY * self._mean_s + (1 - DURATION_MEMORY) * duration_s

    async def emptied(self, timeout_s: float) -> bool:
        """Wait until nothing is in flight; False when that took longer than the time-out."""
        try:
            await asyncio.wait_for(self._empty.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    @property
    def retry_after_s(self) -> int:
        """When a place should be free: n requests of d seconds each end every d/n seconds."""
        return min(MAX_RETRY_AFTER_S, max(1, math.ceil(self._mean_s / max(1, self._num_in_flight))))
