"""Digests: whether all hosts have computed the same, step by step. Host 0 waits for nobody who is not far behind."""

from collections import deque
from collections.abc import Iterable

MAX_LAG = 32
"""Steps that a host may be behind host 0: the device keeps those of one mesh together, so few are usual."""


class Digests:
    """What host 0 and each other host said, as far as it is not compared yet. Not for several threads at once."""

    def __init__(self, hosts: Iterable[int]) -> None:
        self._mine: dict[int, deque[int]] = {host: deque() for host in hosts}
        self._theirs: dict[int, deque[int]] = {host: deque() for host in self._mine}
        self._num_compared = dict.fromkeys(self._mine, 0)

    @property
    def lag(self) -> int:
        """Steps that the slowest host is behind."""
        return max(map(len, self._mine.values()))

    def add_mine(self, digest: int) -> str:
        """Of host 0's next step. Returns who has computed something else; empty when nobody has."""
        for queue in self._mine.values():
            queue.append(digest)
        return next(filter(None, map(self._compare, self._mine)), "")

    def add(self, host: int, digest: int) -> str:
        """The same of another host's next step."""
        self._theirs[host].append(digest)
        return self._compare(host)

    def _compare(self, host: int) -> str:
        mine, theirs = self._mine[host], self._theirs[host]
        while mine and theirs:
            self._num_compared[host] += 1
            if mine.popleft() != theirs.popleft():
                return f"host {host} computed something else than host 0 in step {self._num_compared[host]:,}"
        return ""
