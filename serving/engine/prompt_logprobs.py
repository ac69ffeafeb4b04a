"""Log-probabilities of prompts: how likely the model found each token of a prompt after those before it.

They come from the steps that prefill the prompt, one query tile after the other, so that no more than a tile's logits
exist at once, whatever the prompt's length. A tile that nobody asked about computes nothing.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from kv.page_table import pages_for
from serving.engine.api import TokenLogprobs
from serving.engine.logprobs import RowLogprobs, entry, no_logprobs, row_logprobs
from serving.engine.plan import Chunk, StepPlan

UNASKED = -1
"""In the place of a token: its log-probability is not wanted."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PromptLogprobs:
    """Of S tiles of Q tokens: what the model says of the token after each."""

    logprobs_SQX: RowLogprobs
    """Column 0 is the prompt's own next token."""
    rank_SQ: jax.Array
    """int32: its place among all tokens, from 1; ties count for it."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepLogprobs:
    """All log-probabilities that one step has found."""

    rows: RowLogprobs
    prompts: PromptLogprobs | None = None
    """None in a step that prefills nothing."""
    pooled_2SD: jax.Array | None = None
    """Of each tile, where the engine makes embeddings; see `pooling`."""


def prompt_logprobs(logits: Callable[[jax.Array], jax.Array], x_SQD: jax.Array, next_SQ: jax.Array) -> PromptLogprobs:
    """`logits` makes float32[Q, V] of a tile's x_QD; `next_SQ` are the prompt's next tokens, or UNASKED."""
    S, Q = next_SQ.shape

    def of_tile(tile: tuple[jax.Array, jax.Array]) -> tuple[RowLogprobs, jax.Array]:
        x_QD, next_Q = tile

        def compute() -> tuple[RowLogprobs, jax.Array]:
            logits_QV, own_Q = logits(x_QD), jnp.maximum(next_Q, 0)
            own_Q1 = jnp.take_along_axis(logits_QV, own_Q[:, None], axis=1, mode="promise_in_bounds")
            return row_logprobs(logits_QV, own_Q), 1 + jnp.sum(logits_QV > own_Q1, axis=1, dtype=jnp.int32)

        return jax.lax.cond(jnp.any(next_Q >= 0), compute, lambda: _nothing(Q))

    def of_all() -> tuple[RowLogprobs, jax.Array]:
        return jax.lax.map(of_tile, (x_SQD, next_SQ))

    def of_none() -> tuple[RowLogprobs, jax.Array]:
        return jax.tree.map(lambda leaf: jnp.zeros((S, *leaf.shape), leaf.dtype), jax.eval_shape(lambda: _nothing(Q)))

    return PromptLogprobs(*jax.lax.cond(jnp.any(next_SQ >= 0), of_all, of_none))


def _nothing(num_tokens: int) -> tuple[RowLogprobs, jax.Array]:
    return no_logprobs(num_tokens), jnp.zeros(num_tokens, jnp.int32)


def next_tokens(chunk: Chunk) -> list[int]:
    """For each token of a chunk the prompt's next one, or UNASKED."""
    sequence = chunk.sequence
    first, last = _asked(chunk)
    inside = sequence.token_ids[first + 1 : last + 1]
    return [*[UNASKED] * (first - chunk.start), *inside, *[UNASKED] * (chunk.start + chunk.length - last)]


def _asked(chunk: Chunk) -> tuple[int, int]:
    """Positions [first, last) of a chunk whose next token's log-probability is wanted and not known yet."""
    sequence = chunk.sequence
    first = min(max(chunk.start, sequence.num_prompt_told), chunk.start + chunk.length)
    return first, max(first, min(chunk.start + chunk.length, sequence.num_prompt - 1))


@dataclass(frozen=True, slots=True, eq=False)
class PromptsInFlight:
    """The log-probabilities of one step's prompts, on their way to the host."""

    arrays: PromptLogprobs
    chunks: tuple[tuple[Chunk, int], ...]
    """Those that want them, with the flat index of their first token among the step's tiles."""

    @classmethod
    def of(cls, plan: StepPlan, logprobs: StepLogprobs) -> "PromptsInFlight | None":
        """None when nobody asked: then they stay on the device."""
        if not any(chunk.sequence.wants_prompt_logprobs for chunk in plan.prefill):
            return None
        arrays = logprobs.prompts
        assert arrays is not None, "a step that prefills has them"
        for leaf in jax.tree.leaves(arrays):
            leaf.copy_to_host_async()
        starts = _tile_starts(plan, arrays.rank_SQ.shape[1])
        return cls(arrays, tuple((c, at) for c, at in starts if c.sequence.wants_prompt_logprobs))

    def read(self) -> dict[str, tuple[TokenLogprobs, ...]]:
        """By request id, what is new of each; waits for the device."""
        rows = self.arrays.logprobs_SQX
        ids_TX, logprobs_TX = _flat(rows.ids_RX), _flat(rows.logprobs_RX)
        rank_T = np.asarray(self.arrays.rank_SQ).reshape(-1)
        told = {}
        for chunk, at in self.chunks:
            first, last = _asked(chunk)
            num_top = chunk.sequence.request.sampling.prompt_logprobs or 0
            told[chunk.sequence.request_id] = tuple(
                entry(ids_TX[i], logprobs_TX[i], num_top, rank=int(rank_T[i]))
                for i in range(at + first - chunk.start, at + last - chunk.start)
            )
        return told


def _tile_starts(plan: StepPlan, tile_tokens: int) -> Iterator[tuple[Chunk, int]]:
    """With each chunk the flat index of its first token among the step's tiles."""
    at = 0
    for chunk in plan.prefill:
        yield chunk, at
        at += pages_for(chunk.length, tile_tokens) * tile_tokens


def _flat(values_SQX: jax.Array) -> NDArray[np.generic]:
    return np.asarray(values_SQX).reshape(-1, values_SQX.shape[-1])
