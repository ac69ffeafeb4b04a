"""Slices of several hosts: their configs, and hosts that are threads of this process."""

import dataclasses
import queue
import threading
from contextlib import contextmanager

from podstream.serve import _free_pair
from serving.config import ReplicaConfig
from serving.hosts import join as joining
from serving.hosts.follower import Follower

FINGERPRINT = {"page_size": "16"}


def places(count, join_s=10.0):
    """The configs of hosts that find each other on this machine."""
    config = ReplicaConfig(coordinator=f"127.0.0.1:{_free_pair()}", num_processes=count, join_s=join_s)
    return [dataclasses.replace(config, process_id=number) for number in range(count)]


def ignore(_):
    """For progress that nobody watches."""


class Background:
    """A call in a thread; `result` waits for it."""

    def __init__(self, call, *args):
        self._results = queue.SimpleQueue()
        threading.Thread(target=self._run, args=(call, *args), daemon=True).start()

    def _run(self, call, *args):
        try:
            self._results.put((call(*args), None))
        except BaseException as error:  # noqa: BLE001
            self._results.put((None, error))

    def result(self, timeout_s=10):
        result, error = self._results.get(timeout=timeout_s)
        if error is not None:
            raise error
        return result


class Guest:
    """Another host as a test plays it; how it would have ended is in `ended`."""

    def __init__(self, place, fingerprint=FINGERPRINT):
        self.ended = queue.SimpleQueue()
        self.connection = joining.join(place, fingerprint, ignore)
        self.follower = Follower(self.connection, lambda code, words: self.ended.put((code, words)))

    def vanish(self):
        """As when its process is killed."""
        self.connection.close()


@contextmanager
def gathered(count, **changes):
    """Host 0 and the others, joined; they end with it."""
    first, *others = places(count, **changes)
    joining_hosts = Background(joining.gather, first, FINGERPRINT, ignore)
    guests = [Background(Guest, place) for place in others]
    hosts, guests = joining_hosts.result(), [guest.result() for guest in guests]
    try:
        yield hosts, guests
    finally:
        hosts.stop()
        for connection in (*hosts._connections.values(), *(guest.connection for guest in guests)):
            connection.close()
