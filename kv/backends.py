"""AttentionBackend: which form of paged attention an engine's programs use, as a value.

It is chosen once, from what the configuration says, and handed on. Nothing below looks at the process's devices, so
that programs for one kind of device can be compiled on another.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from jax.sharding import Mesh

from kv import cpu_attention
from kv.cache import KVCache, abstract_cache
from kv.paged_attention import PagedView, paged_attention
from model.attention import AttentionFn
from model.config import ModelConfig
from sharding.rules import ShardingRules

XLA, CPU = "xla", "cpu"

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
        self, config: ModelConfig, num_pages: int, page_size: int, dtype: str, widened: str = "float32"
    ) -> KVCache:
        """ShapeDtypeStructs with shardings of so many pages; see `kv.cache.abstract_cache`."""
        return abstract_cache(config, num_pages, page_size, dtype, self.mesh, self.rules, widened)


def choose_attention(platform: str, num_devices: int, kv_dtype: str) -> str:
    """Name of the fastest backend for pages of this type; `platform` is what JAX calls the devices of the mesh."""
    if platform == "cpu" and num_devices == 1 and kv_dtype in cpu_attention.DTYPES:
        return CPU
    return XLA


def make_backend(name: str, kv_dtype: str, mesh: Mesh, rules: ShardingRules) -> AttentionBackend:
    """`name` is one of `serving.config.ATTENTIONS`; the CPU's needs a mesh of one CPU device and one of its types."""
    attention: PagedAttention = paged_attention
    if name == CPU:
        cpu_attention.register(kv_dtype)
        attention = partial(paged_attention, decode_kernel=cpu_attention.decode_attention)
    return AttentionBackend(name, attention, mesh, rules)
