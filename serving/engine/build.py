"""Builds an engine from its config: card, mesh, weights, page pool, programs. Long, so it reports what it is doing."""

import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path

import jax

from kv.cache import abstract_cache, bytes_per_page, make_cache
from kv.page_pool import PagePool
from kv.paged_attention import DecodeKernel
from kv.page_table import pages_for
from model.card import ModelCard
from serving.config import EngineConfig
from serving.engine.api import EngineLoop
from serving.engine.batch import StepShape, step_shapes
from serving.engine.compile_count import CompileCount
from serving.engine.engine import Engine
from serving.engine.loop import EngineThread
from serving.engine.plan import Limits
from serving.engine.step import Programs, StepSpec
from serving.errors import ConfigError
from sharding import checkpoint
from sharding.mesh import make_mesh
from sharding.params import Params, abstract_params
from sharding.rules import ShardingRules, choose_rules
from sharding.spec import MeshSpec

Progress = Callable[[str], None]

KV_BYTES = 2 << 30  # default size of the page pool
TILE_TOKENS = 32
MIB = 1 << 20


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
        progress(note)
    mesh = make_mesh(spec)
    dtype = config.dtype or checkpoint.saved_dtype(config.checkpoint)
    weights = _load_weights(config, card, abstract_params(card.config, mesh, rules, dtype), progress)
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
    """The page pool's arrays and all compiled steps, over weights that are on the mesh already."""
    max_seq_len = _max_seq_len(config, card)
    num_pages = config.num_pages or _default_pages(config, card, max_seq_len, dtype)
    cache = make_cache(abstract_cache(card.config, num_pages + 1, config.page_size, dtype, mesh, rules))
    step_spec = StepSpec(
        config=card.config,
        mesh=mesh,
        num_slots=config.num_slots,
        pages_per_slot=pages_for(max_seq_len, config.page_size),
        tile_tokens=TILE_TOKENS,
        decode_kernel=_decode_kernel(mesh),
    )
    programs = Programs(step_spec, weights, cache)
    _compile(programs, step_shapes(config.num_slots, _max_tiles(config)), progress)
    return programs


def make_engine(config: EngineConfig, card: ModelCard, programs: Programs) -> Engine:
    """An engine with an empty pool over compiled programs."""
    return Engine(
        programs,
        PagePool(programs.num_pages),
        Limits(config.page_size, TILE_TOKENS, _max_tiles(config)),
        eos_token_ids=card.generation.eos_token_ids,
        max_seq_len=_max_seq_len(config, card),
        max_waiting=config.max_waiting,
        draw_seed=secrets.randbits,
        overlap=config.overlap,
        prefix_cache=config.prefix_cache,
    )


def _load_weights(config: EngineConfig, card: ModelCard, abstract: Params, progress: Progress) -> Params:
    started = time.monotonic()

    def report(done: int, total: int) -> None:
        rate = done / MIB / max(time.monotonic() - started, 1e-3)
        progress(f"loading {card.name}: {done // MIB:,} of {total // MIB:,} MiB, {rate:,.0f} MiB/s")

    progress(f"loading {card.name}: checking files")
    return checkpoint.load(config.checkpoint, abstract, on_progress=report)


def _compile(programs: Programs, shapes: tuple[StepShape, ...], progress: Progress) -> None:
    done: list[str] = []

    def report(shape: object) -> None:
        done.append(str(shape))
        progress(f"compiling: {len(done)} of {len(shapes)} programs, last {shape}")

    progress(f"compiling: 0 of {len(shapes)} programs")
    programs.compile(shapes, report, num_threads=os.cpu_count() or 1)


def _decode_kernel(mesh: jax.sharding.Mesh) -> DecodeKernel | None:
    """The CPU kernel sees whole arrays only: on a mesh of several devices, and elsewhere, attention is XLA's."""
    [platform] = {device.platform for device in mesh.devices.flat}
    if platform != "cpu" or mesh.size > 1:
        return None
    from kv import cpu_attention  # Numba takes a second to import, which no other platform should wait for

    cpu_attention.register()
    return cpu_attention.decode_attention


def _max_tiles(config: EngineConfig) -> int:
    return pages_for(config.chunk_tokens, TILE_TOKENS)


def _max_seq_len(config: EngineConfig, card: ModelCard) -> int:
    context = card.config.max_seq_len
    if config.max_seq_len is not None and config.max_seq_len > context:
        raise ConfigError(f"--max-seq-len {config.max_seq_len:,} is more than the model's context of {context:,}.")
    return config.max_seq_len or context


def _default_pages(config: EngineConfig, card: ModelCard, max_seq_len: int, dtype: str) -> int:
    """As many as all slots could fill, at most `KV_BYTES`, and at least one full sequence."""
    per_sequence = pages_for(max_seq_len, config.page_size)
    affordable = KV_BYTES // bytes_per_page(card.config, config.page_size, dtype)
    return max(per_sequence, min(per_sequence * config.num_slots, affordable))


def _use_compile_cache(folder: Path) -> None:
    """Keep compiled programs across starts; the default thresholds would leave the small ones out."""
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
