"""LoadedModel: a model whose weights are on the mesh, and the forms in which programs take it."""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from kv.attention_check import AttentionNeeds
from kv.backends import AttentionBackend, choose_attention, make_backend
from kv.cache import KVCache
from kv.layer_sets import LayerSets, choose_sets
from kv.page_table import pages_for
from model import axes, packed
from model.card import ModelCard
from model.config import ModelConfig
from model.quantization import Quantization, choose_quantization
from model.seams import Seams
from model.tree import Names, Params, as_tree
from serving.config import EngineConfig
from serving.engine.memory import MIB
from sharding.kv_heads import repeat_kv_heads, unrepeated
from sharding.layouts import as_matrices
from sharding.params import abstract_params, pack_int8, pack_onto, take_layers_apart
from sharding.quantize import quantize_onto
from sharding.rules import ShardingRules, choose_rules
from sharding.seams import STAGE, seams_over
from sharding.sizes import device_bytes
from sharding.spec import MeshSpec
from sharding.stored_model import StoredModel

logger = logging.getLogger(__name__)

Progress = Callable[[str], None]
Leaves = Iterator[tuple[Names, jax.Array]]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    card: ModelCard
    mesh: Mesh
    rules: ShardingRules
    dtype: str
    """Type of the weights' float numbers."""
    weights: Params

    @classmethod
    def load(
        cls, config: EngineConfig, stored: StoredModel, spec: MeshSpec, mesh: Mesh, progress: Progress
    ) -> "LoadedModel":
        """The model of `config.checkpoint`, which `stored` is, on a mesh that `spec` describes. Raises CheckpointError
        or QuantizationError."""
        rules = choose_rules(stored.card.config, spec)
        for note in rules.notes:
            logger.warning("mesh %s: %s", spec, note)
        card = replace(stored.card, config=rules.served(stored.card.config))
        dtype = config.dtype or stored.dtype
        return cls(card, mesh, rules, dtype, load_weights(config, stored, mesh, rules, dtype, progress))

    @property
    def num_bytes(self) -> int:
        """Of the weights, on one device."""
        return device_bytes(self.weights)

    def kv_dtype(self, config: EngineConfig) -> str:
        return config.kv_dtype or self.dtype

    def sets(self, config: EngineConfig) -> LayerSets | None:
        """Of its layers, where they do not have all pages in common. Beside a draft model they do, since its pages have
        the same numbers."""
        if config.draft is not None:
            return None
        model = self.card.config
        max_tokens = min(config.max_seq_len or model.max_seq_len, model.max_seq_len)
        return choose_sets(model.windows, max_tokens, config.page_size, self.num_stages)

    @property
    def num_stages(self) -> int:
        return int(self.mesh.shape[STAGE])

    @property
    def seams(self) -> Seams:
        return seams_over(self.mesh, self.rules.mesh_axes[axes.VOCAB])

    def pages(self, count: int, config: EngineConfig) -> KVCache:
        """Abstract arrays of so many KV pages and the null page."""
        sets, shape = self.sets(config), (count + 1, config.page_size)
        return self.attention(config).abstract_cache(
            self.card.config,
            *shape,
            self.kv_dtype(config),
            self.dtype,
            None if sets is None else sets.size * self.num_stages,
        )

    def page_bytes(self, config: EngineConfig) -> int:
        """Of one page, on one device: of all layers, or of those of one set."""
        return device_bytes(self.pages(1, config)) // 2

    def forms(self) -> tuple[Params, Params]:
        """The weights as prefill programs and as decode programs take them, in one memory. On a TPU this model's own
        are given up.

        Those of int4, which are not packed, have arrays of their own for each layer in decode on one CPU: no slice is
        copied in every step. Prefill keeps to stacked ones: it has work enough for a copy to matter little, and
        compiles in a fraction of the time. But not with bfloat16 scales, of which XLA would widen all layers at once.
        """
        if self.mesh.devices.flat[0].platform == "tpu":
            laid = as_matrices(self.weights, self.card.config)
            return laid, laid
        if not is_one_cpu(self.mesh) or _are_packed(self.weights):
            return self.weights, self.weights
        apart = take_layers_apart(self.weights)
        is_small = any(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(self.weights["layers"]))
        return (apart if is_small else self.weights), apart

    def attention(self, config: EngineConfig) -> AttentionBackend:
        kv_dtype = self.kv_dtype(config)
        return make_backend(attention_name(config, self.mesh, kv_dtype), kv_dtype, self.mesh, self.rules)


def attention_name(config: EngineConfig, mesh: Mesh, kv_dtype: str) -> str:
    """Of the backend that `config` asks for, or the fastest for the mesh."""
    return config.attention or choose_attention(mesh.devices.flat[0].platform, mesh.size, kv_dtype)


def attention_needs(
    config: EngineConfig, model: ModelConfig, mesh: Mesh, rules: ShardingRules, dtype: str, max_seq_len: int
) -> tuple[str, AttentionNeeds]:
    """What `kv.attention_check.check_attention` is asked; `dtype` is that of the weights' floats."""
    kv_dtype = config.kv_dtype or dtype
    spec = rules.partition((axes.KV_HEADS,))
    needs = AttentionNeeds(
        config=model,
        platform=mesh.devices.flat[0].platform,
        num_devices=mesh.size,
        kv_shards=model.num_kv_heads // NamedSharding(mesh, spec).shard_shape((model.num_kv_heads,))[0],
        kv_dtype=kv_dtype,
        page_size=config.page_size,
        pages_per_slot=pages_for(max_seq_len, config.page_size),
        num_slots=config.num_slots,
    )
    return attention_name(config, mesh, kv_dtype), needs


def load_weights(
    config: EngineConfig, stored: StoredModel, mesh: Mesh, rules: ShardingRules, dtype: str, progress: Progress
) -> Params:
    """The weights on the mesh as they lie in the checkpoint, or quantised one after another on their way."""
    saved, served = stored.card.config, rules.served(stored.card.config)
    started = time.monotonic()

    def report(done: int, total: int) -> None:
        rate = done / MIB / max(time.monotonic() - started, 1e-3)
        progress(f"loading {stored.card.name}: {done // MIB:,} of {total // MIB:,} MiB, {rate:,.0f} MiB/s")

    quantization = choose_quantization(config.quantize, stored.card.quantization)
    abstract = abstract_params(served, mesh, rules, dtype, quantization)
    progress(f"loading {stored.card.name}: checking files")

    def leaves(wanted: Params, dtype: str, quantization: Quantization | None = None) -> Leaves:
        if rules.kv_copies == 1:
            return stored.leaves(wanted, report)
        alike = abstract_params(saved, mesh, rules, dtype, quantization)
        return repeat_kv_heads(stored.leaves(unrepeated(wanted, alike, mesh), report), wanted, rules.kv_copies)

    if quantization is None and is_one_cpu(mesh) and dtype in packed.DTYPES:
        packed.register(dtype)
        return pack_onto(leaves(abstract, dtype), served)
    if quantization is None or stored.card.quantization is not None:
        weights = as_tree(leaves(abstract, dtype, quantization))
    else:
        floats = abstract_params(served, mesh, rules, stored.dtype)
        weights = quantize_onto(abstract, leaves(floats, stored.dtype), served, quantization)
    if str(quantization) == "int8" and is_one_cpu(mesh):
        packed.register("int8")
        return pack_int8(weights, served)
    return weights


def is_one_cpu(mesh: Mesh) -> bool:
    """Where the CPU's kernels run: they see whole arrays only."""
    return bool(mesh.size == 1 and mesh.devices.flat[0].platform == "cpu")


def _are_packed(weights: Params) -> bool:
    leaves = jax.tree.leaves(weights, is_leaf=lambda leaf: isinstance(leaf, packed.Packed))
    return any(isinstance(leaf, packed.Packed) for leaf in leaves)
