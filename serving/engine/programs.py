"""Programs: the steps compiled ahead of time, and the device state that they hand on to each other."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from kv.cache import KVCache
from kv.host_pages import PageArrays
from model.tree import Params
from serving.engine.adapter_bank import AdapterBank
from serving.engine.batch import StepShape
from serving.engine.device_arrays import FlatWeights, compile_empty, renew, temporary_bytes
from serving.engine.draft_programs import DraftPrograms
from serving.engine.executables import Executables
from serving.engine.masks import ALL_TOKENS, num_words
from serving.engine.page_programs import PagePrograms
from serving.engine.prompt_logprobs import StepLogprobs
from serving.engine.slot_state import PACKET, SlotState, empty_slots, write_slot
from serving.engine.step import StepSpec
from serving.engine.step_program import compile_step, slot_shardings
from sharding.hosts import put_everywhere
from sharding.sizes import num_bytes


class Programs:
    """Compiled steps, and the device state that they hand on to each other. Owned by the engine's thread."""

    def __init__(
        self,
        spec: StepSpec,
        cache: KVCache,
        prefill_weights: Params,
        decode_weights: Params,
        draft: DraftPrograms | None = None,
        executables: Executables | None = None,
        adapters: AdapterBank | None = None,
        copies_pages: bool = False,
    ) -> None:
        """The same weights twice, in the form that each kind of program takes them. `draft` is the model that guesses,
        if `spec.draft` describes one. `executables` keeps programs for the next start. `adapters` are those of
        `spec.adapter_rank`. Only where it `copies_pages` are there programs for that."""
        self.spec = spec
        self.draft = draft
        self.adapters = adapters
        self._executables = executables or Executables(None, spec.mesh)
        self._cache = cache
        self._prefill_weights = FlatWeights.of(prefill_weights)
        self._decode_weights = FlatWeights.of(decode_weights)
        self._whole = spec.whole
        self._pages = PagePrograms(cache, spec.whole, self._executables) if copies_pages else None
        self._last_token_B = put_everywhere(np.zeros(spec.num_slots + 1, np.int32), self._whole)
        slots = empty_slots(spec.num_slots + 1, spec.config.vocab_size)
        self._slots = jax.tree.map(put_everywhere, slots, slot_shardings(spec))
        self._write_slot: jax.stages.Compiled | None = None
        self._empty: jax.stages.Compiled | None = None
        self._all_allowed: dict[int, jax.Array] = {}  # by number of rows
        self._compiled: dict[StepShape, jax.stages.Compiled] = {}

    @property
    def _state(self) -> tuple[KVCache, jax.Array, SlotState]:
        """Donated to each step and bound anew."""
        return self._cache, self._last_token_B, self._slots

    @property
    def num_pages(self) -> int:
        """Pages in the cache, the null page included."""
        return self._cache.num_pages

    @property
    def page_bytes(self) -> int:
        """Of one page, on all devices together."""
        return num_bytes(self._cache) // self.num_pages

    @property
    def shapes(self) -> tuple[StepShape, ...]:
        return tuple(self._compiled)

    def temporaries(self, shape: StepShape) -> int:
        """Bytes that one device needs while it runs this shape, beyond weights and cache. The cache may be abstract."""
        return temporary_bytes(self._compile_one(shape))

    def compile(self, shapes: tuple[StepShape, ...], on_done: Callable[[StepShape], None], num_threads: int) -> None:
        """Compile every shape before the first request; XLA works outside the GIL, so threads help."""
        with ThreadPoolExecutor(num_threads, "compile") as pool:
            writing, emptying = (
                pool.submit(self._compile_write_slot),
                pool.submit(compile_empty, self._state, self._executables),
            )
            draft_is_compiled = self.draft.compile(pool) if self.draft is not None else ()
            copies_are_compiled = self._pages.compile(pool) if self._pages is not None else ()
            bank_is_compiled = () if self.adapters is None else (pool.submit(self.adapters.compile),)
            futures = {pool.submit(self._compile_one, shape): shape for shape in shapes}
            for future in as_completed(futures):
                future.result()
                on_done(futures[future])
            for done in (*draft_is_compiled, *copies_are_compiled):
                done.result()
            for written in bank_is_compiled:
                written.result()
        self._write_slot, self._empty = writing.result(), emptying.result()
        self._compiled |= {futures[f]: f.result() for f in futures}
        for rows in {shape.rows for shape in shapes}:
            self._all_allowed[rows] = put_everywhere(self.new_masks(rows), self._whole)

    def _compile_one(self, shape: StepShape) -> jax.stages.Compiled:
        draft_weights = None if self.draft is None or not shape.drafts else self.draft.weights
        _, draft_cache = self._draft_of(shape)
        weights = self._weights_for(shape)
        state, executables = self._state, self._executables
        return compile_step(
            executables, self.spec, shape, weights, state, draft_weights, draft_cache, self._adapter_layers
        )

    def _draft_of(self, shape: StepShape) -> tuple[tuple[jax.Array, ...], KVCache | None]:
        """The draft model's weights and cache for the programs that guess, nothing for the others."""
        if self.draft is None or not shape.drafts:
            return (), None
        return self.draft.weights.leaves, self.draft.cache

    @property
    def _adapter_layers(self) -> Params | None:
        return None if self.adapters is None else self.adapters.layers

    def _weights_for(self, shape: StepShape) -> FlatWeights:
        return self._prefill_weights if shape.tiles else self._decode_weights

    def _compile_write_slot(self) -> jax.stages.Compiled:
        packet = jax.ShapeDtypeStruct((PACKET,), jnp.int32, sharding=self._whole)
        jitted = jax.jit(write_slot, donate_argnums=0, out_shardings=slot_shardings(self.spec))
        return self._executables.compiled(jitted, (self._slots, packet), "write_slot")

    def reset(self) -> None:
        """Empty device state, in place of what a failed step has taken with it or left half written. Waits for it, and
        raises what the device raises."""
        assert self._empty is not None, "compile() comes first"
        self._cache, self._last_token_B, self._slots = renew(self._state, self._empty)
        if self.draft is not None:
            self.draft.reset()

    def new_masks(self, rows: int) -> NDArray[np.int32]:
        """int32[rows, words] that allow everything; see `masks`."""
        return np.full((rows, num_words(self.spec.config.vocab_size)), ALL_TOKENS, np.int32)

    def run(
        self, shape: StepShape, packed: NDArray[np.int32], masks_RW: NDArray[np.int32] | None = None
    ) -> tuple[jax.Array, StepLogprobs]:
        """Dispatch one step and return at once; the tokens, int32[rows, trips], start their way to the host."""
        masks = self._all_allowed[shape.rows] if masks_RW is None else masks_RW
        tokens_RI, logprobs, self._cache, self._last_token_B, self._slots, draft_cache = self._compiled[shape](
            self._weights_for(shape).leaves,
            *self._state,
            packed,
            masks,
            *self._draft_of(shape),
            self._adapter_layers,
        )
        if self.draft is not None and draft_cache is not None:
            self.draft.cache = draft_cache
        tokens_RI.copy_to_host_async()
        return tokens_RI, logprobs

    @property
    def copies_pages(self) -> bool:
        return self._pages is not None

    def take_pages(self, pages: Sequence[int]) -> list[PageArrays]:
        """Dispatch copies of what lies in these pages, which start their way to the host; only with `copies_pages`."""
        assert self._pages is not None, "there are no programs that copy pages"
        return self._pages.take(self._cache, pages)

    def put_pages(self, pages: Sequence[int], arrays: Sequence[PageArrays]) -> None:
        """Dispatch copies of what `take_pages` gave into these pages; steps that run after it see them."""
        assert self._pages is not None, "there are no programs that copy pages"
        self._cache = self._pages.put(self._cache, pages, arrays)

    def write_adapter(self, place: int, adapter: Params) -> None:
        """As that of AdapterBank; only where there is one."""
        assert self.adapters is not None, "there is no place for an adapter"
        self.adapters.write(place, adapter)

    def write_slot(self, packet: NDArray[np.int32]) -> None:
        """Dispatch one packet of `slot_packets`; steps that run after it see it."""
        assert self._write_slot is not None, "compile() comes first"
        self._slots = self._write_slot(self._slots, packet)
