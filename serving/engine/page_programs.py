"""PagePrograms: the few programs that copy pages out of the page arrays, and back into them.

Each page is sliced and laid back by itself, so what lies in it is arrays of its own, of whatever layout and type the
cache has, split over devices as the cache is. Whoever reuses a page that was copied out is dispatched later.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Items
from concurrent.futures import Executor, Future

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from kv.cache import KVCache
from kv.host_pages import PageArrays
from serving.engine.executables import Executables

SIZES = (8, 1)
"""Pages of one call, the most first: a prompt takes many at once, decoding one now and then."""
_PAGES = 1  # the axis of pages, in every layout


class PagePrograms:
    """Owned by the engine's thread."""

    def __init__(self, cache: KVCache, whole: NamedSharding, executables: Executables) -> None:
        """`cache` may be abstract."""
        self._cache = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), cache
        )
        self._whole = whole
        self._executables = executables
        self._take: dict[int, Future[jax.stages.Compiled]] = {}
        self._put: dict[int, Future[jax.stages.Compiled]] = {}

    def compile(self, pool: Executor) -> tuple[Future[jax.stages.Compiled], ...]:
        """Begin to compile everything; to be waited for."""
        self._take = {size: pool.submit(self._compile_take, size) for size in SIZES}
        self._put = {size: pool.submit(self._compile_put, size) for size in SIZES}
        return *self._take.values(), *self._put.values()

    def take(self, cache: KVCache, pages: Items[int]) -> list[PageArrays]:
        """Dispatch copies of these pages, which start their way to the host."""
        taken: list[PageArrays] = []
        for part in _parts(len(pages)):
            taken += self._take[len(pages[part])].result()(cache, np.asarray(pages[part], np.int32))
        for array in jax.tree.leaves(taken):
            array.copy_to_host_async()
        return taken

    def put(self, cache: KVCache, pages: Items[int], arrays: Items[PageArrays]) -> KVCache:
        """Dispatch copies into these pages of `cache`, which is donated, of what `take` gave, here or on the host."""
        for part in _parts(len(pages)):
            program = self._put[len(pages[part])].result()
            cache = program(cache, np.asarray(pages[part], np.int32), tuple(arrays[part]))
        return cache

    def _compile_take(self, size: int) -> jax.stages.Compiled:
        def take(cache: KVCache, pages_P: jax.Array) -> tuple[PageArrays, ...]:
            leaves = jax.tree.leaves(cache)
            return tuple(
                tuple(jax.lax.dynamic_slice_in_dim(leaf, pages_P[i], 1, _PAGES) for leaf in leaves) for i in range(size)
            )

        out_shardings = (tuple(leaf.sharding for leaf in jax.tree.leaves(self._cache)),) * size
        jitted = jax.jit(take, out_shardings=out_shardings)
        return self._executables.compiled(jitted, (self._cache, self._numbers(size)), "take_pages", size)

    def _compile_put(self, size: int) -> jax.stages.Compiled:
        def put(cache: KVCache, pages_P: jax.Array, arrays: tuple[PageArrays, ...]) -> KVCache:
            leaves, treedef = jax.tree.flatten(cache)
            for i, parts in enumerate(arrays):
                leaves = [
                    jax.lax.dynamic_update_slice_in_dim(leaf, part, pages_P[i], _PAGES)
                    for leaf, part in zip(leaves, parts, strict=True)
                ]
            laid: KVCache = jax.tree.unflatten(treedef, leaves)
            return laid

        parts = tuple(
            jax.ShapeDtypeStruct((leaf.shape[0], 1, *leaf.shape[2:]), leaf.dtype, sharding=leaf.sharding)
            for leaf in jax.tree.leaves(self._cache)
        )
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self._cache)
        jitted = jax.jit(put, donate_argnums=0, out_shardings=shardings)
        args = self._cache, self._numbers(size), (parts,) * size
        return self._executables.compiled(jitted, args, "put_pages", size)

    def _numbers(self, size: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((size,), jnp.int32, sharding=self._whole)


def _parts(count: int) -> Iterator[slice]:
    """Of so many pages, as large as there are programs for."""
    start = 0
    for size in SIZES:
        while count - start >= size:
            yield slice(start, start + size)
            start += size
