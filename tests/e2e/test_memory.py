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


QUANTISED = """
import re, sys
from pathlib import Path
from model import packed
from serving.config import EngineConfig
from serving.engine.loaded_model import load_weights
from sharding.mesh import make_mesh
from sharding.rules import choose_rules
from sharding.sizes import num_bytes
from sharding.spec import MeshSpec
from sharding.stored_model import StoredModel

def kib(field):
    return int(re.search(rf"{field}:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

stored = StoredModel.open(sys.argv[1])
mesh, rules = make_mesh(MeshSpec()), choose_rules(stored.card.config, MeshSpec())
if sys.argv[2] in packed.DTYPES:
    packed.register(sys.argv[2])  # compiles, once
before = kib("VmRSS")
config = EngineConfig(sys.argv[1], quantize=sys.argv[2])
params = load_weights(config, stored, mesh, rules, "float32", lambda _: None)
print((kib("VmHWM") - before) * 1024, num_bytes(params))
"""


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_quantised_at_load_there_are_never_all_floats(demo_model, quantize):
    command = [sys.executable, "-c", QUANTISED, str(demo_model), quantize]
    told = subprocess.run(command, capture_output=True, text=True, check=True, env=clean_environment()).stdout
    peak, kept = map(int, told.split())
    num_weights = 134_515_008
    assert kept < 1.1 * num_weights
    assert peak < 4 * num_weights, "less than the floats alone"
