"""The program of one StepShape, compiled. All arrays may be abstract, on devices that are not here."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from kv.cache import KVCache
from model.tree import Params
from serving.engine.batch import StepShape
from serving.engine.device_arrays import FlatWeights
from serving.engine.executables import Executables
from serving.engine.masks import num_words
from serving.engine.slot_state import SlotState, empty_slots
from serving.engine.step import StepSpec, make_step

StepState = tuple[KVCache, jax.Array, SlotState]
"""What each step takes and leaves: pages, the newest token of each slot and of the scrap slot, the sampler's state."""


def abstract_state(spec: StepSpec, cache: KVCache) -> StepState:
    """ShapeDtypeStructs with their shardings, beside `cache`, which may be abstract, too."""
    last_token_B = jax.ShapeDtypeStruct((spec.num_slots + 1,), jnp.int32, sharding=spec.whole)
    slots = jax.eval_shape(lambda: empty_slots(spec.num_slots + 1, spec.config.vocab_size))
    placed = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), slots, slot_shardings(spec)
    )
    return cache, last_token_B, placed  # type: ignore[return-value]


def slot_shardings(spec: StepSpec) -> SlotState:
    """Counts lie where the logits of their tokens are computed."""
    counts = NamedSharding(spec.mesh, PartitionSpec(None, spec.vocab_axes or None))
    return SlotState(counts, spec.whole)  # type: ignore[arg-type]


def compile_step(
    executables: Executables,
    spec: StepSpec,
    shape: StepShape,
    weights: FlatWeights,
    state: StepState,
    draft_weights: FlatWeights | None = None,
    draft_cache: KVCache | None = None,
    adapters: Params | None = None,
) -> jax.stages.Compiled:
    """The step of one shape, with the arguments of `step.make_step`; what it takes of the state is donated. The draft
    model's weights and cache are for shapes that check its guesses; `adapters` are those of an AdapterBank."""
    draft_treedef = None if draft_weights is None else draft_weights.treedef
    step = make_step(spec, shape, weights.treedef, draft_treedef)
    whole = spec.whole
    cache_shardings, draft_shardings = jax.tree.map(_sharding, (state[0], draft_cache))
    out_shardings = (whole, whole, cache_shardings, whole, slot_shardings(spec), draft_shardings)
    jitted = jax.jit(step, donate_argnums=(1, 2, 3, 7), out_shardings=out_shardings)
    packed = jax.ShapeDtypeStruct((spec.layout(shape).size,), jnp.int32, sharding=whole)
    masks = jax.ShapeDtypeStruct((shape.rows, num_words(spec.config.vocab_size)), jnp.int32, sharding=whole)
    draft_leaves = () if draft_weights is None else draft_weights.leaves
    args = weights.leaves, *state, packed, masks, draft_leaves, draft_cache, adapters
    return executables.compiled(jitted, args, spec, shape, str(weights.treedef), str(draft_treedef))


def _sharding(leaf: Any) -> Any:
    return leaf.sharding
