"""Builds an engine from its config: card, mesh, weights, page pool, programs. Long, so it reports what it is doing."""

import logging
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp

from kv import cpu_attention
from kv.cache import KVCache, abstract_cache, make_cache
from kv.page_pool import PagePool
from kv.page_table import pages_for
from kv.paged_attention import DecodeKernel
from model import packed
from model.card import ModelCard
from model.quantization import choose_quantization
from model.tree import Params
from serving.config import EngineConfig
from serving.engine.api import EngineLoop
from serving.engine.batch import StepShape, step_shapes
from serving.engine.compile_count import CompileCount
from serving.engine.engine import Engine
from serving.engine.format_notes import format_notes
from serving.engine.loop import EngineThread
from serving.engine.memory import MIB, Needs, plan_memory
from serving.engine.plan import Limits
from serving.engine.programs import Programs
from serving.engine.step import StepSpec
from serving.errors import ConfigError
from sharding import checkpoint
from sharding.mesh import make_mesh
from sharding.params import abstract_params, pack_int8, pack_onto, take_layers_apart
from sharding.quantize import quantize_onto
from sharding.rules import ShardingRules, choose_rules
from sharding.sizes import device_bytes
from sharding.spec import MeshSpec

logger = logging.getLogger(__name__)

Progress = Callable[[str], None]

KV_BYTES = 1 << 30  # page pool where no memory limit is known
TILE_TOKENS = 32


def build_engine(config: EngineConfig, progress: Progress) -> tuple[EngineLoop, ModelCard]:
    """Load the checkpoint onto the mesh and compile every step shape; the engine is then ready to `start`.

    Raises CheckpointError, MeshError or ConfigError with what is wrong, before anything expensive where possible.
    """
    compiles = CompileCount()
    if config.compile_cache is not None:
        _use_compile_cache(Path(config.compile_cache))
    spec = MeshSpec.parse(config.mesh)
    card = checkpoint.read_card(config.checkpoint)
    rules = choose_rules(card.config, spec)
    for note in rules.notes:
        logger.warning("mesh %s: %s", spec, note)
    mesh = make_mesh(spec)
    dtype = config.dtype or checkpoint.saved_dtype(config.checkpoint)
    quantization = choose_quantization(config.quantize, card.quantization)
    platform = mesh.devices.flat[0].platform
    for note in format_notes(platform, quantization, config.kv_dtype or dtype, dtype, card.config.num_experts):
        logger.warning("%s", note)
    weights = load_weights(config, card, mesh, rules, dtype, progress)
    programs = make_programs(config, card, weights, mesh, rules, dtype, progress)
    compiles.mark_ready()
    crash_folder = Path(config.crash_folder) if config.crash_folder else None
    return EngineThread(make_engine(config, card, programs), compiles.after_ready, crash_folder), card


def make_programs(
    config: EngineConfig,
    card: ModelCard,
    weights: Params,
    mesh: jax.sharding.Mesh,
    rules: ShardingRules,
    dtype: str,
    progress: Progress,
) -> Programs:
    """The page pool's arrays and all compiled steps, over weights that are on the mesh already; `dtype` is the type of
    their float numbers."""
    kv_dtype = config.kv_dtype or dtype
    spec = StepSpec(
        config=card.config,
        mesh=mesh,
        num_slots=config.num_slots,
        pages_per_slot=pages_for(_max_seq_len(config, card), config.page_size),
        tile_tokens=TILE_TOKENS,
        decode_kernel=_decode_kernel(mesh, kv_dtype),
        max_trips=config.decode_steps,
    )
    forms = _forms(weights, mesh)
    shapes = step_shapes(config.num_slots, _max_tiles(config), config.max_drafts)

    def pages(count: int) -> KVCache:
        num_pages = count + 1  # the null page
        return abstract_cache(card.config, num_pages, config.page_size, kv_dtype, mesh, rules, widened=dtype)

    page_bytes = device_bytes(pages(1)) // 2
    limit = config.memory_bytes or _device_limit(mesh)
    if limit is None:
        num_pages = config.num_pages or _default_pages(spec, page_bytes)
    else:
        progress("compiling the largest step, to see what memory it needs")
        by_size = sorted(shapes, key=lambda shape: (shape.num_tokens + shape.tiles * TILE_TOKENS, shape))
        largest = {bool(shape.drafts): shape for shape in by_size}  # which of the two is hungrier, XLA says
        tried = Programs(spec, pages(spec.pages_per_slot), *forms)
        temporaries = max(tried.temporaries(shape) for shape in largest.values())
        needs = Needs(device_bytes(weights), temporaries, page_bytes, *_useful_pages(spec))
        budget = plan_memory(limit, needs, config.page_size, config.num_pages)
        num_pages = budget.num_pages
        for line in budget.lines():
            progress(line)
            logger.info("%s", line)
    programs = Programs(spec, make_cache(pages(num_pages)), *forms)
    _compile(programs, shapes, progress)
    return programs


def make_engine(config: EngineConfig, card: ModelCard, programs: Programs) -> Engine:
    """An engine with an empty pool over compiled programs."""
    return Engine(
        programs,
        PagePool(programs.num_pages),
        Limits(
            config.page_size,
            TILE_TOKENS,
            _max_tiles(config),
            max_trips=config.decode_steps,
            max_drafts=config.max_drafts,
        ),
        eos_token_ids=card.generation.eos_token_ids,
        max_seq_len=_max_seq_len(config, card),
        max_waiting=config.max_waiting,
        draw_seed=secrets.randbits,
        overlap=config.overlap,
        prefix_cache=config.prefix_cache,
    )


def load_weights(
    config: EngineConfig, card: ModelCard, mesh: jax.sharding.Mesh, rules: ShardingRules, dtype: str, progress: Progress
) -> Params:
    """The weights on the mesh as they lie in the checkpoint, or quantised one after another on their way."""
    started = time.monotonic()

    def report(done: int, total: int) -> None:
        rate = done / MIB / max(time.monotonic() - started, 1e-3)
        progress(f"loading {card.name}: {done // MIB:,} of {total // MIB:,} MiB, {rate:,.0f} MiB/s")

    quantization = choose_quantization(config.quantize, card.quantization)
    abstract = abstract_params(card.config, mesh, rules, dtype, quantization)
    progress(f"loading {card.name}: checking files")
    if quantization is None and is_one_cpu(mesh) and dtype in packed.DTYPES:
        packed.register(dtype)
        return pack_onto(checkpoint.load_leaves(config.checkpoint, abstract, on_progress=report), card.config)
    if quantization is None or card.quantization is not None:
        weights = checkpoint.load(config.checkpoint, abstract, on_progress=report)
    else:
        floats = abstract_params(card.config, mesh, rules, checkpoint.saved_dtype(config.checkpoint))
        leaves = checkpoint.load_leaves(config.checkpoint, floats, on_progress=report)
        weights = quantize_onto(abstract, leaves, card.config, quantization)
    if str(quantization) == "int8" and is_one_cpu(mesh):
        packed.register("int8")
        return pack_int8(weights, card.config)
    return weights


def _forms(weights: Params, mesh: jax.sharding.Mesh) -> tuple[Params, Params]:
    """The weights as prefill programs and as decode programs take them, in one memory.

    Those of int4, which are not packed, have arrays of their own for each layer in decode on one CPU: no slice is
    copied in every step. Prefill keeps to stacked ones: it has work enough for a copy to matter little, and compiles in
    a fraction of the time. But not with bfloat16 scales, of which XLA would widen all layers at once.
    """
    if not is_one_cpu(mesh) or _are_packed(weights):
        return weights, weights
    apart = take_layers_apart(weights)
    is_small = any(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(weights["layers"]))
    return (apart if is_small else weights), apart


def is_one_cpu(mesh: jax.sharding.Mesh) -> bool:
    """Where the CPU's kernels run: they see whole arrays only."""
    return bool(mesh.size == 1 and mesh.devices.flat[0].platform == "cpu")


def _are_packed(weights: Params) -> bool:
    leaves = jax.tree.leaves(weights, is_leaf=lambda leaf: isinstance(leaf, packed.Packed))
    return any(isinstance(leaf, packed.Packed) for leaf in leaves)


def _compile(programs: Programs, shapes: tuple[StepShape, ...], progress: Progress) -> None:
    done: list[str] = []

    def report(shape: object) -> None:
        done.append(str(shape))
        progress(f"compiling: {len(done)} of {len(shapes)} programs, last {shape}")

    progress(f"compiling: 0 of {len(shapes)} programs")
    programs.compile(shapes, report, num_threads=os.cpu_count() or 1)


def _decode_kernel(mesh: jax.sharding.Mesh, dtype: str) -> DecodeKernel | None:
    if not is_one_cpu(mesh) or dtype not in cpu_attention.DTYPES:
        return None
    cpu_attention.register(dtype)
    return cpu_attention.decode_attention


def _max_tiles(config: EngineConfig) -> int:
    return pages_for(config.chunk_tokens, TILE_TOKENS)


def _max_seq_len(config: EngineConfig, card: ModelCard) -> int:
    context = card.config.max_seq_len
    if config.max_seq_len is not None and config.max_seq_len > context:
        raise ConfigError(f"--max-seq-len {config.max_seq_len:,} is more than the model's context of {context:,}.")
    return config.max_seq_len or context


def _useful_pages(spec: StepSpec) -> tuple[int, int]:
    """Pages of one full sequence, and of all slots full."""
    return spec.pages_per_slot, spec.pages_per_slot * spec.num_slots


def _default_pages(spec: StepSpec, page_bytes: int) -> int:
    """Where nothing says how much memory there is: what is useful, at most `KV_BYTES`, at least one full sequence."""
    least, most = _useful_pages(spec)
    return max(least, min(most, KV_BYTES // page_bytes))


def _device_limit(mesh: jax.sharding.Mesh) -> int | None:
    """Bytes of memory that one device lets us use; None where devices share the host's memory."""
    stats = mesh.devices.flat[0].memory_stats()
    return stats.get("bytes_limit") if stats else None


def _use_compile_cache(folder: Path) -> None:
    """Keep compiled programs across starts; the default thresholds would leave the small ones out."""
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
