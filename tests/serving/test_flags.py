from dataclasses import fields

import pytest

from serving.config import EngineConfig, GatewayConfig, ReplicaConfig
from serving.flags import Flag, changed_fields, flags_of


def test_a_field_says_its_flag():
    assert flags_of(GatewayConfig)["port"] == Flag("--port", "Port to listen on; 0 for any free one.")
    assert flags_of(GatewayConfig(port=1)) == flags_of(GatewayConfig)


@pytest.mark.parametrize("section", [EngineConfig, ReplicaConfig, GatewayConfig])
def test_every_field_has_a_flag_of_its_own(section):
    """But for the checkpoint, which is an argument. A field without one would keep its default in a child process."""
    flags = flags_of(section)
    assert [field.name for field in fields(section) if field.name not in flags] in ([], ["checkpoint"])
    assert len({flag.name for flag in flags.values()}) == len(flags)


def test_changed_fields_are_what_must_be_passed_on():
    assert changed_fields(EngineConfig("x", num_slots=3)) == {"num_slots": 3}
