"""What `podstream check --save` keeps: found by the next check and by a replica, and by nothing that differs."""

from dataclasses import replace
from hashlib import sha256

import jax
import numpy as np
import pytest

from model.config import ModelConfig
from serving.engine.build import make_programs
from serving.engine.executables import Executables
from serving.engine.loaded_model import LoadedModel
from sharding.mesh import make_mesh
from sharding.params import abstract_params
from sharding.rules import choose_rules
from tests.engines import tiny_card
from tpu_configs import check
from tpu_configs.catalog import slices
from tpu_configs.check import Ahead, compile_steps
from tpu_configs.deployment import Deployment, Settings
from tpu_configs.topology import has_libtpu

pytestmark = pytest.mark.slow
MODEL = ModelConfig.tiny()
SETTINGS = Settings(
    "tiny",
    "v5e-4",
    "data=1,tensor=2",
    "float32",
    slots=1,
    page_size=16,
    max_seq_len=64,
    chunk_tokens=32,
    decode_steps=1,
)
DEPLOYMENT = Deployment("tiny-v5e-4", SETTINGS, MODEL, slices()["v5e-4"])


@pytest.fixture
def compiles(monkeypatch):
    """Grows with each step that is compiled."""
    seen, compile_ = [], Executables._compile

    def counted(kept, jitted, args):
        if jitted.__name__ == "serving_step":
            seen.append(args)
        return compile_(kept, jitted, args)

    monkeypatch.setattr(Executables, "_compile", counted)
    return seen


@pytest.mark.skipif(not has_libtpu(), reason="there is no TPU compiler for this platform")
def test_a_check_may_be_repeated_and_mends_what_is_kept(tmp_path):
    """What it keeps can be read on a TPU only, so it compiles each time; under the same name."""

    def checked():
        ahead = Ahead.of(DEPLOYMENT)
        (step,) = compile_steps(ahead, ahead.shapes[:1], lambda text: None, str(tmp_path))
        (kept,) = (path for path in tmp_path.rglob("*") if path.is_file())
        return replace(step, compile_s=0), kept

    step, kept = checked()
    whole = kept.read_bytes()
    kept.write_bytes(whole[:-1])
    assert checked() == (step, kept)
    assert sha256(kept.read_bytes()[32:]).digest() == kept.read_bytes()[:32]


def test_a_replica_that_is_started_as_the_check_says_compiles_no_step(tmp_path, compiles, monkeypatch):
    """The slice's devices are those of this machine here: what a check makes for them, a replica can run."""
    monkeypatch.setattr(check, "describe_devices", lambda held: jax.devices()[: held.num_devices])
    ahead = Ahead.of(DEPLOYMENT)
    compile_steps(ahead, ahead.shapes, lambda text: None, str(tmp_path))
    assert len(compiles) == len(ahead.shapes)
    config = replace(ahead.engine, compile_cache=str(tmp_path), memory_bytes=1 << 30)
    mesh, rules = make_mesh(DEPLOYMENT.mesh), choose_rules(MODEL, DEPLOYMENT.mesh)
    weights = jax.tree.map(
        lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding),
        abstract_params(rules.served(MODEL), mesh, rules, "float32"),
    )
    model = LoadedModel(tiny_card(rules.served(MODEL)), mesh, rules, "float32", weights)
    programs = make_programs(config, model, None, lambda text: None)
    assert programs.shapes == ahead.shapes and len(compiles) == len(ahead.shapes)
