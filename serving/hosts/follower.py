"""Follower: any host but the first. It takes the steps that host 0 takes, and lives as long as that one.

1. Join (`join.join`), connect the devices, load the model: as host 0 does, at the same time.
2. Take each step's inputs from host 0, step, and say what was computed.
3. Host 0 says when to stop. When it is gone, or says why the hosts cannot go on, this process ends at once: its own
   thread may wait for ever for a device that will not answer.
"""

import logging
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from model.errors import PodstreamError
from serving.config import EngineConfig, ReplicaConfig
from serving.engine.inputs import StepInputs
from serving.hosts import fingerprint
from serving.hosts.connection import Connection
from serving.hosts.join import join
from serving.hosts.leader import GRACE_S, Progress
from serving.hosts.messages import RestoreMatcher, inputs_from
from serving.process import configure_logging, die_with_parent, leave

logger = logging.getLogger(__name__)

Leave = Callable[[int, str], None]
"""Ends the process with an exit code and last words."""


class Follower:
    """This host's connection to host 0."""

    def __init__(self, connection: Connection, leave: Leave) -> None:
        self._connection = connection
        self._leave = leave
        self._inputs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="host-0", daemon=True).start()

    def say(self, what: str, value: Any) -> None:
        """If host 0 does not hear it, who listens finds out."""
        try:
            self._connection.send({what: value})
        except ConnectionError as error:
            logger.warning("host 0 %s", error)

    def inputs(self, restore: RestoreMatcher) -> Iterator[StepInputs]:
        """Of every step, without end."""
        while True:
            yield inputs_from(self._inputs.get(), restore)

    def _listen(self) -> None:
        try:
            while "commands" in (message := self._connection.receive()):
                self._inputs.put(message)
        except ConnectionError as error:
            self._end(1, f"host 0 {error}; this host ends, too.")
        else:
            reason = message.get("failed")
            self._end(1 if reason else 0, f"the hosts cannot go on: {reason}." if reason else "")

    def _end(self, code: int, words: str) -> None:
        self._connection.close()
        self._leave(code, words)


Mirror = Callable[[EngineConfig, ReplicaConfig, Progress, Follower], None]
"""Loads the model and takes host 0's steps, without end."""


def run(engine: EngineConfig, replica: ReplicaConfig, mirror: Mirror, *, follow_parent: bool = False) -> None:
    """Until host 0 ends. Raises PodstreamError when the hosts do not find together; later errors end the process."""
    configure_logging(replica.log_format, quiet=follow_parent)
    if follow_parent:
        die_with_parent(replica.drain_s)
    connection = join(replica, fingerprint.of_config(engine), logger.info)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave_it_to_host_0)
    follower = Follower(connection, leave)
    try:
        mirror(engine, replica, logger.info, follower)
    except BaseException as error:
        time.sleep(GRACE_S)  # host 0 may know better what is behind it, and end this process
        if not isinstance(error, PodstreamError):
            logger.exception("this host cannot go on")
        follower.say("failed", reason := f"{error or type(error).__name__}")
        leave(1, reason)


def _leave_it_to_host_0(number: int, frame: object) -> None:
    """It lets answers finish, for which it needs this host."""
    logger.info("%s is left to host 0, with which this host ends", signal.Signals(number).name)
