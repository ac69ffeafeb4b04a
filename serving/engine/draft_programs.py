"""DraftPrograms: a draft model's weights and pages on the device, and the calls by which it reads what it has not seen.

It works only where guesses are wanted: plain steps do nothing for it. So it falls behind, and catches up with a call of
its own before it guesses again. Its guesses are part of the call that checks them (`step.make_step`).
"""

from collections.abc import Sequence as Items
from concurrent.futures import Executor, Future

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kv.cache import KVCache
from kv.page_table import PageTable
from model.tree import Params
from serving.engine.device_arrays import FlatWeights, compile_empty, renew, temporary_bytes
from serving.engine.draft_step import CATCH_UP_TILE, DraftSpec, make_catch_up, num_tiles, pack_chunks
from serving.engine.executables import Executables
from serving.engine.plan import Chunk


class DraftPrograms:
    """Owned by the engine's thread."""

    def __init__(
        self,
        spec: DraftSpec,
        mesh: Mesh,
        pages_per_slot: int,
        cache: KVCache,
        prefill_weights: Params,
        decode_weights: Params,
        executables: Executables | None = None,
    ) -> None:
        """`cache` has as many pages as the served model's. The same weights twice, as `Programs` has them."""
        self.spec = spec
        self._executables = executables or Executables(None, mesh)
        self.cache = cache
        """Donated to each call and bound anew."""
        self.weights = FlatWeights.of(decode_weights)
        """As the programs that guess take them."""
        self._prefill_weights = FlatWeights.of(prefill_weights)
        self._pages_per_slot = pages_per_slot
        self._whole = NamedSharding(mesh, PartitionSpec())
        self._catch_up: dict[int, Future[jax.stages.Compiled]] = {}
        self._empty: Future[jax.stages.Compiled] | None = None

    def compile(self, pool: Executor) -> tuple[Future[jax.stages.Compiled], ...]:
        """Begin to compile everything; to be waited for."""
        self._empty = pool.submit(compile_empty, self.cache, self._executables)
        self._catch_up = {size: pool.submit(self._compile_catch_up, size) for size in self.spec.catch_ups}
        return self._empty, *self._catch_up.values()

    def temporaries(self) -> int:
        """As those of `Programs`, of the largest program."""
        return temporary_bytes(self._compile_catch_up(self.spec.max_tiles))

    def catch_up(self, chunks: Items[Chunk], table: PageTable) -> None:
        """Dispatch the reading of these tokens, at most `spec.max_tiles` tiles, into the pages of their sequences."""
        size = min(size for size in self._catch_up if size >= num_tiles(chunks))
        packed = pack_chunks(chunks, table, size)
        self.cache = self._catch_up[size].result()(self._prefill_weights.leaves, self.cache, packed)

    def reset(self) -> None:
        """As that of `Programs`."""
        assert self._empty is not None, "compile() comes first"
        self.cache = renew(self.cache, self._empty.result())

    def _compile_catch_up(self, size: int) -> jax.stages.Compiled:
        step = make_catch_up(self.spec, self._prefill_weights.treedef, self._pages_per_slot)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.cache)
        shape = size, self._pages_per_slot + 2 * CATCH_UP_TILE
        packed = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self._whole)
        jitted = jax.jit(step, donate_argnums=1, out_shardings=shardings)
        args = self._prefill_weights.leaves, self.cache, packed
        return self._executables.compiled(jitted, args, self.spec, size, str(self._prefill_weights.treedef))
