"""AttentionBackend: which form of paged attention an engine's programs use, as a value.

It is chosen once, from what the configuration says, and handed on. Nothing below looks at the process's devices, so
that programs for one kind of device can be compiled on another.

    xla     plain XLA (`kv.paged_attention`): runs everywhere, and is what the others must equal
    cpu     a kernel for decode on one CPU device (`kv.cpu_attention`)
    tpu     a kernel for prefill and decode (`kv.tpu_attention`)
    ragged  jax's kernel of that name (`kv.ragged_attention`)
    gpu     a kernel for prefill and decode (`kv.gpu_attention`)
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from jax.sharding import Mesh

from kv import cpu_attention
from kv.cache import KVCache, abstract_cache
from kv.paged_attention import PagedView, paged_attention
from kv.row_cache import abstract_row_cache
from kv.tpu_limits import LANES
from model.attention import AttentionFn
from model.config import ModelConfig
from sharding.rules import ShardingRules

XLA, CPU, TPU, RAGGED, GPU = "xla", "cpu", "tpu", "ragged", "gpu"
_FASTEST = {"tpu": TPU, "gpu": GPU}

PagedAttention = Callable[[PagedView], AttentionFn]
"""Makes the AttentionFn of one step, as `kv.paged_attention` does."""


@dataclass(frozen=True, slots=True)
class AttentionBackend:
    """How steps attend to pages, on one mesh, and how pages lie for that."""

    name: str
    attention: PagedAttention
    mesh: Mesh
    rules: ShardingRules

    def abstract_cache(
        self,
        config: ModelConfig,
        num_pages: int,
        page_size: int,
        dtype: str,
        widened: str = "float32",
        num_layers: int | None = None,
    ) -> KVCache:
        """ShapeDtypeStructs with shardings of so many pages; the rest as in `kv.cache.abstract_cache`."""
        pages, place = (num_pages, page_size, dtype), (self.mesh, self.rules)
        lanes = -(-config.head_dim // LANES) * LANES  # what a row takes of a TPU's memory in any case
        if self.name == RAGGED:
            from kv.ragged_attention import abstract_ragged_cache

            return abstract_ragged_cache(config, lanes, *pages, *place)  # all its layers have one window
        if self.name in (TPU, GPU):
            head_dim = lanes if self.name == TPU else config.head_dim
            return abstract_row_cache(config, head_dim, *pages, *place, widened, num_layers)
        return abstract_cache(config, *pages, *place, widened, num_layers)


def choose_attention(platform: str, num_devices: int, kv_dtype: str) -> str:
    """Name of the fastest backend for pages of this type; `platform` is what JAX calls the devices of the mesh."""
    if platform == "cpu" and num_devices == 1 and kv_dtype in cpu_attention.DTYPES:
        return CPU
    return _FASTEST.get(platform, XLA)


def make_backend(
    name: str, kv_dtype: str, mesh: Mesh, rules: ShardingRules, *, interpret: Any = False
) -> AttentionBackend:
    """`name` is one of `serving.config.ATTENTIONS`; `kv.attention_check` says what each can serve. With `interpret`, as
    `pallas_call` takes it, the kernels for TPUs and GPUs run anywhere, slowly."""
    return AttentionBackend(name, _attention(name, kv_dtype, mesh, rules, interpret), mesh, rules)


def _attention(name: str, kv_dtype: str, mesh: Mesh, rules: ShardingRules, interpret: Any) -> PagedAttention:
    """Kernels are imported where they are used: Pallas takes a second."""
    if name == XLA:
        return paged_attention
    if name == CPU:
        cpu_attention.register(kv_dtype)
        return partial(paged_attention, decode_kernel=cpu_attention.decode_attention)
    from kv.split_attention import Split

    split = Split.of(mesh, rules)
    if name == RAGGED:
        from kv.ragged_attention import ragged_attention

        return partial(ragged_attention, split=split)
    if name == GPU:
        from kv.gpu_attention import gpu_attention

        return partial(gpu_attention, split=split, interpret=interpret)
    assert name == TPU, name
    from kv.tpu_attention import tpu_attention

    return partial(tpu_attention, split=split, interpret=interpret)
