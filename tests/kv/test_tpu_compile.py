"""The TPU's kernels, compiled for each kind of chip without one: inside a scan over layers, on heads split over chips.

libtpu, which does it, is in the extra `aot`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from kv.backends import make_backend
from kv.paged_attention import PagedView, TileGroup
from model.config import ModelConfig
from sharding.rules import choose_rules
from sharding.spec import AXES, MeshSpec

pytestmark = pytest.mark.slow
pytest.importorskip("libtpu", reason="compiling for TPUs needs libtpu, which is in the extra aot")
LAYERS, PAGES, PAGE_SIZE, PAGES_PER_SLOT, TENSOR = 2, 2_000, 128, 16, 2
SIZES = {"decode": (8, 1), "prefill": (2, 32)}
ENV = {  # without it libtpu looks for a machine with chips, and a second process waits for the first
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@pytest.mark.parametrize(
    ("attention", "topology", "kv_heads", "head_dim", "kv_dtype", "window", "softcap", "kinds"),
    [
        ("tpu", "v5e:2x2", 1, 128, "int8", None, None, "decode, prefill"),
        ("tpu", "v5p:2x2x1", 1, 128, "bfloat16", 1_000, 50.0, "decode, prefill"),
        ("tpu", "v6e:2x2", 4, 128, "fp8", None, None, "decode"),
        ("tpu", "tpu7x:2x2x1", 2, 64, "bfloat16", None, None, "decode"),
        ("ragged", "v5e:2x2", 1, 128, "bfloat16", None, None, "decode, prefill"),
    ],
)
def test_compiles_without_a_copy_of_the_pages(
    monkeypatch, attention, topology, kv_heads, head_dim, kv_dtype, window, softcap, kinds
):
    for name, value in ENV.items():
        monkeypatch.setenv(name, value)
    config = ModelConfig.tiny(
        num_layers=LAYERS, num_heads=8 * kv_heads, num_kv_heads=kv_heads * TENSOR, head_dim=head_dim
    )
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[:TENSOR]
    mesh = Mesh(np.asarray(devices).reshape(1, 1, 1, TENSOR), AXES, axis_types=(AxisType.Auto,) * len(AXES))
    backend = make_backend(attention, kv_dtype, mesh, choose_rules(config, MeshSpec(tensor=TENSOR)))
    cache = backend.abstract_cache(config, PAGES, PAGE_SIZE, kv_dtype, "bfloat16")

    def array(shape, dtype, *axes):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes)))

    sizes = [SIZES[kind] for kind in kinds.split(", ")]
    view = PagedView(tuple(TileGroup(array((S, PAGES_PER_SLOT), "int32"), array((S, Q), "int32")) for S, Q in sizes))
    heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    qkv = [array((sum(S * Q for S, Q in sizes), n, head_dim), "float32", None, "tensor") for n in heads]

    def layers(q, k, v, cache, view):
        def one_layer(carry, layer):
            out, cache = backend.attention(view)(q + carry[0], k, v, carry[1], layer, window=window, softcap=softcap)
            return (out, cache), None

        return jax.lax.scan(one_layer, (jnp.zeros(q.shape), cache), jnp.arange(LAYERS, dtype=jnp.int32))[0]

    compiled = jax.jit(layers, donate_argnums=3).lower(*qkv, cache, view).compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    pool_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache)) // TENSOR
    assert memory.alias_size_in_bytes == pool_bytes, "the pages are written in place"
    assert memory.temp_size_in_bytes < pool_bytes / 20
    assert text.count('custom_call_target="tpu_custom_call"') == (len(sizes) if attention == "tpu" else 1)
    assert "all-" not in text, "each device needs its own heads only"
