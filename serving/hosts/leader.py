"""Hosts: all other hosts of a slice as host 0 sees them. Imports no JAX.

1. `join.gather` has their connections. From here on a thread listens to each of them.
2. `until` waits for what they report while starting; `send` has them take the steps that this host takes.
3. The first thing that goes wrong anywhere is `failure`, for good: the others hear it and end, and so does this host. A
   supervisor starts them all again.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from serving.config import ReplicaConfig
from serving.engine.inputs import StepInputs
from serving.errors import ConfigError, EngineFailed
from serving.hosts.connection import Connection, frame
from serving.hosts.digests import MAX_LAG, Digests
from serving.hosts.messages import inputs_to

logger = logging.getLogger(__name__)

Progress = Callable[[str], None]

GRACE_S = 2.0
"""When a host dies, the collectives of the others fail, and their errors name nobody. So whoever fails waits a moment
for host 0 to find out whose connection ended."""
POLL_S = 0.5


class Hosts:
    """Implements `serving.engine.inputs.Peers`."""

    def __init__(self, connections: Mapping[int, Connection], names: Mapping[int, str], config: ReplicaConfig) -> None:
        """By number of the host, from 1; `names` are those of their machines, `config` is that of host 0."""
        self.config = config
        self._connections = connections
        self._names = names
        self._failure = ""
        self._stopping = False
        self._changed = threading.Condition()
        self._said: dict[str, dict[int, Any]] = {}
        self._digests = Digests(connections)
        for host in connections:
            threading.Thread(target=self._listen, args=(host,), name=f"host-{host}", daemon=True).start()

    @property
    def failure(self) -> str:
        return self._failure

    @property
    def numbers(self) -> list[int]:
        return sorted(self._connections)

    def name(self, host: int) -> str:
        return f"host {host} ({self._names[host]})"

    def until(self, what: str, within_s: float, progress: Progress) -> dict[int, Any]:
        """Wait until every host has said this; returns what they said.

        Raises ConfigError with those that have not in time, EngineFailed when the hosts cannot go on.
        """
        end = time.monotonic() + within_s
        with self._changed:
            while missing := [host for host in self.numbers if host not in self._said.get(what, {})]:
                names = ", ".join(map(self.name, missing))
                if self._failure:
                    raise EngineFailed(self._failure)
                if (left_s := end - time.monotonic()) <= 0:
                    raise ConfigError(f"not {what} within {within_s:.0f} s: {names}; the logs there may say why.")
                progress(f"waiting until {what}: {names}")
                self._changed.wait(min(left_s, POLL_S))
            return self._said[what]

    def send(self, inputs: StepInputs) -> None:
        self._tell(inputs_to(inputs))

    def check(self, digest: int) -> None:
        with self._changed:
            self._note(self._digests.add_mine(digest))
            self._changed.wait_for(lambda: self._failure or self._digests.lag <= MAX_LAG)

    def fail(self, reason: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._failure, GRACE_S)
            self._note(f"host 0: {reason}")

    def stop(self) -> None:
        self._stopping = True
        self._tell({"stop": True})

    def _tell(self, message: Any) -> None:
        """A host that does not hear it is found out by who listens to it."""
        data = frame(message)
        for host, connection in self._connections.items():
            try:
                connection.send_frame(data)
            except ConnectionError as error:
                self._lose(host, error)

    def _listen(self, host: int) -> None:
        try:
            while True:
                self._hear(host, self._connections[host].receive())
        except ConnectionError as error:
            self._lose(host, error)
        except (KeyError, TypeError, AttributeError, ValueError):
            self._lose(host, ConnectionError("sent something that is no message"))
        finally:
            self._connections[host].close()

    def _hear(self, host: int, message: dict[str, Any]) -> None:
        [(what, value)] = message.items()
        with self._changed:
            if what == "failed":
                self._note(f"{self.name(host)}: {value}")
            elif what == "digest":
                self._note(self._digests.add(host, value))
            else:
                self._said.setdefault(what, {})[host] = value
            self._changed.notify_all()

    def _lose(self, host: int, error: ConnectionError) -> None:
        with self._changed:
            self._note(f"{self.name(host)} is lost: it {error}")

    def _note(self, reason: str) -> None:
        """With the lock held. The first reason is the one; what comes after it are its consequences."""
        if not reason or self._failure or self._stopping:
            return
        self._failure = reason.rstrip(".")
        logger.error("the hosts cannot go on: %s", self._failure)
        self._changed.notify_all()
        threading.Thread(target=self._tell, args=({"failed": self._failure},), daemon=True).start()
