"""Hosts find each other, or say in one sentence which of them is at fault and why."""

import contextlib
import dataclasses
import socket
import time

import pytest

from serving.config import EngineConfig, ReplicaConfig
from serving.errors import ConfigError
from serving.hosts import fingerprint
from serving.hosts.connection import Connection, frame
from serving.hosts.handshake import approach_host_0
from serving.hosts.join import gather, jax_address, join
from serving.hosts.messages import Hello
from tests.slices import FINGERPRINT, Background, Guest, gathered, ignore, places

SECRET, OTHER = b"the-secret-of-this-slice", b"the-secret-of-that-slice"


def test_all_hosts_find_each_other():
    with gathered(3) as (hosts, guests):
        assert hosts.numbers == [1, 2]
        assert hosts.name(2) == f"host 2 ({socket.gethostname()})"
        assert len(guests) == 2
        assert not hosts.failure


def test_who_does_not_come_is_named_on_every_host():
    first, second, _ = places(3, join_s=0.3)
    seen = []
    leader, guest = Background(gather, first, FINGERPRINT, seen.append), Background(Guest, second)
    for host in (leader, guest):
        with pytest.raises(ConfigError, match=r"^host 2 of 3 did not come to 127\.0\.0\.1:\d+ within 0\.3 s; see"):
            host.result()
    assert seen[0] == f"waiting for hosts 1, 2 of 3 at {first.coordinator}"


def test_a_difference_is_named_on_every_host():
    first, second = places(2)
    leader, guest = Background(gather, first, FINGERPRINT, ignore), Background(Guest, second, {"page_size": "8"})
    for host in (leader, guest):
        with pytest.raises(ConfigError, match=r"^host 1 \(.*\) does not fit host 0: page_size is 8 there and 16 here"):
            host.result()


def test_hosts_that_count_differently_are_refused():
    first, second = places(2)
    leader = Background(gather, first, FINGERPRINT, ignore)
    guest = Background(Guest, dataclasses.replace(second, num_processes=4))
    for host in (leader, guest):
        with pytest.raises(ConfigError, match="started as one of 4 hosts, host 0 as one of 2"):
            host.result()


def test_without_host_0_nobody_waits_for_ever():
    with pytest.raises(ConfigError, match=r"^host 0 was not to be reached at .* within 0\.3 s \(.*refused"):
        join(places(2, join_s=0.3)[1], FINGERPRINT, ignore)


def test_strangers_hold_up_nobody():
    first, second = places(2)
    leader = Background(gather, first, FINGERPRINT, ignore)
    wait_until_it_listens(first)
    address = first.coordinator_address
    with socket.create_connection(address), socket.create_connection(address) as other:  # the first says nothing
        other.sendall(b"GET / HTTP/1.1\r\n\r\n")
        Guest(second)
        hosts = leader.result()
    assert hosts.numbers == [1]
    hosts.stop()


def wait_until_it_listens(place):
    for _ in range(500):
        try:
            return socket.create_connection(place.coordinator_address).close()
        except ConnectionRefusedError:
            time.sleep(0.005)
    raise AssertionError("it does not listen")


def with_secret(place, path, text):
    path.write_bytes(text)
    return dataclasses.replace(place, secret_file=str(path))


def test_hosts_with_one_secret_find_each_other(tmp_path):
    first, second = (with_secret(place, tmp_path / "secret", SECRET) for place in places(2))
    leader = Background(gather, first, FINGERPRINT, ignore)
    Guest(second)
    hosts = leader.result()
    assert hosts.numbers == [1]
    hosts.stop()


@pytest.mark.parametrize(("mine", "theirs"), [(SECRET, OTHER), (SECRET, None), (None, SECRET)])
def test_who_has_another_secret_is_not_let_in_and_holds_up_nobody(tmp_path, caplog, mine, theirs):
    first, second = places(2)
    third = second if mine is None else with_secret(second, tmp_path / "mine", mine)
    first = first if mine is None else with_secret(first, tmp_path / "mine", mine)
    second = second if theirs is None else with_secret(second, tmp_path / "theirs", theirs)
    leader = Background(gather, first, FINGERPRINT, ignore)
    with pytest.raises(
        ConfigError, match=r"^host 0 at .* has another secret, or is somebody else; give all .*-file\.$"
    ):
        Guest(second)
    Guest(third)
    hosts = leader.result()
    assert hosts.numbers == [1]
    hosts.stop()
    assert "somebody at 127.0.0.1 has another secret and is not let in" in caplog.text


def test_a_false_host_0_is_not_believed(tmp_path):
    """It answers with what it was told: nothing that it can know is the right answer."""
    place = with_secret(places(2)[1], tmp_path / "secret", SECRET)
    with socket.create_server(place.coordinator_address) as listener:
        guest = Background(join, place, FINGERPRINT, ignore)
        sock, _ = listener.accept()
        with sock:
            nonce = sock.recv(32, socket.MSG_WAITALL)
            sock.sendall(nonce)
            sock.sendall(sock.recv(32, socket.MSG_WAITALL))
            with pytest.raises(ConfigError, match="has another secret, or is somebody else"):
                guest.result()
            assert sock.recv(1) == b"", "the greeting, which tells flags and versions, is not for it"


def test_of_a_stranger_no_message_is_read(tmp_path):
    first = with_secret(places(2, join_s=1.0)[0], tmp_path / "secret", SECRET)
    leader = Background(gather, first, FINGERPRINT, ignore)
    wait_until_it_listens(first)
    with socket.create_connection(first.coordinator_address) as sock:
        sock.sendall(frame({"hello": Hello(1, 2, "stranger", FINGERPRINT)}) * 2)
        assert len(sock.recv(32, socket.MSG_WAITALL)) == 32, "host 0's random bytes"
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1) == b"", "nothing more is said to it"
    with pytest.raises(ConfigError, match="host 1 of 2 did not come"):
        leader.result()


def test_a_host_that_died_and_came_again_takes_its_place():
    first, second, third = places(3)
    leader = Background(gather, first, FINGERPRINT, ignore)
    wait_until_it_listens(first)
    early = Background(Guest, second)
    time.sleep(0.1)  # it is there
    late = Background(Guest, second)
    with pytest.raises(ConfigError, match="another process came as host 1"):
        early.result()
    last, hosts = Guest(third), leader.result()
    assert hosts.numbers == [1, 2]
    hosts.stop()
    assert [guest.ended.get(timeout=5) for guest in (late.result(), last)] == [(0, ""), (0, "")]


def test_who_comes_late_is_told():
    first, second = places(2)
    leader = Background(gather, first, FINGERPRINT, ignore)
    wait_until_it_listens(first)
    with socket.create_connection(first.coordinator_address) as sock:  # comes, but says nothing yet
        Guest(second)
        hosts = leader.result()
        approach_host_0(sock, b"")
        late = Connection(sock)
        late.send({"hello": Hello(1, 2, "late", FINGERPRINT)})
        assert late.receive() == {"refused": "host 1 came when nobody waited for it any more."}
        late.close()
    hosts.stop()


def test_a_fingerprint_tells_all_but_what_is_a_hosts_own():
    config = EngineConfig("/models/x", page_size=16, compile_cache="/a", crash_folder="/b", profile_folder="/p")
    mine = fingerprint.of_config(config)
    elsewhere = dataclasses.replace(config, compile_cache="/c", crash_folder="/d", profile_folder="/q")
    assert fingerprint.difference(mine, fingerprint.of_config(elsewhere)) == ""
    changed = fingerprint.of_config(dataclasses.replace(config, num_slots=3))
    assert fingerprint.difference(mine, changed) == "num_slots is 3 there and 64 here"
    assert fingerprint.difference(mine, {**mine, "new": "1"}) == "new is 1 there and not known here"
    assert {"version of jax", "source code", "checkpoint"} <= mine.keys()


def test_jax_coordinates_one_port_above():
    config = ReplicaConfig(coordinator="[::1]:8476", num_processes=2)
    assert config.coordinator_address == ("::1", 8476)
    assert jax_address(config) == "[::1]:8477"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_processes": 2}, "belong together"),
        ({"coordinator": "h:1"}, "belong together"),
        ({"coordinator": "h:1", "num_processes": 2, "process_id": 2}, "from 0 to 1"),
        ({"coordinator": "h:1", "num_processes": 2}, "^--coordinator h:1 can be reached .* secret with --secret-file"),
        ({"address": "0.0.0.0:9000"}, "^--listen .* can be reached from other machines"),
        ({"coordinator": "h", "num_processes": 2}, r"reads like 10\.0\.0\.1:8476"),
        ({"coordinator": "h:65535", "num_processes": 2}, "up to 65534"),
        ({"num_processes": 0}, "1 or more"),
    ],
)
def test_impossible_places_are_refused(changes, reason):
    with pytest.raises(ConfigError, match=reason):
        ReplicaConfig(**changes)
