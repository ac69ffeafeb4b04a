"""The gateway's listening socket: made before anything else starts, so that a taken port costs nobody a model load."""

import errno
import socket

from serving.errors import ConfigError

BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """Raises ConfigError when the port is taken or the host is not this machine's."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}: {error.strerror or error}.") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(_explain(error, host, port)) from error
    return listener


def inherit(fd: int) -> socket.socket:
    """The socket that a supervisor made and keeps, so that clients wait instead of failing while a gateway restarts."""
    return socket.socket(fileno=fd)


def base_url(listener: socket.socket) -> str:
    """Where a client on this machine reaches it."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _explain(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use by another program; choose another one with --port."
    if error.errno == errno.EACCES:
        return f"port {port} needs more rights than this program has; choose one above 1023 with --port."
    return f"cannot listen on {host}:{port}: {error.strerror}."
