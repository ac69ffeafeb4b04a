"""The step as a pure function of arrays, one per StepShape; `programs` compiles it.

A step is embed -> layers -> logits at one row per sequence -> sample -> `last_token[slot]`. Without prefill it does so
several times, as many as the host says (`trips`). The cache, `last_token` and the sampler's SlotState are donated: the
device keeps one copy of each, and a call rebinds them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kv.backends import PagedAttention
from kv.cache import KVCache
from kv.layer_sets import WHOLE, LayerSets, Windows
from kv.paged_attention import PagedView, TileGroup, paged_attention, step_attention
from model.adapters import StepAdapters
from model.config import ModelConfig
from model.decoder import Decoder
from model.seams import ONE_DEVICE, Seams
from model.tree import Params
from serving.engine.batch import NOT_FINITE, NOTHING, ROW_FIELDS, BatchLayout, StepShape
from serving.engine.draft_step import DraftSpec, guess
from serving.engine.logprobs import RowLogprobs
from serving.engine.penalties import count_chosen
from serving.engine.pooling import pool_tiles
from serving.engine.prompt_logprobs import PromptLogprobs, StepLogprobs, prompt_logprobs
from serving.engine.sampling import RowSampling, sample
from serving.engine.slot_state import SlotState
from serving.engine.slots import STOPS
from serving.engine.trips import ENDED, TripState, run_trips
from serving.engine.verify import accept, draft_rows
from sharding.params import bind

StepFn = Callable[..., tuple[jax.Array, StepLogprobs, KVCache, jax.Array, SlotState, KVCache | None]]


@dataclass(frozen=True, slots=True)
class StepSpec:
    """What all programs of an engine share."""

    config: ModelConfig
    mesh: Mesh
    num_slots: int
    pages_per_slot: int
    tile_tokens: int
    attention: PagedAttention = paged_attention
    max_trips: int = 1
    """Tokens that one decode call can give a row."""
    draft: DraftSpec | None = None
    """The model that guesses; None where guesses come from the host."""
    embeds: bool = False
    """Whether steps that prefill tell what embeddings are made of."""
    adapter_rank: int = 0
    """Of each adapter; 0 where there are none."""
    seams: Seams = ONE_DEVICE
    sets: LayerSets | None = None
    """Of the served model's layers, where they do not have all pages in common."""
    vocab_axes: tuple[str, ...] = ()
    """Axes of the mesh over which logits are split."""

    @property
    def vocab_shards(self) -> int:
        return prod(self.mesh.shape[axis] for axis in self.vocab_axes)

    @property
    def whole(self) -> NamedSharding:
        """Of what every device holds."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def windows(self) -> Windows:
        """Of each set of layers, as pages are kept for it: a draft model may come late and read what lies before a
        window."""
        if self.draft is not None:
            return WHOLE
        return (self.config.window,) if self.sets is None else self.sets.windows

    def layout(self, shape: StepShape) -> BatchLayout:
        return BatchLayout(
            shape,
            self.pages_per_slot,
            self.tile_tokens,
            has_adapters=self.adapter_rank > 0,
            num_sets=1 if self.sets is None else len(self.sets.windows),
        )


def make_step(spec: StepSpec, shape: StepShape, treedef: Any, draft_treedef: Any = None) -> StepFn:
    """The step of one shape, as a pure function of arrays: `serving_step(weights, cache, last_token_B, slots, packed,
    masks_RW, draft_weights, draft_cache, adapters)`. The draft model's are given to steps that check its guesses;
    `adapters` are those of an AdapterBank.

    `weights` is a flat tuple of leaves: flattening a Flax state in every call would cost milliseconds of host time.
    Returns the sampled tokens int32[rows, trips] (ENDED where there is none, NOT_FINITE where the model broke down),
    log-probabilities of the last trip, the cache, `last_token_B`, whose last entry is a scrap slot for padding, the
    slots with the new tokens counted, and the draft model's cache.
    """
    layout, is_staged = spec.layout(shape), spec.seams.layers is not None

    def serving_step(
        weights: tuple[jax.Array, ...],
        cache: KVCache,
        last_token_B: jax.Array,
        slots: SlotState,
        packed: jax.Array,
        masks_RW: jax.Array,
        draft_weights: tuple[jax.Array, ...] = (),
        draft_cache: KVCache | None = None,
        adapters: Params | None = None,
    ) -> tuple[jax.Array, StepLogprobs, KVCache, jax.Array, SlotState, KVCache | None]:
        decoder = bind(spec.config, jax.tree.unflatten(treedef, weights), spec.seams)
        fields_FR, pages_RJ, tile_rows_S1, tokens_SQ, positions_SQ, next_SQ, drafts_RD, *numbers_R1 = layout.split(
            packed
        )
        rows_of_pages = pages_RJ if spec.sets is None else pages_RJ.reshape(layout.num_sets, shape.rows, -1)
        slot_R, position_R, sample_at_R, num_trips_R = fields_FR[:4]
        rows, stops_RK = row_sampling(fields_FR, masks_RW, spec.vocab_shards), fields_FR[-STOPS:].T

        def adapted(num_queries: int = 1) -> StepAdapters | None:
            """Of so many tokens of each row, and then of the tiles."""
            if adapters is None:
                return None
            number_R = numbers_R1[0][:, 0]
            number_T = jnp.repeat(number_R, num_queries)
            if shape.tiles:
                of_tiles = jnp.repeat(number_R[tile_rows_S1[:, 0]], spec.tile_tokens)
                number_T = jnp.concatenate([number_T, of_tiles])
            return StepAdapters(adapters, number_T, spec.adapter_rank)

        def forward(i: jax.Array, state: TripState) -> tuple[jax.Array, RowLogprobs, TripState, jax.Array]:
            is_alive_R = (position_R < 0) | (state.newest_R != ENDED)  # a row that prefills starts anew
            is_sampled_R = (i < num_trips_R) & is_alive_R
            at_R = jnp.where(is_sampled_R & (position_R >= 0), position_R + i, NOTHING)
            groups = [TileGroup(rows_of_pages, at_R[:, None])]
            tokens_T, positions_T = jnp.maximum(state.newest_R, 0), at_R
            if shape.tiles:
                groups.append(TileGroup(_of_tiles(rows_of_pages, tile_rows_S1[:, 0]), positions_SQ))
                tokens_T = jnp.concatenate([tokens_T, tokens_SQ.reshape(-1)])
                positions_T = jnp.concatenate([positions_T, positions_SQ.reshape(-1)])
            attend = step_attention(PagedView(tuple(groups), spec.sets), spec.attention, is_staged=is_staged)
            x_TD, cache = decoder.hidden(tokens_T, jnp.maximum(positions_T, 0), attend, state.cache, adapted())
            logits_RV = decoder.logits(_sampled_rows(x_TD, sample_at_R, spec.tile_tokens))
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

        def verify(state: TripState, drafts_RD: jax.Array) -> tuple[jax.Array, RowLogprobs, TripState]:
            is_sampled_R = (num_trips_R > 0) & (state.newest_R != ENDED)
            known_RQ = jnp.concatenate([state.newest_R[:, None], drafts_RD], axis=1)
            R, Q = known_RQ.shape
            at_RQ = jnp.where(is_sampled_R[:, None] & (known_RQ >= 0), position_R[:, None] + jnp.arange(Q), NOTHING)
            view = PagedView((TileGroup(rows_of_pages, at_RQ),), spec.sets)
            attend = step_attention(view, spec.attention, is_staged=is_staged)
            tokens_T, positions_T = jnp.maximum(known_RQ, 0).reshape(-1), jnp.maximum(at_RQ, 0).reshape(-1)
            x_TD, cache = decoder.hidden(tokens_T, positions_T, attend, state.cache, adapted(Q))
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
            if spec.draft is not None and draft_cache is not None:
                drafter = bind(spec.draft.config, jax.tree.unflatten(draft_treedef, draft_weights), spec.draft.seams)
                newest_R = jnp.where(num_trips_R > 0, state.newest_R, ENDED)
                drafts_RD, draft_cache = guess(
                    spec.draft, drafter, draft_cache, newest_R, position_R, drafts_RD, pages_RJ, rows, slots
                )
            tokens_RI, logprobs, state = verify(state, drafts_RD)
            told = StepLogprobs(logprobs)
        elif shape.tiles:
            tokens_R, logprobs, state, x_TD = forward(jnp.int32(0), state)
            tokens_RI = tokens_R[:, None]
            told = StepLogprobs(logprobs, _prompts(decoder, x_TD[shape.rows :], next_SQ))
            if spec.embeds:
                x_SQD = decoder.final_norm(x_TD[shape.rows :]).reshape(*positions_SQ.shape, -1)
                told = replace(told, pooled_2SD=pool_tiles(x_SQD, positions_SQ))
        else:
            tokens_RI, logprobs, state = run_trips(trip, num_trips_R, state, spec.max_trips)
            told = StepLogprobs(logprobs)
        slots = SlotState(state.counts_BV, slots.edits_B3E)
        return tokens_RI, told, state.cache, last_token_B.at[slot_R].set(state.newest_R), slots, draft_cache

    return serving_step


def _sampled_rows(x_TD: jax.Array, sample_at_R: jax.Array, tile_tokens: int) -> jax.Array:
    """[R, D], of each row the token that it samples after, if it does. Rows that decode are the step's first tokens, so
    no more than one for each tile is put in, in turn: all at once take a TPU's compiler up to two seconds."""
    R = sample_at_R.shape[0]
    start_S = jnp.arange(R, x_TD.shape[0], tile_tokens)
    if start_S.size == 0:
        # In its order already; but without a copy XLA leaves all of it in HBM between the layers.
        return x_TD[jnp.maximum(sample_at_R, 0)]
    is_of_tile_SR = (sample_at_R >= start_S[:, None]) & (sample_at_R < start_S[:, None] + tile_tokens)
    at_S = jnp.max(jnp.where(is_of_tile_SR, sample_at_R, 0), axis=1)
    row_S = jnp.min(jnp.where(is_of_tile_SR, jnp.arange(R), R), axis=1)  # R where no row samples after the tile

    def put(tile: jax.Array, x_RD: jax.Array) -> jax.Array:
        row = jnp.minimum(row_S[tile], R - 1)
        x_D = jnp.where(row_S[tile] < R, x_TD[at_S[tile]], x_RD[row])
        return jax.lax.dynamic_update_index_in_dim(x_RD, x_D, row, axis=0)

    return jax.lax.fori_loop(0, start_S.size, put, x_TD[:R])


def _of_tiles(pages: jax.Array, rows_S: jax.Array) -> jax.Array:
    """Page rows of tiles, [S, J], or of each set [W, S, J], as `pages` are those of rows."""
    return pages[rows_S] if pages.ndim == 2 else pages[:, rows_S]


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


def row_sampling(fields_FR: jax.Array, masks_RW: jax.Array | None = None, vocab_shards: int = 1) -> RowSampling:
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
        vocab_shards=vocab_shards,
    )
