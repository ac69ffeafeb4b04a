"""Seams over a mesh: layers that run stage after stage, experts and tokens that lie apart, rows that are shared out."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from model.attention import AttentionFn, Window
from model.experts import num_experts_of, run_experts
from model.seams import ExpertsFn, LayerBody, LayersFn, LookUpFn, Seams, StagedAttention, TokenTables
from model.stacked import Stacked, scan_layers

DATA, STAGE, EXPERT, TENSOR = "data", "stage", "expert", "tensor"
ROWS_AT_ONCE = 32  # of a table: for 256 of two bytes a TPU's compiler takes ten times as long, and two seconds


def seams_over(mesh: Mesh, vocab_axes: Sequence[str]) -> Seams:
    """Of a mesh with the axes of `sharding.spec`; `vocab_axes` are those over which the vocabulary is split."""
    sizes = dict(mesh.shape)
    seams = Seams(
        layers=_layers_in_stages(mesh) if sizes[STAGE] > 1 else None,
        experts=_experts_apart(mesh) if sizes[EXPERT] * sizes[TENSOR] > 1 else None,
        **({"rows": _rows_over(mesh)} if sizes[DATA] > 1 else {}),
    )
    is_cpu = mesh.devices.flat[0].platform == "cpu"
    return seams if is_cpu else replace(seams, look_up=looked_up_apart(mesh, vocab_axes))


def _rows_over(mesh: Mesh) -> Any:
    num = mesh.shape[DATA]

    def rows(x: jax.Array) -> jax.Array:
        """Few rows that cannot be shared out evenly are computed by every device."""
        if x.shape[0] % num or jax.sharding.get_abstract_mesh().manual_axes:
            return x
        unsaid = [PartitionSpec.UNCONSTRAINED] * (x.ndim - 1)
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(DATA, *unsaid)))

    return rows


def looked_up_apart(mesh: Mesh, vocab_axes: Sequence[str]) -> LookUpFn:
    """Each device looks up the tokens of its part, some at once, and all of them are added up over devices."""
    axes = tuple(vocab_axes)

    def look_up(table_VD: jax.Array, tokens_T: jax.Array) -> jax.Array:
        if not axes:
            return _rows_by_turns(table_VD, tokens_T)

        def here(part_VD: jax.Array, tokens_T: jax.Array) -> jax.Array:
            num_here = part_VD.shape[0]
            local_T = tokens_T - jax.lax.axis_index(axes) * num_here
            is_here_T = (local_T >= 0) & (local_T < num_here)
            rows_TD = _rows_by_turns(part_VD, jnp.clip(local_T, 0, num_here - 1))
            return jax.lax.psum(jnp.where(is_here_T[:, None], rows_TD, 0), axes)

        whole, split = PartitionSpec(), PartitionSpec(axes)
        run = jax.shard_map(
            here, mesh=mesh, in_specs=(split, whole), out_specs=whole, axis_names={*axes}, check_vma=False
        )
        return run(table_VD, tokens_T)

    return look_up


def _rows_by_turns(table_VD: jax.Array, tokens_T: jax.Array) -> jax.Array:
    T = tokens_T.shape[0]
    if T <= ROWS_AT_ONCE or T % ROWS_AT_ONCE:
        return table_VD[tokens_T]
    rows_SQD = jax.lax.map(lambda tokens_Q: table_VD[tokens_Q], tokens_T.reshape(-1, ROWS_AT_ONCE))
    return rows_SQD.reshape(T, -1)


def _layers_in_stages(mesh: Mesh) -> LayersFn:
    """Each stage holds its layers and their pages. All stages run at once what they hold, but only one of them has the
    tokens; the others' results are dropped, and they store nothing. Then the tokens go on to the next stage.

    So a step takes as long as on one stage with all layers: what is gained is room. Only the tokens' vectors travel.
    """
    num_stages = mesh.shape[STAGE]
    ring = [(stage, (stage + 1) % num_stages) for stage in range(num_stages)]

    def layers(
        body: LayerBody, carry: Any, states: Any, num_layers: int, attend: AttentionFn, tables: TokenTables
    ) -> Any:
        per_stage = num_layers // num_stages

        def here(x_TD: jax.Array, cache: Any, states: Any, attend: AttentionFn, tables: TokenTables) -> Any:
            stage = jax.lax.axis_index(STAGE)
            first = stage * per_stage

            def hop(turn: jax.Array, carry: Any) -> Any:
                is_turn = stage == turn

                live = cast(StagedAttention, attend).only_if(is_turn)

                def attend_here(
                    q_TNH: jax.Array,
                    k_TKH: jax.Array,
                    v_TKH: jax.Array,
                    cache: Any,
                    layer: jax.Array,
                    *,
                    window: Window = None,
                    softcap: float | None = None,
                ) -> tuple[jax.Array, Any]:
                    return live(q_TNH, k_TKH, v_TKH, cache, layer - first, window=window, softcap=softcap)

                def one(carry: Any, state: Any, offset: jax.Array) -> Any:
                    return body(carry, state, first + offset, attend_here, tables)

                x_TD, _ = carry
                changed_TD, cache = scan_layers(one, carry, states, per_stage)
                x_TD = jnp.where(is_turn, changed_TD, x_TD)
                return jax.lax.ppermute(x_TD, STAGE, ring), cache

            x_TD, cache = jax.lax.fori_loop(0, num_stages, hop, (x_TD, cache))
            # The last stage has sent them to the first, which tells all.
            return jax.lax.psum(jnp.where(stage == 0, x_TD, 0.0), STAGE), cache

        whole, staged = PartitionSpec(), PartitionSpec(STAGE)
        run = jax.shard_map(
            here,
            mesh=mesh,
            in_specs=(whole, staged, staged, whole, whole),
            out_specs=(whole, staged),
            axis_names={STAGE},
            check_vma=False,
        )
        x_TD, cache = carry
        return run(x_TD, cache, states, attend, tables)

    return layers


def _experts_apart(mesh: Mesh) -> ExpertsFn:
    """Each device computes its tokens with its part of those experts that it holds; what experts say is added up over
    devices, once for each token."""

    def experts(
        x_TD: jax.Array, experts_TE: jax.Array, shares_TE: jax.Array, gate_up: Any, down: Any, activation: str
    ) -> jax.Array:
        tensor = TENSOR if _can_split_mlp(gate_up, down, mesh.shape[TENSOR]) else None
        axes = (EXPERT, TENSOR) if tensor else (EXPERT,)
        summed = jnp.float32 if mesh.devices.flat[0].platform == "cpu" else down.dtype  # as `model.einsum` adds up

        def here(x_TD: jax.Array, experts_TE: jax.Array, shares_TE: jax.Array, gate_up: Any, down: Any) -> jax.Array:
            num_here = num_experts_of(down)
            local_TE = experts_TE - jax.lax.axis_index(EXPERT) * num_here
            is_here_TE = (local_TE >= 0) & (local_TE < num_here)
            # Rows of other devices' experts are sorted behind all others and belong to none.
            local_TE = jnp.where(is_here_TE, local_TE, num_here)
            shares_TE = jnp.where(is_here_TE, shares_TE, 0.0)
            said_TD = run_experts(x_TD, local_TE, shares_TE, gate_up, down, activation)
            return jax.lax.psum(said_TD.astype(summed), axes).astype(jnp.float32)

        rows = PartitionSpec(DATA if x_TD.shape[0] % mesh.shape[DATA] == 0 else None)
        is_staged = bool(jax.sharding.get_abstract_mesh().manual_axes)
        run = jax.shard_map(
            here,
            mesh=None if is_staged else mesh,
            in_specs=(rows, rows, rows, _gate_up_specs(gate_up, tensor), _down_specs(down, tensor)),
            out_specs=rows,
            axis_names={DATA, EXPERT, TENSOR} if is_staged else set(mesh.axis_names),
            check_vma=False,
        )
        return run(x_TD, experts_TE, shares_TE, gate_up, down)

    return experts


def _gate_up_specs(gate_up: Any, tensor: str | None) -> Any:
    """Of the weight as `model.experts.run_experts` takes it: its outputs are split."""
    if isinstance(gate_up, Stacked):
        return _stacked_specs(gate_up, tensor, tensor)
    return jax.tree.map(lambda leaf: _spec(leaf, (EXPERT, None, None, tensor)), gate_up)


def _down_specs(down: Any, tensor: str | None) -> Any:
    """Its inputs are split."""
    if isinstance(down, Stacked):
        return _stacked_specs(down, tensor, None)
    return jax.tree.map(lambda leaf: _spec(leaf, (EXPERT, tensor, None)), down)


def _stacked_specs(weight: Stacked, tensor: str | None, of_scale: str | None) -> Any:
    """The axis before the last is split: outputs of a pair of matrices, inputs of one (see `Stacked`)."""
    specs: dict[str, Any] = {"matrices_LZCOI": PartitionSpec(None, EXPERT, None, tensor), "layer": PartitionSpec()}
    if weight.scale_LZC1O is not None:
        specs["scale_LZC1O"] = PartitionSpec(None, EXPERT, None, None, of_scale)
    return replace(weight, **specs)


def _can_split_mlp(gate_up: Any, down: Any, num: int) -> bool:
    """Whether numbers and scales can be split at the same places."""
    if isinstance(down, Stacked):
        widths = [down.matrices_LZCOI.shape[3]]
    else:
        widths = [x.shape[3] for x in jax.tree.leaves(gate_up)] + [x.shape[1] for x in jax.tree.leaves(down)]
    return num > 1 and all(width == 1 or width % num == 0 for width in widths)


def _spec(leaf: jax.Array, names: tuple[str | None, ...]) -> PartitionSpec:
    return PartitionSpec(*(None if size == 1 else name for name, size in zip(names, leaf.shape, strict=True)))
