"""Several hosts restore one checkpoint: each reads what its devices hold, and little more."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from etils import epath

from model.card import GenerationDefaults, ModelCard, TextAssets
from model.config import ModelConfig
from model.errors import CheckpointError
from sharding import checkpoint
from sharding.manifest import Manifest
from sharding.params import init_params
from tests.slices import places

ROOT = Path(__file__).parents[2]
CONFIG = ModelConfig.tiny(num_heads=8, num_kv_heads=4, mlp_dim=4096, embed_dim=256, tie_embeddings=False)


@pytest.mark.slow
def test_a_restore_reads_only_each_hosts_shards(tmp_path, monkeypatch):
    """Counted by the operating system. Parts that both hold (norms), and chunks that hold a bit more, come on top."""
    monkeypatch.setattr(checkpoint, "CHUNK_BYTES", 64 << 10)
    params = init_params(CONFIG)
    checkpoint.save(tmp_path / "c", params, ModelCard("tiny", CONFIG, TextAssets("{}"), GenerationDefaults(), "random"))
    stored = sum(path.stat().st_size for path in (tmp_path / "c").rglob("*") if path.is_file())
    place = places(2)[0]
    argv = [sys.executable, str(ROOT / "tests/sharding/restore_worker.py"), str(tmp_path / "c"), place.coordinator, "2"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    hosts = [subprocess.Popen([*argv, str(i)], stdout=subprocess.PIPE, env=env) for i in range(2)]
    told = [json.loads(host.communicate(timeout=90)[0].splitlines()[-1]) for host in hosts]
    total = sum(float(np.sum(np.asarray(leaf, np.float64))) for leaf in jax.tree.leaves(params))
    assert told[0]["total"] + told[1]["total"] == pytest.approx(total)
    for host in told:
        assert host["read"] < 0.65 * stored, f"{host} of {stored}"
        assert host["read"] > 0.8 * host["held"] * stored / (told[0]["held"] + told[1]["held"])


def test_hosts_share_out_the_checking_of_files(tmp_path):
    root = epath.Path(tmp_path)
    for size in range(7):
        (root / f"file{size}").write_bytes(bytes(size))
    manifest = Manifest.of(root)
    for size in range(1, 7):
        path = root / f"file{size}"
        path.write_bytes(b"x" * size)
        assert [fails(manifest, root, (host, 3)) for host in range(3)].count(True) == 1
        path.write_bytes(bytes(size))
    assert not any(fails(manifest, root, (host, 3)) for host in range(3))


def fails(manifest, root, share):
    try:
        manifest.verify(root, share)
    except CheckpointError:
        return True
    return False
