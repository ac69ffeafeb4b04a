"""The GPU's kernel, interpreted on a CPU, equals the XLA form, and is translated for NVIDIA's GPUs without one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from kv import gpu_attention
from kv.paged_attention import PagedView, paged_attention
from tests.pages import H, assert_same_pages, in_sets, one_device, random_caches, random_step

pytestmark = pytest.mark.slow
TRITON = "__gpu$xla.gpu.triton"


@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "window", "softcap"),
    [
        ("int8", 4, 2, 19, 1.5),
    ],
)
def test_equals_the_xla_form(monkeypatch, dtype, heads, kv_heads, window, softcap):
    monkeypatch.setattr(gpu_attention, "_STRIP_TOKENS", 32)
    monkeypatch.setattr(gpu_attention, "_PART_TOKENS", 64)
    rng = np.random.default_rng(heads)
    groups, num_pages = random_step(rng, 16, 6)
    cache, reference = random_caches(rng, dtype, num_pages, kv_heads, 16)
    T = sum(group.positions_SQ.size for group in groups)
    q, k, v = (jnp.asarray(rng.standard_normal((T, n, H)), jnp.float32) for n in (heads, kv_heads, kv_heads))
    window = None if window is None else jnp.int32(window)

    def run(attend, cache, layer):
        step = jax.jit(lambda q, k, v, cache: attend(q, k, v, cache, layer, window=window, softcap=softcap))
        return step(q, k, v, cache)

    out, stored = run(gpu_attention.gpu_attention(in_sets(groups), one_device(), interpret=True), cache, jnp.int32(3))
    expected, also_stored = run(paged_attention(PagedView(groups)), reference, jnp.int32(1))
    np.testing.assert_allclose(out, expected, atol=2e-6)
    assert_same_pages(stored, also_stored)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
def test_is_translated_for_nvidia(dtype):
    rng = np.random.default_rng(0)
    groups, num_pages = random_step(rng, 16, 6)
    cache, _ = random_caches(rng, dtype, num_pages, 2, 16)
    T = sum(group.positions_SQ.size for group in groups)
    q, k, v = (jax.ShapeDtypeStruct((T, n, H), jnp.float32) for n in (4, 2, 2))
    attend = gpu_attention.gpu_attention(PagedView(groups), one_device())
    step = jax.jit(lambda q, k, v, cache: attend(q, k, v, cache, jnp.int32(1), window=jnp.int32(9), softcap=2.0))
    is_known = [export.DisabledSafetyCheck.custom_call(TRITON)]
    exported = export.export(step, platforms=["cuda"], disabled_checks=is_known)(q, k, v, cache)
    assert exported.mlir_module().count(TRITON) == len(groups)
