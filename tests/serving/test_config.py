import re

import pytest

from model.errors import QuantizationError
from serving.config import EngineConfig, GatewayConfig, ReplicaConfig, ServeConfig
from serving.errors import ConfigError


@pytest.mark.parametrize(
    ("section", "fields", "words"),
    [
        (EngineConfig, {"checkpoint": "x", "num_slots": 0}, "--slots must be 1 or more, got 0"),
        (EngineConfig, {"checkpoint": "x", "num_pages": 4, "max_seq_len": 100}, "hold 64 tokens"),
        (EngineConfig, {"checkpoint": "x", "dtype": "int8"}, "dtype 'int8' is not known; known: float32, bfloat16."),
        (EngineConfig, {"checkpoint": "x", "kv_dtype": "int4"}, "known: float32, bfloat16, int8, fp8."),
        (EngineConfig, {"checkpoint": "x", "loras": ("name",)}, "--lora reads like NAME=PATH, got 'name'."),
        (EngineConfig, {"checkpoint": "x", "loras": ("a=/1", "a=/2")}, "--lora gives a name twice: a=/1, a=/2."),
        (EngineConfig, {"checkpoint": "x", "loras": ("a=/1", "b=/2"), "max_loras": 1}, "2 adapters are more than"),
        (GatewayConfig, {"port": 70_000}, "got 70000"),
        (GatewayConfig, {"drain_s": float("nan")}, "--drain-s"),
        (GatewayConfig, {"max_body_bytes": 1 << 40}, "at most 33,554,432"),
        (GatewayConfig, {"replica": "localhost"}, "'localhost'"),
        (ReplicaConfig, {"address": ":9"}, "':9'"),
        (ReplicaConfig, {"address": "host:²"}, "'host:²'"),
        (ReplicaConfig, {"drain_s": -1.0}, "--drain-s"),
    ],
)
def test_an_impossible_value_is_named(section, fields, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        section(**fields)


def test_an_unknown_quantisation_is_named():
    with pytest.raises(QuantizationError, match="'int3' is not known"):
        EngineConfig("x", quantize="int3")


@pytest.mark.parametrize("address", ["unix:/tmp/x.sock", "127.0.0.1:9000", "[::1]:9000", "replica-0.pool:9000"])
def test_addresses(address):
    assert ReplicaConfig(address, secret_file="/s").address == address


def test_gateway_and_replica_must_meet():
    with pytest.raises(ConfigError, match="unix:/a"):
        ServeConfig(EngineConfig("x"), ReplicaConfig("unix:/b"), GatewayConfig(replica="unix:/a"))
