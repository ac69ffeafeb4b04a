"""Builds an engine from its config: card, mesh, weights, page pool, programs. Long, so it reports what it is doing."""

import logging
import secrets
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
from jax.sharding import Mesh

from kv.attention_check import check_attention
from kv.cache import KVCache, make_cache
from kv.page_pool import PagePool
from kv.page_table import pages_for
from model import axes
from model.card import ModelCard
from model.config import ModelConfig
from model.quantization import choose_quantization
from serving.config import EngineConfig
from serving.engine.adapter_bank import AdapterBank, AdapterForm
from serving.engine.api import EngineLoop
from serving.engine.batch import Ladder, StepShape, step_shapes
from serving.engine.compile_count import CompileCount
from serving.engine.draft_check import check_draft
from serving.engine.draft_programs import DraftPrograms
from serving.engine.draft_step import DraftSpec
from serving.engine.engine import Engine
from serving.engine.executables import Executables, num_compile_threads
from serving.engine.format_notes import format_notes
from serving.engine.inputs import Peers
from serving.engine.loaded_model import LoadedModel, Progress, attention_needs
from serving.engine.loop import EngineThread
from serving.engine.page_room import check_host_cache, num_host_pages, num_pages
from serving.engine.plan import Limits
from serving.engine.pooling import Pooling
from serving.engine.programs import Programs
from serving.engine.step import StepSpec
from serving.engine.useful_pages import sets_notes
from serving.errors import ConfigError
from sharding import heap
from sharding.choose_mesh import check_spec, choose_spec
from sharding.hosts import check_hosts, only_one_step_at_a_time
from sharding.mesh import make_mesh
from sharding.rules import ShardingRules, choose_rules
from sharding.spec import AUTO
from sharding.stored_model import StoredModel

logger = logging.getLogger(__name__)

TILE_TOKENS = 32


def build_engine(config: EngineConfig, progress: Progress, peers: Peers | None = None) -> tuple[EngineLoop, ModelCard]:
    """Load the checkpoint onto the mesh and compile every step shape; the engine is then ready to `start`. `peers` are
    the other hosts of the mesh, to be told every step.

    Raises CheckpointError, MeshError, ConfigError or AttentionError with what is wrong, before anything expensive where
    possible.
    """
    compiles = CompileCount()
    engine, card = load_engine(config, progress)
    compiles.mark_ready()
    crash_folder = Path(config.crash_folder) if config.crash_folder else None
    return EngineThread(engine, compiles.after_ready, crash_folder, peers), card


def load_engine(config: EngineConfig, progress: Progress) -> tuple[Engine, ModelCard]:
    """What `build_engine` gives, without its thread: hosts that follow another have none."""
    if config.compile_cache is not None:
        _use_compile_cache(config.compile_cache)
    stored = StoredModel.open(config.checkpoint, config.model_files, config.keys)
    card = stored.card
    stored_draft = None if config.draft is None else StoredModel.open(config.draft.checkpoint)
    for each in filter(None, (stored, stored_draft)):
        logger.info("%s comes from %s", each.card.name, each.card.source)
        for note in each.notes:
            logger.warning("%s", note)
    if stored_draft is not None:
        check_draft(stored_draft.card, card, _max_seq_len(config, card))
    spec = choose_spec(config.mesh, card.config, len(jax.devices()), config.num_slots)
    if config.mesh == AUTO:
        logger.info("mesh auto: %s", spec)
    check_hosts(spec)
    check_host_cache(config)
    if stored_draft is not None:
        experts = spec.expert if stored_draft.card.config.num_experts else 1
        check_spec(replace(spec, expert=experts), stored_draft.card.config, config.num_slots)
    mesh = make_mesh(spec)
    dtype = config.dtype or stored.dtype
    quantization = choose_quantization(config.quantize, card.quantization)
    platform = mesh.devices.flat[0].platform
    for each in (stored, *(() if stored_draft is None else (stored_draft,))):
        rules = choose_rules(each.card.config, spec)
        served, floats = rules.served(each.card.config), config.dtype or each.dtype
        check_attention(*attention_needs(config, served, mesh, rules, floats, _max_seq_len(config, card)))
    for note in format_notes(platform, quantization, config.kv_dtype or dtype, dtype, card.config.num_experts):
        logger.warning("%s", note)
    if form := adapter_form(config, card.config, mesh, choose_rules(card.config, spec), dtype):
        for path in config.lora_paths.values():
            form.check(path)
    model = LoadedModel.load(config, stored, spec, mesh, progress)
    draft = None
    if config.draft is not None and stored_draft is not None:
        draft = LoadedModel.load(config.draft, stored_draft, spec, mesh, progress)
    programs = make_programs(config, model, draft, progress, form)
    return make_engine(config, card, programs), card


def adapter_form(
    config: EngineConfig, model: ModelConfig, mesh: Mesh, rules: ShardingRules, dtype: str
) -> AdapterForm | None:
    """None where no adapter is served; `model` is the saved one. On a CPU they are float32 beside weights of any type:
    XLA would widen those of all layers in every step. Raises ConfigError on several hosts: all would have to load."""
    if not config.num_adapters:
        return None
    if jax.process_count() > 1:
        raise ConfigError("adapters are served by one host only; leave out --lora and --max-loras.")
    dtype = "float32" if mesh.devices.flat[0].platform == "cpu" else dtype
    return AdapterForm(model, mesh, rules, dtype, config.num_adapters, config.max_lora_rank)


def make_programs(
    config: EngineConfig,
    model: LoadedModel,
    draft: LoadedModel | None,
    progress: Progress,
    adapters: AdapterForm | None = None,
) -> Programs:
    """The page pool's arrays and all compiled steps, over weights that are on the mesh already; `draft` is the model
    that guesses, if one does, and `adapters` what `adapter_form` gives."""
    draft_spec = None
    if draft is not None:
        attention = draft.attention(config).attention
        draft_spec = DraftSpec(draft.card.config, config.chunk_tokens, attention, draft.seams)
    spec = step_spec(config, model, draft_spec, 0 if adapters is None else adapters.rank)
    executables = Executables(config.compile_cache, spec.mesh)
    bank = None if adapters is None else AdapterBank(adapters, executables)
    for note in sets_notes(model.card.config, spec, model.num_stages):
        logger.info("%s", note)
    forms = model.forms()
    draft_forms = None if draft is None else draft.forms()
    shapes = shapes_of(config, model)

    def over(num_pages: int, make: Callable[[KVCache], KVCache]) -> Programs:
        """Programs over so many pages of each model, made by `make` from their abstract form."""
        drafting = None
        if draft is not None and draft_spec is not None and draft_forms is not None:
            pages = make(draft.pages(num_pages, config))
            drafting = DraftPrograms(
                draft_spec, spec.mesh, spec.pages_per_slot, pages, *draft_forms, executables=executables
            )
        pages = make(model.pages(num_pages, config))
        return Programs(spec, pages, *forms, drafting, executables, bank, bool(config.host_cache_bytes))

    def temporaries() -> int:
        progress("compiling the largest step, to see what memory it needs")
        # Over the pages that were asked for it is a program that will run, and may be kept already.
        num_pages = (config.num_pages or spec.pages_per_slot) * len(spec.windows)
        return _temporaries(over(num_pages, lambda pages: pages), shapes)

    adapter_bytes = 0 if adapters is None else adapters.num_bytes
    programs = over(
        num_pages(config, model, draft, adapter_bytes, spec, limits_of(config), temporaries, progress), make_cache
    )
    _compile(programs, shapes, progress)
    return programs


def step_spec(
    config: EngineConfig, model: LoadedModel, draft: DraftSpec | None = None, adapter_rank: int = 0
) -> StepSpec:
    """What all programs share. The weights of `model` may be abstract."""
    return StepSpec(
        config=model.card.config,
        mesh=model.mesh,
        num_slots=config.num_slots,
        pages_per_slot=pages_for(_max_seq_len(config, model.card), config.page_size),
        tile_tokens=TILE_TOKENS,
        attention=model.attention(config).attention,
        max_trips=config.decode_steps,
        draft=draft,
        embeds=config.embeddings is not None,
        adapter_rank=adapter_rank,
        seams=model.seams,
        sets=model.sets(config),
        vocab_axes=model.rules.mesh_axes[axes.VOCAB],
    )


def shapes_of(config: EngineConfig, model: LoadedModel) -> tuple[StepShape, ...]:
    """All programs of an engine. A row or a tile more costs little where reading weights takes longer than multiplying
    with them, but a program takes long to compile there: so there are few, and one for prefill."""
    ladder = (
        Ladder()
        if model.mesh.devices.flat[0].platform == "cpu"
        else Ladder(least=32, factor=8, least_tiles=_max_tiles(config), beside_few=False)
    )
    return step_shapes(config.num_slots, _max_tiles(config), config.max_drafts, ladder)


def _temporaries(programs: Programs, shapes: tuple[StepShape, ...]) -> int:
    """Bytes of the hungriest program. Which of the largest of each kind it is, XLA says."""
    by_size = sorted(shapes, key=lambda shape: (shape.num_tokens + shape.tiles * TILE_TOKENS, shape))
    largest = {bool(shape.drafts): shape for shape in by_size}
    sizes = [programs.temporaries(shape) for shape in largest.values()]
    return max(*sizes, programs.draft.temporaries() if programs.draft else 0)


def make_engine(config: EngineConfig, card: ModelCard, programs: Programs) -> Engine:
    """An engine with an empty pool over compiled programs."""
    return Engine(
        programs,
        PagePool(programs.num_pages),
        limits_of(config),
        eos_token_ids=card.generation.eos_token_ids,
        max_seq_len=_max_seq_len(config, card),
        max_waiting=config.max_waiting,
        draw_seed=secrets.randbits,
        overlap=config.overlap and not only_one_step_at_a_time(programs.spec.mesh),
        prefix_cache=config.prefix_cache,
        pooling=None if config.embeddings is None else Pooling(config.embeddings),
        num_host_pages=num_host_pages(config, programs.page_bytes),
    )


def limits_of(config: EngineConfig) -> Limits:
    """By which the planner goes."""
    return Limits(
        config.page_size,
        TILE_TOKENS,
        _max_tiles(config),
        max_trips=config.decode_steps,
        max_drafts=config.max_drafts,
    )


def _compile(programs: Programs, shapes: tuple[StepShape, ...], progress: Progress) -> None:
    done: list[str] = []

    def report(shape: object) -> None:
        done.append(str(shape))
        progress(f"compiling: {len(done)} of {len(shapes)} programs, last {shape}")

    progress(f"compiling: 0 of {len(shapes)} programs")
    programs.compile(shapes, report, num_threads=num_compile_threads(programs.spec.mesh))
    heap.give_back()


def _max_tiles(config: EngineConfig) -> int:
    return pages_for(config.chunk_tokens, TILE_TOKENS)


def _max_seq_len(config: EngineConfig, card: ModelCard) -> int:
    context = card.config.max_seq_len
    if config.max_seq_len is not None and config.max_seq_len > context:
        raise ConfigError(f"--max-seq-len {config.max_seq_len:,} is more than the model's context of {context:,}.")
    return config.max_seq_len or context


def _use_compile_cache(folder: str) -> None:
    """Keep compiled programs across starts; the default thresholds would leave the small ones out."""
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
