"""ShardingRules: which mesh axis each logical axis is split over, for one model on one mesh.

The default splits query heads, KV heads, the MLP and the vocabulary over `tensor` and keeps everything else whole
(Megatron's layout, Shoeybi et al. 2019, arXiv 1909.08053): two all-reduces per layer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from model import axes
from model.config import ModelConfig
from sharding.spec import MeshSpec


@dataclass(frozen=True, slots=True)
class ShardingRules:
    mesh_axis: Mapping[str, str | None]
    """One entry per logical axis of `model.axes`."""
    notes: tuple[str, ...] = ()
    """What could not be split and is replicated instead, for the operator."""

    def __post_init__(self) -> None:
        assert set(self.mesh_axis) == set(axes.ALL), "every logical axis needs a rule"

    def partition(self, logical_axes: Sequence[str]) -> PartitionSpec:
        """The PartitionSpec of an array with these axes. No mesh axis may be used twice."""
        names = [self.mesh_axis[axis] for axis in logical_axes]
        used = [name for name in names if name is not None]
        assert len(used) == len(set(used)), f"{logical_axes} would use a mesh axis twice: {used}"
        return PartitionSpec(*names)

    def sharding(self, mesh: Mesh, logical_axes: Sequence[str], shape: Sequence[int] | None = None) -> NamedSharding:
        """Where an array with these axes lies. With `shape`, an axis that does not divide is replicated: scales have
        the axes of their weights, but some are shorter."""
        spec = self.partition(logical_axes)
        if shape is not None:
            spec = PartitionSpec(
                *(
                    name if name is None or size % mesh.shape[name] == 0 else None
                    for name, size in zip(spec, shape, strict=True)
                )
            )
        return NamedSharding(mesh, spec)


def choose_rules(config: ModelConfig, spec: MeshSpec) -> ShardingRules:
    """Split what divides evenly, replicate the rest and say so.

    Query and KV heads are split together or not at all, so that a device holds the KV heads its queries read.
    """
    heads_fit = config.num_heads % spec.tensor == 0 and config.num_kv_heads % spec.tensor == 0
    fits = {
        axes.HEADS: heads_fit,
        axes.KV_HEADS: heads_fit,
        axes.MLP: config.mlp_dim % spec.tensor == 0,
        axes.VOCAB: config.vocab_size % spec.tensor == 0,
    }
    sizes = {
        axes.HEADS: f"{config.num_heads} query heads over {config.num_kv_heads} KV heads",
        axes.MLP: f"an MLP of {config.mlp_dim}",
        axes.VOCAB: f"a vocabulary of {config.vocab_size}",
    }
    notes = tuple(
        f"{sizes[axis]} cannot be split over tensor={spec.tensor} and is replicated"
        for axis, fit in fits.items()
        if not fit and axis in sizes
    )
    return ShardingRules({axis: "tensor" if fits.get(axis) else None for axis in axes.ALL}, notes)
