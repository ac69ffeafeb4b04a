import socket

import pytest

from serving.errors import ConfigError
from serving.gateway.listener import base_url, inherit, listen


def test_a_free_port_is_chosen_and_told():
    with listen("127.0.0.1", 0) as listener:
        assert base_url(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"
        socket.create_connection(listener.getsockname()).close()


def test_listening_everywhere_is_reached_on_this_machine():
    with listen("0.0.0.0", 0) as listener:
        assert base_url(listener).startswith("http://127.0.0.1:")


def test_a_taken_port_is_named():
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is in use"):
            listen("127.0.0.1", port)


def test_a_foreign_address_is_named():
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        listen("192.0.2.1", 0)


def test_a_socket_can_be_inherited():
    with listen("127.0.0.1", 0) as listener, inherit(socket.dup(listener.fileno())) as heir:
        assert heir.getsockname() == listener.getsockname()
