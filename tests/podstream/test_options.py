"""Flags written for a child process are read back by typer as the same config."""

import dataclasses

import pytest
import typer
import typer.testing

from podstream import cli, serve
from podstream.home import Place, place_in
from podstream.options import gateway_arguments, parse_bytes, replica_arguments
from podstream.serve import NO_TPU, has_tpu, join_config, replica_env, replica_programs
from serving.config import EngineConfig, GatewayConfig, ReplicaConfig
from serving.errors import ConfigError
from sharding.spec import HOST_DEVICES_FLAG, MeshError

ENGINE = EngineConfig(
    "/models/x", "name", "data=1,tensor=4", "float32", "int8", "fp8", "xla", 3, 8, 99, 123_456, 300, 17, 5,
    overlap=False, prefix_cache=False, host_cache_bytes=1 << 30, compile_cache="/c", crash_folder="/d", decode_steps=3,
    speculate="ngram:5", tool_dialect="mistral", reasoning=False,
    model_files="/f", keys="/k.toml", embeddings="last",
    loras=("a=/a", "b=gs://b/c=d"), max_loras=3, max_lora_rank=8, control_tokens=True, stuck_s=7.5,
    profile_folder="/traces",
)  # fmt: skip
REPLICA = ReplicaConfig("unix:/r.sock", 2.5, "json", "http://c:4318", "h:8476", 4, 2, 7.5, "/secret")
GATEWAY = GatewayConfig(
    "0.0.0.0", 8123, "unix:/r.sock", 12345, 7, 1.5, "/t.toml", "json", "http://c:4318",
    allow_hosts=("gate.lan", "[fe80::1]"), allow_origins=("https://a.b", "*"),
    secret_file="/secret",
)  # fmt: skip


def read_back(monkeypatch, module, arguments):
    """The configs that the command's `run` receives."""
    seen = []
    monkeypatch.setattr(f"{module}.run", lambda *configs, **_: seen.extend(configs))
    result = typer.testing.CliRunner().invoke(cli.app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return seen


@pytest.mark.parametrize("engine", [ENGINE, EngineConfig("gs://bucket/x")])
def test_replica_flags(monkeypatch, engine):
    replica = dataclasses.replace(REPLICA, process_id=0)
    seen = read_back(monkeypatch, "serving.replica.main", replica_arguments(engine, replica))
    assert seen[:2] == [engine, replica]


def test_flags_of_another_host(monkeypatch):
    assert read_back(monkeypatch, "serving.hosts.follower", replica_arguments(ENGINE, REPLICA))[:2] == [ENGINE, REPLICA]


def test_a_pod_of_a_leader_worker_set_knows_its_place(monkeypatch):
    pod = {"LWS_LEADER_ADDRESS": "set-0.svc", "LWS_GROUP_SIZE": "4", "LWS_WORKER_INDEX": "3"}
    for name, value in pod.items():
        monkeypatch.setenv(name, value)
    _, replica, *_ = read_back(
        monkeypatch, "serving.hosts.follower", replica_arguments(ENGINE, ReplicaConfig(secret_file="/s"))
    )
    assert replica == ReplicaConfig(coordinator="set-0.svc:8476", num_processes=4, process_id=3, secret_file="/s")
    chosen = read_back(monkeypatch, "serving.hosts.follower", replica_arguments(ENGINE, REPLICA))
    assert chosen[1] == REPLICA, "flags come first"
    assert place_in({**pod, "LWS_GROUP_SIZE": "1"}) == place_in({}) == Place()
    with pytest.raises(ConfigError, match="LWS_WORKER_INDEX must be numbers"):
        place_in({**pod, "LWS_WORKER_INDEX": "x"})


def test_gateway_flags(monkeypatch):
    monkeypatch.setattr("serving.gateway.listener.listen", lambda host, port: None)
    assert read_back(monkeypatch, "serving.gateway.main", gateway_arguments(GATEWAY))[0] == GATEWAY


def test_every_field_has_a_flag():
    """A new config field without a flag would silently keep its default in the child process."""
    for section in (ENGINE, GATEWAY, REPLICA):
        defaults = {f.name: f.default for f in dataclasses.fields(section)}
        assert all(getattr(section, name) != default for name, default in defaults.items()), "set all fields above"


def test_gateway_and_replica_meet_at_a_socket(tmp_path):
    config = join_config(ENGINE, GATEWAY, tmp_path)
    assert config.gateway.replica == config.replica.address == f"unix:{tmp_path}/replica.sock"
    assert config.replica.drain_s == GATEWAY.drain_s


def test_processes_of_one_replica_meet_at_a_free_port(tmp_path):
    config = join_config(ENGINE, GATEWAY, tmp_path, 2)
    first, second = replica_programs(config, {})
    assert config.replica.coordinator_address[0] == "127.0.0.1"
    assert first.argv[3:] == [*replica_arguments(ENGINE, config.replica), "--follow-parent"]
    other = dataclasses.replace(config.replica, process_id=1)
    assert second.argv[3:] == [*replica_arguments(ENGINE, other), "--follow-parent"]
    assert first.env == second.env == NO_TPU | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"{HOST_DEVICES_FLAG}=2"}


def test_a_folder_too_long_for_a_socket_is_named(tmp_path):
    with pytest.raises(ConfigError, match="TMPDIR"):
        join_config(ENGINE, GATEWAY, tmp_path / ("x" * 100))


@pytest.fixture(autouse=True)
def no_tpu(monkeypatch):
    monkeypatch.setattr(serve, "has_tpu", lambda: False)


def test_libtpu_is_told_of_a_machine_without_tpus(tmp_path, monkeypatch):
    """Else it complains at each start. What the environment says goes first; where there are TPUs nothing is told."""
    assert replica_env("auto", {"A": "b"}) == NO_TPU | {"A": "b"}
    assert replica_env("auto", {"TPU_WORKER_ID": "3"})["TPU_WORKER_ID"] == "3"
    monkeypatch.setattr(serve, "has_tpu", lambda: True)
    assert replica_env("auto", {"A": "b"}) == {"A": "b"}
    assert not has_tpu(tmp_path)
    for device in ("accel0", "vfio/0"):
        (tmp_path / device).mkdir(parents=True)
        assert has_tpu(tmp_path)
        (tmp_path / device).rmdir()


def test_a_wide_mesh_gets_virtual_devices():
    assert "XLA_FLAGS" not in replica_env("data=1,tensor=1", {}) | replica_env("auto", {})
    assert replica_env("tensor=4", {})["XLA_FLAGS"] == f"{HOST_DEVICES_FLAG}=4"
    assert replica_env("tensor=4", {"XLA_FLAGS": "--x"})["XLA_FLAGS"] == f"--x {HOST_DEVICES_FLAG}=4"
    chosen = {"XLA_FLAGS": f"{HOST_DEVICES_FLAG}=8"}
    assert replica_env("tensor=4", chosen) == NO_TPU | chosen
    with pytest.raises(MeshError):
        replica_env("tensor=four", {})
    with pytest.raises(MeshError, match="3 processes cannot share out evenly"):
        replica_env("tensor=4", {}, 3)


@pytest.mark.parametrize(
    ("text", "size"),
    [("8GiB", 8 << 30), ("500MB", 500_000_000), ("1.5 kib", 1536), ("123", 123), ("2g", 2_000_000_000)],
)
def test_sizes_read_as_people_write_them(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "12foo", "-1GiB", "1e9"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(typer.BadParameter, match="8GiB or 500MB"):
        parse_bytes(text)
