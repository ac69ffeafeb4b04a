"""ShardingRules: which mesh axes each logical axis is split over, for one model on one mesh.

Query heads, KV heads, the MLP and the vocabulary are split over `tensor` (Megatron's layout, Shoeybi et al. 2019, arXiv
1909.08053): two all-reduces per layer. Experts are split over `expert`, over which heads and vocabulary are split, too,
where they divide; layers over `stage`. Everything else is whole.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from model import axes
from model.config import ModelConfig
from sharding.spec import MeshSpec

MeshAxes = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ShardingRules:
    mesh_axes: Mapping[str, MeshAxes]
    """One entry per logical axis of `model.axes`; empty where it is whole."""
    notes: tuple[str, ...] = ()
    """What could not be split and is replicated instead, for the operator."""
    kv_copies: int = 1
    """Devices that hold the same KV head: the model is served as if it had so many times as many."""

    def __post_init__(self) -> None:
        assert set(self.mesh_axes) == set(axes.ALL), "every logical axis needs a rule"

    def partition(self, logical_axes: Sequence[str]) -> PartitionSpec:
        """The PartitionSpec of an array with these axes. No mesh axis may be used twice."""
        names = [self.mesh_axes[axis] for axis in logical_axes]
        used = [name for group in names for name in group]
        assert len(used) == len(set(used)), f"{logical_axes} would use a mesh axis twice: {used}"
        return PartitionSpec(*(group or None for group in names))

    def sharding(self, mesh: Mesh, logical_axes: Sequence[str], shape: Sequence[int] | None = None) -> NamedSharding:
        """Where an array with these axes lies. With `shape`, an axis that does not divide is replicated: scales have
        the axes of their weights, but some are shorter."""
        groups = [self.mesh_axes[axis] for axis in logical_axes]
        spec = self.partition(logical_axes)
        if shape is not None:
            fits = (
                size % prod(mesh.shape[name] for name in group) == 0 for size, group in zip(shape, groups, strict=True)
            )
            spec = PartitionSpec(*(group if fit and group else None for fit, group in zip(fits, groups, strict=True)))
        return NamedSharding(mesh, spec)

    def served(self, config: ModelConfig) -> ModelConfig:
        """The model as it lies on this mesh."""
        return replace(config, num_kv_heads=config.num_kv_heads * self.kv_copies)


def choose_rules(config: ModelConfig, spec: MeshSpec) -> ShardingRules:
    """Split what divides evenly, replicate the rest and say so.

    Query and KV heads are split together or not at all, so that a device holds the KV heads its queries read. Where
    there are more devices than KV heads, some hold the same one.
    """
    heads = _widest(spec, lambda width: kv_copies(config, width) > 0)
    copies = kv_copies(config, _width(spec, heads)) or 1
    vocab = _widest(spec, lambda width: config.vocab_size % width == 0)
    mlp = ("tensor",) if spec.tensor > 1 and config.mlp_dim % spec.tensor == 0 else ()
    split: dict[str, MeshAxes] = {
        axes.HEADS: heads,
        axes.KV_HEADS: heads,
        axes.MLP: mlp,
        axes.VOCAB: vocab,
        axes.EXPERTS: ("expert",) if spec.expert > 1 and config.num_experts else (),
        axes.LAYERS: ("stage",) if spec.stage > 1 else (),
    }
    what = {
        f"{config.num_heads} query heads over {config.num_kv_heads} KV heads": heads,
        f"an MLP of {config.mlp_dim}": mlp,
        f"a vocabulary of {config.vocab_size}": vocab,
    }
    notes = [f"{name} cannot be split over tensor={spec.tensor} and is replicated" for name, group in what.items()
             if spec.tensor > 1 and "tensor" not in group]  # fmt: skip
    if copies > 1:
        notes.append(
            f"each of {config.num_kv_heads} KV heads lies on {copies} devices, with as many copies of its pages: there "
            f"are fewer of them than devices that share out the {config.num_heads} query heads"
        )
    if spec.data > 1:
        notes.append(
            f"rows are shared out over data={spec.data}, but every one of these devices keeps all weights and pages; "
            "several replicas serve more"
        )
    if spec.stage > 1:
        notes.append(f"{spec.stage} stages work one after another: they give room, and make no step shorter")
    return ShardingRules({axis: split.get(axis, ()) for axis in axes.ALL}, tuple(notes), copies)


def kv_copies(config: ModelConfig, width: int) -> int:
    """How many of `width` devices that share out the query heads hold the same KV head; 0 if it cannot be done."""
    heads, groups = config.num_heads, config.num_kv_heads
    if heads % width:
        return 0
    if groups % width == 0:
        return 1
    return width // groups if width % groups == 0 else 0


def _widest(spec: MeshSpec, fits: Callable[[int], bool]) -> MeshAxes:
    """The mesh axes over which something can be split, the more the better."""
    for group in (("expert", "tensor"), ("tensor",)):
        if _width(spec, group) > 1 and fits(_width(spec, group)):
            return tuple(axis for axis in group if getattr(spec, axis) > 1)
    return ()


def _width(spec: MeshSpec, group: MeshAxes) -> int:
    return prod(getattr(spec, axis) for axis in group)
