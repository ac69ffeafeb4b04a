"""How hosts find each other before any of them loads anything. Imports no JAX.

Host 0 listens at the coordinator's address, and JAX's own coordinator one port above it. Host 0 and who comes show
each other that they know the same secret (`handshake`). Then a host says who it is and what it would run; what does not
fit is refused by name, and so is who has not come in time.
"""

import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Iterator

from serving.config import ReplicaConfig, is_loopback
from serving.errors import ConfigError
from serving.hosts.connection import Connection
from serving.hosts.fingerprint import Fingerprint, difference
from serving.hosts.handshake import WrongSecret, approach_host_0, receive_host
from serving.hosts.leader import Hosts, Progress
from serving.hosts.messages import Hello, hello_from
from serving.secret import Secret

logger = logging.getLogger(__name__)

RETRY_S = 0.2
TRY_S = 5.0
"""Of one try to reach host 0, whose address may change while it starts."""
_Guest = tuple[Hello, Connection]


def gather(config: ReplicaConfig, fingerprint: Fingerprint, progress: Progress) -> Hosts:
    """Host 0: wait for all others. Raises ConfigError with who has not come in time, or who does not fit and why,
    or for a secret that cannot be read."""
    secret = _secret(config)
    guests: dict[int, _Guest] = {}
    wanted = set(range(1, config.num_processes))
    end = time.monotonic() + config.join_s
    with _arrivals(config, secret) as arrivals:
        while missing := sorted(wanted - guests.keys()):
            progress(f"waiting for {_hosts(missing)} of {config.num_processes} at {config.coordinator}")
            try:
                hello, connection = arrivals.get(timeout=max(end - time.monotonic(), 0.0))
            except queue.Empty:
                _refuse(guests, reason := _absent(missing, config))
                raise ConfigError(reason) from None
            if earlier := guests.pop(hello.process_id, None):  # it has died and come again, or it is told
                _refuse({0: earlier}, f"another process came as host {hello.process_id}.")
            guests[hello.process_id] = hello, connection
            if reason := _misfit(hello, config, fingerprint):
                _refuse(guests, reason)
                raise ConfigError(reason)
    for _, connection in guests.values():
        with contextlib.suppress(ConnectionError):  # whoever listens to it finds out
            connection.send({"welcome": True})
    names = {number: hello.name for number, (hello, _) in guests.items()}
    return Hosts({number: connection for number, (_, connection) in guests.items()}, names, config)


def join(config: ReplicaConfig, fingerprint: Fingerprint, progress: Progress) -> Connection:
    """Any other host: go to host 0 and wait until all are there. Raises ConfigError with the reason."""
    secret = _secret(config)
    progress(f"waiting for host 0 at {config.coordinator}")
    connection = _connect(config, secret)
    hello = Hello(config.process_id, config.num_processes, socket.gethostname(), fingerprint)
    try:
        connection.send({"hello": hello})
        answer = connection.receive()
    except ConnectionError as error:
        connection.close()
        raise ConfigError(f"host 0 at {config.coordinator} {error} before all hosts were there.") from error
    if "refused" in answer:
        connection.close()
        raise ConfigError(str(answer["refused"]))
    return connection


def _secret(config: ReplicaConfig) -> bytes:
    """Empty where there is none."""
    secret = Secret.read(config.secret_file)
    return b"" if secret is None else secret.value


def _connect(config: ReplicaConfig, secret: bytes) -> Connection:
    sock = _reach(config)
    try:
        approach_host_0(sock, secret)
    except WrongSecret as error:
        sock.close()
        raise ConfigError(
            f"host 0 at {config.coordinator} {error}, or is somebody else; give all hosts the same --secret-file."
        ) from error
    except ConnectionError as error:
        sock.close()
        raise ConfigError(f"host 0 at {config.coordinator} {error} before all hosts were there.") from error
    return Connection(sock)


def _reach(config: ReplicaConfig) -> socket.socket:
    """Also while host 0 has no name or does not listen yet."""
    end = time.monotonic() + config.join_s
    while True:
        try:
            return socket.create_connection(config.coordinator_address, timeout=TRY_S)
        except OSError as error:
            if time.monotonic() > end:
                raise ConfigError(
                    f"host 0 was not to be reached at {config.coordinator} within {config.join_s:g} s ({error})."
                ) from error
            time.sleep(RETRY_S)


def _misfit(hello: Hello, config: ReplicaConfig, fingerprint: Fingerprint) -> str:
    """Why the hosts cannot serve together; empty if they can."""
    who, count = f"host {hello.process_id} ({hello.name})", config.num_processes
    if hello.num_processes != count:
        return f"{who} was started as one of {hello.num_processes} hosts, host 0 as one of {count}."
    if different := difference(fingerprint, hello.fingerprint):
        return f"{who} does not fit host 0: {different}; start all hosts alike."
    return ""


def _absent(missing: list[int], config: ReplicaConfig) -> str:
    return (
        f"{_hosts(missing)} of {config.num_processes} did not come to {config.coordinator} within {config.join_s:g} s; "
        "see their logs, or allow more with --join-s."
    )


def _hosts(numbers: list[int]) -> str:
    return f"host{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _refuse(guests: dict[int, _Guest], reason: str) -> None:
    for _, connection in guests.values():
        with contextlib.suppress(ConnectionError):  # it has gone already
            connection.send({"refused": reason})
        connection.close()


@contextlib.contextmanager
def _arrivals(config: ReplicaConfig, secret: bytes) -> Iterator["queue.SimpleQueue[_Guest]"]:
    """Those who come, once they have said who they are. Each is heard in a thread of its own: a stranger who says
    nothing holds up nobody."""
    arrivals: queue.SimpleQueue[_Guest] = queue.SimpleQueue()
    closed = threading.Event()
    with _listen(config) as listener:
        arguments = (listener, secret, config.num_processes, arrivals, closed)
        threading.Thread(target=_accept, args=arguments, daemon=True).start()
        try:
            yield arrivals
        finally:
            closed.set()
            listener.shutdown(socket.SHUT_RDWR)  # wakes who accepts
            _refuse_late(arrivals)


def _listen(config: ReplicaConfig) -> socket.socket:
    """On all addresses of this host, since it may not know itself by the name that others call it; but a loopback
    address is meant as one."""
    host, port = config.coordinator_address
    try:
        if is_loopback(host):
            return socket.create_server((host, port))
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        raise ConfigError(f"host 0 cannot listen at {config.coordinator} ({error.strerror or error}).") from error


def _accept(
    listener: socket.socket,
    secret: bytes,
    num_processes: int,
    arrivals: "queue.SimpleQueue[_Guest]",
    closed: threading.Event,
) -> None:
    while True:
        try:
            sock, address = listener.accept()
        except OSError:
            return  # all are there, or it is too late
        arguments = (sock, address[0], secret, num_processes, arrivals, closed)
        threading.Thread(target=_greet, args=arguments, daemon=True).start()


def _greet(
    sock: socket.socket,
    address: str,
    secret: bytes,
    num_processes: int,
    arrivals: "queue.SimpleQueue[_Guest]",
    closed: threading.Event,
) -> None:
    try:
        receive_host(sock, secret)
    except ConnectionError as error:
        sock.close()
        if isinstance(error, WrongSecret):
            logger.warning("somebody at %s %s and is not let in; all hosts need the same --secret-file", address, error)
        return
    connection = Connection(sock)
    try:
        hello = hello_from(connection.receive())
    except ConnectionError:
        connection.close()  # some stranger
        return
    if not 0 < hello.process_id < max(num_processes, hello.num_processes):
        _refuse({0: (hello, connection)}, f"host {hello.process_id} of {hello.num_processes} is none of ours.")
        return
    arrivals.put((hello, connection))
    if closed.is_set():
        _refuse_late(arrivals)


def _refuse_late(arrivals: "queue.SimpleQueue[_Guest]") -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            hello, connection = arrivals.get_nowait()
            _refuse({0: (hello, connection)}, f"host {hello.process_id} came when nobody waited for it any more.")


def jax_address(config: ReplicaConfig) -> str:
    """Where JAX's own coordinator listens, in the process of host 0."""
    host, port = config.coordinator_address
    return f"{f'[{host}]' if ':' in host else host}:{port + 1}"
