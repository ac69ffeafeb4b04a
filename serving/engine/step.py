"""The jitted step, and the programs compiled from it ahead of time: one per StepShape.

A step is embed -> layers -> logits at one row per sequence -> sample -> `last_token[slot]`. Without prefill it does so
several times, as many as the host says (`trips`). The cache, `last_token` and the sampler's SlotState are donated: the
device keeps one copy of each, and a call rebinds them.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from kv.cache import KVCache
from kv.paged_attention import DecodeKernel, PagedView, TileGroup, paged_attention
from model.config import ModelConfig
from model.decoder import Decoder
from serving.engine.batch import NOT_FINITE, NOTHING, ROW_FIELDS, BatchLayout, StepShape
from serving.engine.logprobs import RowLogprobs
from serving.engine.masks import ALL_TOKENS, num_words
from serving.engine.penalties import count_chosen
from serving.engine.prompt_logprobs import PromptLogprobs, StepLogprobs, prompt_logprobs
from serving.engine.sampling import RowSampling, sample
from serving.engine.slot_state import PACKET, SlotState, empty_slots, write_slot
from serving.engine.slots import STOPS
from serving.engine.trips import ENDED, TripState, run_trips
from serving.engine.verify import accept, draft_rows
from sharding.params import bind
from sharding.tree import Params

StepFn = Callable[..., tuple[jax.Array, StepLogprobs, KVCache, jax.Array, SlotState]]


@dataclass(frozen=True, slots=True)
class StepSpec:
    """What all programs of an engine share."""

    config: ModelConfig
    mesh: Mesh
    num_slots: int
    pages_per_slot: int
    tile_tokens: int
    decode_kernel: DecodeKernel | None = None
    max_trips: int = 1
    """Tokens that one decode call can give a row."""

    def layout(self, shape: StepShape) -> BatchLayout:
        return BatchLayout(shape, self.pages_per_slot, self.tile_tokens)


def make_step(spec: StepSpec, shape: StepShape, treedef: Any) -> StepFn:
    """The step of one shape, as a pure function of arrays: `serving_step(weights, cache, last_token_B, slots, packed,
    masks_RW)`.

    `weights` is a flat tuple of leaves: flattening a Flax state in every call would cost milliseconds of host time.
    Returns the sampled tokens int32[rows, trips] (ENDED where there is none, NOT_FINITE where the model broke down),
    log-probabilities of the last trip, the cache, `last_token_B`, whose last entry is a scrap slot for padding, and the
    slots with the new tokens counted.
    """
    layout = spec.layout(shape)

    def serving_step(
        weights: tuple[jax.Array, ...],
        cache: KVCache,
        last_token_B: jax.Array,
        slots: SlotState,
        packed: jax.Array,
        masks_RW: jax.Array,
    ) -> tuple[jax.Array, StepLogprobs, KVCache, jax.Array, SlotState]:
        decoder = bind(spec.config, jax.tree.unflatten(treedef, weights))
        fields_FR, pages_RJ, tile_rows_S1, tokens_SQ, positions_SQ, next_SQ, drafts_RD = layout.split(packed)
        slot_R, position_R, sample_at_R, num_trips_R = fields_FR[:4]
        rows, stops_RK = row_sampling(fields_FR, masks_RW), fields_FR[-STOPS:].T

        def forward(i: jax.Array, state: TripState) -> tuple[jax.Array, RowLogprobs, TripState, jax.Array]:
            is_alive_R = (position_R < 0) | (state.newest_R != ENDED)  # a row that prefills starts anew
            is_sampled_R = (i < num_trips_R) & is_alive_R
            at_R = jnp.where(is_sampled_R & (position_R >= 0), position_R + i, NOTHING)
            groups = [TileGroup(pages_RJ, at_R[:, None])]
            tokens_T, positions_T = jnp.maximum(state.newest_R, 0), at_R
            if shape.tiles:
                groups.append(TileGroup(pages_RJ[tile_rows_S1[:, 0]], positions_SQ))
                tokens_T = jnp.concatenate([tokens_T, tokens_SQ.reshape(-1)])
                positions_T = jnp.concatenate([positions_T, positions_SQ.reshape(-1)])
            attend = paged_attention(PagedView(tuple(groups)), spec.decode_kernel)
            rows_R = jnp.maximum(sample_at_R, 0)
            x_TD, cache = decoder.hidden(tokens_T, jnp.maximum(positions_T, 0), attend, state.cache)
            logits_RV = decoder.logits(x_TD[rows_R])
            kept = SlotState(state.counts_BV, slots.edits_B3E)
            chosen_R, logprobs = sample(logits_RV, replace(rows, position_R=rows.position_R + i), kept)
            counts_BV = count_chosen(state.counts_BV, slot_R, chosen_R, rows.counted_R & is_sampled_R)
            broken_R = _broken_rows(x_TD, positions_T, shape.rows, tile_rows_S1)
            broken_R |= is_sampled_R & ~_is_finite(logits_RV)
            next_R = jnp.where((stops_RK == chosen_R[:, None]).any(axis=1) | broken_R, ENDED, chosen_R)
            state = TripState(cache, jnp.where(is_sampled_R, next_R, state.newest_R), counts_BV)
            told_R = jnp.where(broken_R, NOT_FINITE, jnp.where(is_sampled_R, chosen_R, ENDED))
            return told_R, logprobs, state, x_TD

        def trip(i: jax.Array, state: TripState) -> tuple[jax.Array, RowLogprobs, TripState]:
            return forward(i, state)[:3]

        def verify(state: TripState) -> tuple[jax.Array, RowLogprobs, TripState]:
            is_sampled_R = (num_trips_R > 0) & (state.newest_R != ENDED)
            known_RQ = jnp.concatenate([state.newest_R[:, None], drafts_RD], axis=1)
            R, Q = known_RQ.shape
            at_RQ = jnp.where(is_sampled_R[:, None] & (known_RQ >= 0), position_R[:, None] + jnp.arange(Q), NOTHING)
            attend = paged_attention(PagedView((TileGroup(pages_RJ, at_RQ),)), spec.decode_kernel)
            tokens_T, positions_T = jnp.maximum(known_RQ, 0).reshape(-1), jnp.maximum(at_RQ, 0).reshape(-1)
            x_TD, cache = decoder.hidden(tokens_T, positions_T, attend, state.cache)
            logits_TV = decoder.logits(x_TD)
            chosen_T, logprobs = sample(logits_TV, draft_rows(rows, Q), slots)
            chosen_RQ = chosen_T.reshape(R, Q)
            counts_BV = count_chosen(state.counts_BV, slot_R, chosen_RQ[:, 0], rows.counted_R & is_sampled_R)
            broken_RQ = ~(_is_finite(x_TD) & _is_finite(logits_TV)).reshape(R, Q) & (at_RQ >= 0)
            tokens_RQ, newest_R = accept(chosen_RQ, drafts_RD, broken_RQ, is_sampled_R, stops_RK)
            state = TripState(cache, jnp.where(is_sampled_R, newest_R, state.newest_R), counts_BV)
            return tokens_RQ, jax.tree.map(lambda leaf: leaf[::Q], logprobs), state

        state = TripState(cache, last_token_B[slot_R], slots.counts_BV)
        if shape.drafts:
            tokens_RI, logprobs, state = verify(state)
            told = StepLogprobs(logprobs)
        elif shape.tiles:
            tokens_R, logprobs, state, x_TD = forward(jnp.int32(0), state)
            tokens_RI = tokens_R[:, None]
            told = StepLogprobs(logprobs, _prompts(decoder, x_TD[shape.rows :], next_SQ))
        else:
            tokens_RI, logprobs, state = run_trips(trip, num_trips_R, state, spec.max_trips)
            told = StepLogprobs(logprobs)
        slots = SlotState(state.counts_BV, slots.edits_B3E)
        return tokens_RI, told, state.cache, last_token_B.at[slot_R].set(state.newest_R), slots

    return serving_step


def _prompts(decoder: Decoder, x_TD: jax.Array, next_SQ: jax.Array) -> PromptLogprobs:
    return prompt_logprobs(decoder.logits, x_TD.reshape(*next_SQ.shape, -1), next_SQ)


def _broken_rows(x_TD: jax.Array, positions_T: jax.Array, num_rows: int, tile_rows_S1: jax.Array) -> jax.Array:
    """bool[R]: some token of the row, decoded or prefilled, came out of the layers as NaN or infinity."""
    is_broken_T = ~_is_finite(x_TD) & (positions_T >= 0)
    num_tiles = tile_rows_S1.shape[0]
    if num_tiles == 0:
        return is_broken_T
    is_broken_S = jnp.any(is_broken_T[num_rows:].reshape(num_tiles, -1), axis=1)
    return is_broken_T[:num_rows].at[tile_rows_S1[:, 0]].max(is_broken_S)


def _is_finite(x_RV: jax.Array) -> jax.Array:
    """bool[R]: all numbers of the row are. A sum says so in half the time of a test of each; XLA's maximum on CPU would
    lose a NaN."""
    return jnp.isfinite(jnp.sum(x_RV, axis=-1))


def row_sampling(fields_FR: jax.Array, masks_RW: jax.Array | None = None) -> RowSampling:
    """The sampler's view of a batch's row fields."""
    field = dict(zip(ROW_FIELDS, fields_FR, strict=True))

    def as_float(name: str) -> jax.Array:
        return jax.lax.bitcast_convert_type(field[name], jnp.float32)

    seed_R2 = jnp.stack([field["seed_high"], field["seed_low"]], axis=1)
    return RowSampling(
        temperature_R=as_float("temperature"),
        top_k_R=field["top_k"],
        top_p_R=as_float("top_p"),
        min_p_R=as_float("min_p"),
        seed_R2=jax.lax.bitcast_convert_type(seed_R2, jnp.uint32),
        position_R=field["sample_position"],
        slot_R=field["slot"],
        repetition_R=as_float("repetition"),
        presence_R=as_float("presence"),
        frequency_R=as_float("frequency"),
        counted_R=field["counted"] > 0,
        num_edits_R=field["num_edits"],
        logprobs_R=field["logprobs"] > 0,
        masked_R=field["masked"] > 0,
        masks_RW=masks_RW,
    )


@dataclass(frozen=True, slots=True)
class FlatWeights:
    """Weights as a call takes them: to flatten them each time would cost milliseconds."""

    leaves: tuple[jax.Array, ...]
    treedef: Any

    @classmethod
    def of(cls, weights: Params) -> "FlatWeights":
        leaves, treedef = jax.tree.flatten(weights)
        return cls(tuple(leaves), treedef)


class Programs:
    """Compiled steps, and the device state that they hand on to each other. Owned by the engine's thread."""

    def __init__(self, spec: StepSpec, weights: Params, cache: KVCache, decode_weights: Params | None = None) -> None:
        """`decode_weights` are the same numbers in the form that decode programs take them, if not in that of all."""
        self.spec = spec
        self._cache = cache
        self._weights = FlatWeights.of(weights)
        self._decode_weights = self._weights if decode_weights is None else FlatWeights.of(decode_weights)
        self._whole = NamedSharding(spec.mesh, PartitionSpec())
        self._last_token_B = jax.device_put(np.zeros(spec.num_slots + 1, np.int32), self._whole)
        self._slots = jax.device_put(empty_slots(spec.num_slots + 1, spec.config.vocab_size), self._whole)
        self._write_slot: jax.stages.Compiled | None = None
        self._empty: jax.stages.Compiled | None = None
        self._all_allowed: dict[int, jax.Array] = {}  # by number of rows
        self._compiled: dict[StepShape, jax.stages.Compiled] = {}

    @property
    def num_pages(self) -> int:
        """Pages in the cache, the null page included."""
        return int(self._cache.v_LPKGH.shape[1])

    @property
    def shapes(self) -> tuple[StepShape, ...]:
        return tuple(self._compiled)

    def temporaries(self, shape: StepShape) -> int:
        """Bytes that one device needs while it runs this shape, beyond weights and cache. The cache may be abstract."""
        memory = self._compile_one(shape).memory_analysis()
        assert memory is not None, "every back end here analyses its programs"
        return int(memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes)

    def compile(self, shapes: tuple[StepShape, ...], on_done: Callable[[StepShape], None], num_threads: int) -> None:
        """Compile every shape before the first request; XLA works outside the GIL, so threads help."""
        with ThreadPoolExecutor(num_threads, "compile") as pool:
            writing, emptying = pool.submit(self._compile_write_slot), pool.submit(self._compile_empty)
            futures = {pool.submit(self._compile_one, shape): shape for shape in shapes}
            for future in as_completed(futures):
                future.result()
                on_done(futures[future])
        self._write_slot, self._empty = writing.result(), emptying.result()
        self._compiled |= {futures[f]: f.result() for f in futures}
        for rows in {shape.rows for shape in shapes}:
            self._all_allowed[rows] = jax.device_put(self.new_masks(rows), self._whole)

    def _compile_one(self, shape: StepShape) -> jax.stages.Compiled:
        weights = self._weights_for(shape)
        step = make_step(self.spec, shape, weights.treedef)
        packed = jax.ShapeDtypeStruct((self.spec.layout(shape).size,), jnp.int32, sharding=self._whole)
        cache_shardings = jax.tree.map(lambda leaf: leaf.sharding, self._cache)
        whole = self._whole
        out_shardings = (whole, whole, cache_shardings, whole, whole)
        jitted = jax.jit(step, donate_argnums=(1, 2, 3), out_shardings=out_shardings)
        masks = jax.ShapeDtypeStruct(self.new_masks(shape.rows).shape, jnp.int32, sharding=self._whole)
        return jitted.lower(weights.leaves, self._cache, self._last_token_B, self._slots, packed, masks).compile()

    def _weights_for(self, shape: StepShape) -> "FlatWeights":
        return self._weights if shape.tiles else self._decode_weights

    def _compile_write_slot(self) -> jax.stages.Compiled:
        packet = jax.ShapeDtypeStruct((PACKET,), jnp.int32, sharding=self._whole)
        jitted = jax.jit(write_slot, donate_argnums=0, out_shardings=self._whole)
        return jitted.lower(self._slots, packet).compile()

    def _compile_empty(self) -> jax.stages.Compiled:
        state = (self._cache, self._last_token_B, self._slots)
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, state)

        def empty() -> tuple[KVCache, jax.Array, SlotState]:
            return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

        return jax.jit(empty, out_shardings=shardings).lower().compile()

    def reset(self) -> None:
        """Empty device state, in place of what a failed step has taken with it or left half written. Waits for it, and
        raises what the device raises."""
        assert self._empty is not None, "compile() comes first"
        for leaf in jax.tree.leaves((self._cache, self._last_token_B, self._slots)):
            if not leaf.is_deleted():
                leaf.delete()  # first, since there may be no room for both
        self._cache, self._last_token_B, self._slots = jax.block_until_ready(self._empty())

    def new_masks(self, rows: int) -> NDArray[np.int32]:
        """int32[rows, words] that allow everything; see `masks`."""
        return np.full((rows, num_words(self.spec.config.vocab_size)), ALL_TOKENS, np.int32)

    def run(
        self, shape: StepShape, packed: NDArray[np.int32], masks_RW: NDArray[np.int32] | None = None
    ) -> tuple[jax.Array, StepLogprobs]:
        """Dispatch one step and return at once; the tokens, int32[rows, trips], start their way to the host."""
        masks = self._all_allowed[shape.rows] if masks_RW is None else masks_RW
        tokens_RI, logprobs, self._cache, self._last_token_B, self._slots = self._compiled[shape](
            self._weights_for(shape).leaves, self._cache, self._last_token_B, self._slots, packed, masks
        )
        tokens_RI.copy_to_host_async()
        return tokens_RI, logprobs

    def write_slot(self, packet: NDArray[np.int32]) -> None:
        """Dispatch one packet of `slot_packets`; steps that run after it see it."""
        assert self._write_slot is not None, "compile() comes first"
        self._slots = self._write_slot(self._slots, packet)
