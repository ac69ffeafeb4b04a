"""Loading the demo model peaks below 1.5 times its weights, measured by the kernel in a process of its own."""

import subprocess
import sys

import pytest

from tests.e2e.conftest import clean_environment

pytestmark = pytest.mark.e2e

SCRIPT = """
import re, sys
from pathlib import Path
import jax
from sharding import checkpoint
from sharding.mesh import make_mesh
from sharding.params import abstract_params
from sharding.rules import choose_rules
from sharding.sizes import num_bytes
from sharding.spec import MeshSpec

def kib(field):
    return int(re.search(rf"{field}:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

path = sys.argv[1]
config = checkpoint.read_card(path).config
abstract = abstract_params(config, make_mesh(MeshSpec()), choose_rules(config, MeshSpec()), sys.argv[2])
before = kib("VmRSS")
params = checkpoint.load(path, abstract)
print((kib("VmHWM") - before) * 1024 / num_bytes(params))
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_peak_at_load(demo_model, dtype):
    command = [sys.executable, "-c", SCRIPT, str(demo_model), dtype]
    told = subprocess.run(command, capture_output=True, text=True, check=True, env=clean_environment()).stdout
    assert 1.0 < float(told) < 1.5
