"""The jitted step, and the programs compiled from it ahead of time: one per StepShape.

A step is embed -> layers -> logits at one row per sequence -> sample -> `last_token[slot]`. The cache and `last_token`
are donated: the device keeps one copy of each, and a call rebinds them.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from kv.cache import KVCache
from kv.paged_attention import DecodeKernel, PagedView, TileGroup, paged_attention
from model.config import ModelConfig
from serving.engine.batch import BatchLayout, StepShape
from serving.engine.sampling import RowSampling, sample
from sharding.params import Params, bind

StepFn = Callable[..., tuple[jax.Array, KVCache, jax.Array]]


@dataclass(frozen=True, slots=True)
class StepSpec:
    """What all programs of an engine share."""

    config: ModelConfig
    mesh: Mesh
    num_slots: int
    pages_per_slot: int
    tile_tokens: int
    decode_kernel: DecodeKernel | None = None

    def layout(self, shape: StepShape) -> BatchLayout:
        return BatchLayout(shape, self.pages_per_slot, self.tile_tokens)


def make_step(spec: StepSpec, shape: StepShape, treedef: Any) -> StepFn:
    """The step of one shape, as a pure function of arrays: `serving_step(weights, cache, last_token_B, packed)`.

    `weights` is a flat tuple of leaves: flattening a Flax state in every call would cost milliseconds of host time.
    Returns the sampled tokens int32[rows], the cache and `last_token_B`, whose last entry is a scrap slot for padding.
    """
    layout = spec.layout(shape)

    def serving_step(
        weights: tuple[jax.Array, ...], cache: KVCache, last_token_B: jax.Array, packed: jax.Array
    ) -> tuple[jax.Array, KVCache, jax.Array]:
        decoder = bind(spec.config, jax.tree.unflatten(treedef, weights))
        fields_FR, pages_RJ, tile_rows_S1, tokens_SQ, positions_SQ = layout.split(packed)
        slot_R, position_R, sample_at_R = fields_FR[0], fields_FR[1], fields_FR[2]
        groups = [TileGroup(pages_RJ, position_R[:, None])]
        tokens_T, positions_T = last_token_B[slot_R], position_R
        if shape.tiles:
            groups.append(TileGroup(pages_RJ[tile_rows_S1[:, 0]], positions_SQ))
            tokens_T = jnp.concatenate([tokens_T, tokens_SQ.reshape(-1)])
            positions_T = jnp.concatenate([positions_T, positions_SQ.reshape(-1)])
        attend = paged_attention(PagedView(tuple(groups)), spec.decode_kernel)
        rows_R = jnp.maximum(sample_at_R, 0)
        logits_RV, cache = decoder(tokens_T, jnp.maximum(positions_T, 0), attend, cache, rows_R)
        chosen_R = sample(logits_RV, _row_sampling(fields_FR))
        newest_R = jnp.where(sample_at_R >= 0, chosen_R, last_token_B[slot_R])
        return chosen_R, cache, last_token_B.at[slot_R].set(newest_R)

    return serving_step


def _row_sampling(fields_FR: jax.Array) -> RowSampling:
    def as_float(row: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(row, jnp.float32)

    seed_R2 = jax.lax.bitcast_convert_type(fields_FR[8:10].T, jnp.uint32)
    return RowSampling(
        temperature_R=as_float(fields_FR[4]),
        top_k_R=fields_FR[5],
        top_p_R=as_float(fields_FR[6]),
        min_p_R=as_float(fields_FR[7]),
        seed_R2=seed_R2,
        position_R=fields_FR[3],
    )


class Programs:
    """Compiled steps, and the device state that they hand on to each other. Owned by the engine's thread."""

    def __init__(self, spec: StepSpec, weights: Params, cache: KVCache) -> None:
        self.spec = spec
        self._cache = cache
        leaves, self._treedef = jax.tree.flatten(weights)
        self._weights = tuple(leaves)
        self._whole = NamedSharding(spec.mesh, PartitionSpec())
        self._last_token_B = jax.device_put(np.zeros(spec.num_slots + 1, np.int32), self._whole)
        self._compiled: dict[StepShape, jax.stages.Compiled] = {}

    @property
    def num_pages(self) -> int:
        """Pages in the cache, the null page included."""
        return int(self._cache.v_LPKGH.shape[1])

    @property
    def shapes(self) -> tuple[StepShape, ...]:
        return tuple(self._compiled)

    def compile(self, shapes: tuple[StepShape, ...], on_done: Callable[[StepShape], None], num_threads: int) -> None:
        """Compile every shape before the first request; XLA works outside the GIL, so threads help."""
        with ThreadPoolExecutor(num_threads, "compile") as pool:
            futures = {pool.submit(self._compile_one, shape): shape for shape in shapes}
            for future in as_completed(futures):
                future.result()
                on_done(futures[future])
        self._compiled = {futures[f]: f.result() for f in futures}

    def _compile_one(self, shape: StepShape) -> jax.stages.Compiled:
        step = make_step(self.spec, shape, self._treedef)
        packed = jax.ShapeDtypeStruct((self.spec.layout(shape).size,), jnp.int32, sharding=self._whole)
        cache_shardings = jax.tree.map(lambda leaf: leaf.sharding, self._cache)
        jitted = jax.jit(step, donate_argnums=(1, 2), out_shardings=(self._whole, cache_shardings, self._whole))
        return jitted.lower(self._weights, self._cache, self._last_token_B, packed).compile()

    def run(self, shape: StepShape, packed: NDArray[np.int32]) -> jax.Array:
        """Dispatch one step and return at once; the tokens, int32[rows], start their way to the host."""
        tokens_R, self._cache, self._last_token_B = self._compiled[shape](
            self._weights, self._cache, self._last_token_B, packed
        )
        tokens_R.copy_to_host_async()
        return tokens_R
