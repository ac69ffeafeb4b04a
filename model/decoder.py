"""Decoder: the transformer of all families; ModelConfig says how they differ.

Layers are stacked on a leading axis and scanned, or kept one by one. Scanned, one compiled layer body serves all
layers, so that compile time does not grow with depth. A CPU copies each layer's slice of a stacked weight before it
multiplies, which costs as much as the product of one row. So packed weights are not sliced, and what cannot be packed
there is taken by decode as layers that have their own arrays. The cache is carried, never passed as a scan's input or
output slices: those would be copied.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from qwix import QArray

from model import axes
from model.adapters import StepAdapters, adapt
from model.attention import Attention, AttentionFn, soft_cap
from model.config import ModelConfig
from model.experts import ExpertMLP
from model.layers import GatedMLP, RMSNorm, RopeTable, product, rope_frequencies, rope_table, weight
from model.packed import Packed, packed_rows
from model.quantized import quantized_rows
from model.seams import ONE_DEVICE, ExpertsFn, LayerBody, LookUpFn, TokenTables
from model.stacked import scan_layers


class DecoderLayer(nnx.Module):
    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        self.attention_norm = _norm(config)
        self.attention = Attention(config, rngs)
        self.mlp_norm = _norm(config)
        self.mlp = ExpertMLP(config, rngs) if config.num_experts else GatedMLP(config, rngs)
        self.is_sandwich = config.sandwich_norms
        if config.sandwich_norms:
            self.attention_out_norm, self.mlp_out_norm = _norm(config), _norm(config)

    def __call__(
        self,
        x_TD: jax.Array,
        rope: RopeTable,
        attend: AttentionFn,
        cache: Any,
        layer: jax.Array,
        experts: ExpertsFn | None = None,
    ) -> tuple[jax.Array, Any]:
        attended_TD, cache = self.attention(self.attention_norm(x_TD), rope, attend, cache, layer)
        x_TD = x_TD + (self.attention_out_norm(attended_TD) if self.is_sandwich else attended_TD)
        x_TD = jax.lax.optimization_barrier(x_TD)  # or a TPU would add it up anew wherever it is read
        normed_TD = self.mlp_norm(x_TD)
        changed_TD = self.mlp(normed_TD, experts) if isinstance(self.mlp, ExpertMLP) else self.mlp(normed_TD)
        return x_TD + (self.mlp_out_norm(changed_TD) if self.is_sandwich else changed_TD), cache


def _norm(config: ModelConfig) -> RMSNorm:
    return RMSNorm(config.embed_dim, config.norm_eps, config.norm_offset)


class Embedding(nnx.Module):
    """Token vectors; with tied embeddings also the output head."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        shape = (config.vocab_size, config.embed_dim)
        self.embedding = weight(rngs, shape, (axes.VOCAB, axes.EMBED), inputs=(1,))
        self.scale = math.sqrt(config.embed_dim) if config.scale_embeddings else None

    def __call__(self, tokens_T: jax.Array, look_up: LookUpFn) -> jax.Array:
        x_TD = self._rows(tokens_T, look_up)
        return x_TD if self.scale is None else x_TD * self.scale

    def _rows(self, tokens_T: jax.Array, look_up: LookUpFn) -> jax.Array:
        table = self.embedding.get_value()
        if isinstance(table, Packed):
            return packed_rows(table, tokens_T)
        if isinstance(table, QArray):
            return quantized_rows(table, tokens_T, look_up)
        return look_up(table, tokens_T).astype(jnp.float32)

    def logits(self, x_RD: jax.Array) -> jax.Array:
        return product("RD,VD->RV", x_RD, self.embedding, is_exact=True)


class Head(nnx.Module):
    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        shape = (config.embed_dim, config.vocab_size)
        self.kernel = weight(rngs, shape, (axes.EMBED, axes.VOCAB), inputs=(0,))

    def __call__(self, x_RD: jax.Array) -> jax.Array:
        return product("RD,DV->RV", x_RD, self.kernel, is_exact=True)


class Decoder(nnx.Module):
    """Parameters as a nested dict are documented in `model.keys`, and `model.convert` fills them."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, *, stacked: bool = True) -> None:
        self.config = config
        self.seams = ONE_DEVICE
        self.embed = Embedding(config, rngs)
        self.layers: DecoderLayer | nnx.List[DecoderLayer] = (
            _stacked_layers(config, rngs)
            if stacked
            else nnx.List(DecoderLayer(config, rngs) for _ in range(config.num_layers))
        )
        self.final_norm = _norm(config)
        if not config.tie_embeddings:
            self.head = Head(config, rngs)

    def __call__(
        self,
        tokens_T: jax.Array,
        positions_T: jax.Array,
        attend: AttentionFn,
        cache: Any = None,
        rows_R: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """Logits of the tokens at `rows_R` (all of them by default) as float32[R, V], and the new cache."""
        x_TD, cache = self.hidden(tokens_T, positions_T, attend, cache)
        return self.logits(x_TD if rows_R is None else x_TD[rows_R]), cache

    def hidden(
        self,
        tokens_T: jax.Array,
        positions_T: jax.Array,
        attend: AttentionFn,
        cache: Any = None,
        adapters: StepAdapters | None = None,
    ) -> tuple[jax.Array, Any]:
        """What the last layer says of each token, float32[T, D], and the new cache.

        tokens_T, positions_T: int32[T], flat over all sequences of the step; `attend` knows which belong together.
        """
        config = self.config
        tables = _ropes(config, positions_T), None if adapters is None else adapters.number_T
        arrays = None if adapters is None else adapters.layers
        layer_def, states = self._layer_states()

        def body(carry: Any, state: Any, index: jax.Array, attend: AttentionFn, tables: TokenTables) -> Any:
            (x_TD, cache), (params, arrays), (ropes, number_T) = carry, state, tables
            layer = nnx.merge(layer_def, params)
            if adapters is not None and number_T is not None:
                adapt(layer, config, arrays, number_T, adapters.rank)
            x_TD, cache = layer(x_TD, _rope_of(config, ropes, index), attend, cache, index, self.seams.experts)
            return self.seams.rows(x_TD), cache

        x_TD = self.seams.rows(self.embed(tokens_T, self.seams.look_up))
        # or a TPU would widen it anew for the first norm, in code that takes its compiler three seconds
        carry = jax.lax.optimization_barrier(x_TD), cache
        if isinstance(states, list):
            traced_once = jax.jit(lambda carry, state, index: body(carry, state, index, attend, tables))
            for index, params in enumerate(states):
                here = jax.tree.map(lambda stacked, index=index: stacked[index], arrays)
                carry = traced_once(carry, (params, here), jnp.int32(index))
            return carry
        run = self.seams.layers or _scan
        return run(body, carry, (states, arrays), config.num_layers, attend, tables)

    def logits(self, x_RD: jax.Array) -> jax.Array:
        """float32[R, V] from rows of `hidden`."""
        x_RD = self.final_norm(x_RD)
        logits_RV = self.embed.logits(x_RD) if self.config.tie_embeddings else self.head(x_RD)
        if self.config.logits_scale != 1.0:
            logits_RV = logits_RV * self.config.logits_scale
        cap = self.config.logits_softcap
        return logits_RV if cap is None else soft_cap(logits_RV, cap)

    def _layer_states(self) -> tuple[Any, Any]:
        """What all layers are, and the parameters of each: a list, or stacked."""
        if not isinstance(self.layers, nnx.List):
            return nnx.split(self.layers)
        definitions, states = zip(*map(nnx.split, self.layers), strict=True)
        return definitions[0], list(states)


def _scan(body: LayerBody, carry: Any, states: Any, num_layers: int, attend: AttentionFn, tables: TokenTables) -> Any:
    """All layers one after another, compiled once."""

    def one_layer(carry: Any, state: Any, layer: jax.Array) -> Any:
        return body(carry, state, layer, attend, tables)

    with jax.named_scope("layers"):
        return scan_layers(one_layer, carry, states, num_layers)


def _ropes(config: ModelConfig, positions_T: jax.Array) -> RopeTable:
    """The rope table of all layers; where those with a window have their own, both, stacked."""
    table = rope_table(positions_T, rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling))
    if config.local_rope_theta is None or not config.windows:
        return table
    local = rope_table(positions_T, rope_frequencies(config.head_dim, config.local_rope_theta, None))
    return jax.tree.map(lambda *tables: jnp.stack(tables), table, local)


def _rope_of(config: ModelConfig, ropes: RopeTable, index: jax.Array) -> RopeTable:
    """The rope table of one layer."""
    if config.local_rope_theta is None or not config.windows:
        return ropes
    has_window = [window is not None for window in config.windows]
    chosen = jnp.asarray(has_window, jnp.int32)[index]
    return jax.tree.map(lambda tables: tables[chosen], ropes)


def _stacked_layers(config: ModelConfig, rngs: nnx.Rngs) -> DecoderLayer:
    """One DecoderLayer whose every parameter has a leading layer axis (its `logical_axes` do not name it)."""

    @nnx.split_rngs(splits=config.num_layers)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def make(rngs: nnx.Rngs) -> DecoderLayer:
        return DecoderLayer(config, rngs)

    return make(rngs)
