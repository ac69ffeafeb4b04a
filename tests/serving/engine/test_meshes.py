"""Every kind of mesh gives the tokens of one device: a matrix over eight virtual devices, in one process of its own."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from serving.request import SamplingParams
from tests.engines import CONFIG, GREEDY, MIXTRAL, request, run, tiny_engine
from tests.flags import virtual_devices

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[3]
DENSE = ["tensor=8"]
WINDOWED = ["data=2,stage=2,tensor=2"]
EXPERTS = ["data=2,expert=2,tensor=2", "stage=2,expert=4"]
IN_SETS = replace(CONFIG, num_layers=4, windows=(10, None) * 2)
"""In every stage, some layers have pages of their own."""
DRAWN = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=7, max_tokens=12, frequency_penalty=0.5, logprobs=3)
REQUESTS = [
    request(f"r{i}", [3 + i, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5][: 4 + 3 * i], sampling)
    for i, sampling in enumerate((GREEDY, DRAWN, GREEDY))
]
SCRIPT = """
import json, re, sys
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from serving.engine.sampling import sample
from serving.engine.slot_state import empty_slots
from sharding.mesh import make_mesh
from sharding.spec import MeshSpec
from tests.engines import CONFIG, MIXTRAL, _programs, run, tiny_engine
from tests.sampler import rows
from tests.serving.engine.test_meshes import DENSE, EXPERTS, IN_SETS, REQUESTS, WINDOWED

told = {
    mesh: {name: tokens for name, (tokens, _) in run(tiny_engine(model=model, mesh=mesh), REQUESTS).items()}
    for model, meshes in ((CONFIG, DENSE), (IN_SETS, WINDOWED), (MIXTRAL, EXPERTS)) for mesh in meshes
}
told["counts"] = _programs(CONFIG, "tensor=8", None, None)._slots.counts_BV.addressable_shards[0].data.shape[1]

mesh, V = make_mesh(MeshSpec(tensor=8)), 4096
split = NamedSharding(mesh, PartitionSpec(None, "tensor"))
logits = jax.ShapeDtypeStruct((2, V), jnp.float32, sharding=split)
state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), empty_slots(3, V))
chosen = jax.jit(lambda logits, rows, state: sample(logits, rows, state)).lower(
    logits, rows(2, temperature=0.7, top_k=5, top_p=0.9, vocab_shards=8), state
).compile().as_text()
gathered = re.findall(r"= \\w+\\[([\\d,]*)\\]\\S* all-gather\\(", chosen)
told["gathered"] = [shape for shape in gathered if str(V) in shape]
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told():
    """What every mesh answered, and what of the vocabulary travels between devices."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": virtual_devices(8)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def _alone(model):
    return {name: tokens for name, (tokens, _) in run(tiny_engine(model=model), REQUESTS).items()}


def test_dense(told):
    """Four KV heads, so that eight devices hold copies; draws with penalties, filters and log-probabilities."""
    alone = _alone(CONFIG)
    assert all(len(tokens) == 12 for tokens in alone.values())
    assert [told[mesh] for mesh in DENSE] == [alone] * len(DENSE)


def test_layers_with_pages_of_their_own(told):
    assert [told[mesh] for mesh in WINDOWED] == [_alone(IN_SETS)] * len(WINDOWED)


def test_experts(told):
    """With windows in every layer."""
    assert [told[mesh] for mesh in EXPERTS] == [_alone(MIXTRAL)] * len(EXPERTS)


def test_no_array_of_the_vocabularys_length_travels_to_choose_a_token(told):
    assert told["gathered"] == []
    assert told["counts"] == CONFIG.vocab_size / 8, "each device counts its part of it"
