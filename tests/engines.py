"""Engines over a tiny random float32 model, and drivers that run requests through them step by step."""

import dataclasses
import secrets
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import jax
import numpy as np

from kv.cache import make_cache
from kv.layer_sets import choose_sets
from kv.page_pool import PagePool
from model import packed
from model.card import GenerationDefaults, ModelCard, TextAssets
from model.config import ModelConfig
from model.quantization import Quantization
from model.tree import as_tree, at, names_of
from serving.config import EngineConfig
from serving.engine import build
from serving.engine.api import EngineRequest
from serving.engine.batch import StepShape, step_shapes
from serving.engine.build import TILE_TOKENS, adapter_form, make_programs
from serving.engine.device_arrays import FlatWeights
from serving.engine.draft_programs import DraftPrograms
from serving.engine.draft_step import DraftSpec
from serving.engine.engine import Engine
from serving.engine.executables import Executables
from serving.engine.loaded_model import LoadedModel
from serving.engine.page_programs import PagePrograms
from serving.engine.plan import Limits
from serving.engine.programs import Programs
from serving.engine.prompt_logprobs import StepLogprobs
from serving.engine.step import StepSpec
from serving.engine.trips import ENDED
from serving.request import SamplingParams
from sharding.kv_heads import repeat_kv_heads
from sharding.mesh import make_mesh
from sharding.params import abstract_params, init_params, pack_int8, pack_onto
from sharding.quantize import quantize_onto
from sharding.rules import choose_rules
from sharding.sizes import device_bytes
from sharding.spec import MeshSpec

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
PAGE_SIZE = 4
MAX_SEQ_LEN = 160
ADAPTER_RANK = 4
ONE_DEVICE = "data=1,tensor=1"
KEPT = str(Path(__file__).parents[1] / "build" / "test-programs")
"""What one process of a test run has compiled, others and the next run take: programs are known by their sources."""
CONFIG = ModelConfig.tiny(num_heads=8, num_kv_heads=4, tie_embeddings=False)
MIXTRAL = ModelConfig.tiny(windows=(10, 10), num_experts=4, experts_per_token=2, mlp_dim=40, tie_embeddings=False)


def tiny_card(config=CONFIG, eos=()):
    return ModelCard("tiny", config, TextAssets("{}"), GenerationDefaults(tuple(eos)), "random")


@cache
def tiny_params(config=CONFIG, seed=1):
    return init_params(config, seed=seed)


def tiny_engine(
    *,
    eos=(),
    model=CONFIG,
    mesh=ONE_DEVICE,
    num_pages=128,
    max_tiles=2,
    pool=None,
    watch=None,
    trips=1,
    drafts=0,
    drafter=None,
    formats=(None, None),
    adapters=False,
    growth_tokens=64,
    host_pages=0,
    **changes,
):
    """A new engine with an empty pool of `num_pages` for each set of layers. Programs are compiled once per model and
    mesh, and the page arrays keep what earlier engines left in them, which must not matter. Two engines write into
    the same arrays: run one to its end before the next. `watch` sees all steps (`WrittenPages`). Of sharded programs
    and those of most formats there are two, for two slots and one tile: they are expensive to compile. `trips`
    tokens a decode call where nothing speaks against it, or `drafts` guesses for each row, by a draft model whose
    weights have the seed `drafter` if that is given (1 is the served model itself). `formats` are those of weights
    and cache. With `adapters` there is room for two of rank ADAPTER_RANK, and for three sequences.
    `host_pages` evicted pages go to the host's memory."""
    settings = {"max_waiting": 1024, "overlap": True, "trip_s": 0.001, "verify_s": 0.001, **changes}
    if drafter is not None:
        programs = _drafting_programs(model, mesh, drafts)
        forms = map(FlatWeights.of, _model(model, mesh, seed=drafter).forms())
        programs.draft._prefill_weights, programs.draft.weights = forms
    elif adapters:
        programs = _adapter_programs(model, mesh, formats[0], drafts)
    else:
        programs = _checking_programs(model, mesh, drafts) if drafts else _programs(model, mesh, *formats)
    if host_pages:
        _add_page_programs(programs)
    max_tiles = min(max_tiles, max(shape.tiles for shape in programs.shapes))
    return Engine(
        programs if watch is None else watch.over(programs),
        pool or PagePool(num_pages * len(programs.spec.windows) + 1),
        Limits(PAGE_SIZE, TILE_TOKENS, max_tiles, growth_tokens=growth_tokens, max_trips=trips, max_drafts=drafts),
        eos_token_ids=eos,
        max_seq_len=MAX_SEQ_LEN,
        draw_seed=secrets.randbits,
        num_host_pages=host_pages,
        **settings,
    )


def _config(model, mesh, quantize=None, kv_dtype=None):
    slots = 4 if (model, mesh, quantize, kv_dtype) == (CONFIG, ONE_DEVICE, None, None) else 2
    tiles = 1 if _are_few(mesh, quantize, kv_dtype) else 2
    return EngineConfig(
        "none",
        mesh=mesh,
        num_slots=slots,
        page_size=PAGE_SIZE,
        num_pages=128,
        chunk_tokens=tiles * TILE_TOKENS,
        max_seq_len=MAX_SEQ_LEN,
        kv_dtype=kv_dtype,
        compile_cache=KEPT,
    )


@cache
def _model(config, mesh, quantize=None, seed=1):
    spec = MeshSpec.parse(mesh)
    device_mesh, rules = make_mesh(spec), choose_rules(config, spec)
    saved, config = config, rules.served(config)
    floats = abstract_params(config, device_mesh, rules, "float32")
    copies = ((names_of(path), leaf + 0) for path, leaf in jax.tree.leaves_with_path(tiny_params(saved, seed)))
    if rules.kv_copies > 1:
        copies = repeat_kv_heads(copies, floats, rules.kv_copies)
    copies = ((names, jax.device_put(leaf, at(floats, names).sharding)) for names, leaf in copies)
    if quantize is not None:
        quantization = Quantization.parse(quantize)
        abstract = abstract_params(config, device_mesh, rules, "float32", quantization)
        weights = quantize_onto(abstract, copies, config, quantization)
        if quantize == "int8" and mesh == ONE_DEVICE:
            packed.register("int8")
            weights = pack_int8(weights, config)
    elif mesh == ONE_DEVICE:
        packed.register("float32")
        weights = pack_onto(copies, config)
    else:
        weights = as_tree(copies)
    return LoadedModel(tiny_card(config), device_mesh, rules, "float32", weights)


def _are_few(mesh, quantize, kv_dtype):
    return mesh != ONE_DEVICE or kv_dtype == "fp8" or quantize == "int8"


def _only(*shapes):
    """Within, programs are made of these shapes."""
    return patch.object(build, "step_shapes", lambda *_: shapes)


@cache
def _programs(model, mesh, quantize, kv_dtype):
    config, is_few = _config(model, mesh, quantize, kv_dtype), _are_few(mesh, quantize, kv_dtype)
    with _only(StepShape(0, 2), StepShape(1, 2)) if is_few else nullcontext():
        return make_programs(config, _model(model, mesh, quantize), None, lambda _: None)


@cache
def _adapter_programs(model, mesh, quantize, drafts):
    """Two programs, of the most rows; with `drafts` one more, that checks guesses."""
    config = replace(_config(model, mesh, quantize), num_slots=3, chunk_tokens=TILE_TOKENS, max_loras=2)
    config, loaded = replace(config, max_lora_rank=ADAPTER_RANK), _model(model, mesh, quantize)
    form = adapter_form(config, model, loaded.mesh, loaded.rules, loaded.dtype)
    with _only(StepShape(0, 3), StepShape(1, 3), *([StepShape(0, 3, drafts)] if drafts else [])):
        return make_programs(config, loaded, None, lambda _: None, form)


@cache
def _checking_programs(model, mesh, drafts):
    """With one more, of the most rows, that checks guesses."""
    programs = _programs(model, mesh, None, None)
    programs.compile((StepShape(0, programs.spec.num_slots, drafts),), lambda _: None, 1)
    return programs


@cache
def _drafting_programs(config, mesh, drafts):
    """Those of `_programs`, over page arrays of their own, and one more that checks what a draft model guesses."""
    plain, engine, model = _programs(config, mesh, None, None), _config(config, mesh), _model(config, mesh)
    draft = DraftSpec(config, TILE_TOKENS, model.attention(engine).attention)
    spec = replace(plain.spec, draft=draft)
    first, second = (make_cache(model.pages(engine.num_pages, engine)) for _ in range(2))
    kept = Executables(KEPT, spec.mesh)
    drafting = DraftPrograms(draft, spec.mesh, spec.pages_per_slot, first, *model.forms(), kept)
    programs = Programs(spec, second, *model.forms(), drafting, kept)
    programs.compile((StepShape(0, spec.num_slots, drafts),), lambda _: None, 2)
    programs._compiled = plain._compiled | programs._compiled  # its own, where others check guesses, too
    programs._all_allowed |= plain._all_allowed
    return programs


@cache
def _add_page_programs(programs):
    programs._pages = PagePrograms(programs._cache, programs.spec.whole, Executables(KEPT, programs.spec.mesh))
    with ThreadPoolExecutor() as pool:
        for done in programs._pages.compile(pool):
            done.result()


def decode_memory():
    """What XLA says of the tiny decode program's memory, and the bytes of the page arrays."""
    programs = _programs(CONFIG, ONE_DEVICE, None, None)
    return programs._compiled[StepShape(0, 4)].memory_analysis(), device_bytes(programs._cache)


class CountingPrograms:
    """Stands where `Programs` stands, without a device: the token at each position is `counted(position)`."""

    def __init__(self, num_slots, max_tiles, max_trips=1, config=CONFIG):
        sets = choose_sets(config.windows, MAX_SEQ_LEN, PAGE_SIZE)
        self.spec = StepSpec(
            config, None, num_slots, MAX_SEQ_LEN // PAGE_SIZE, TILE_TOKENS, max_trips=max_trips, sets=sets
        )
        self.shapes = step_shapes(num_slots, max_tiles)
        self.draft = self.adapters = None
        self.copies_pages = True
        self.num_to_fail = 0

    def reset(self):
        pass

    def take_pages(self, pages):
        return [()] * len(pages)

    def put_pages(self, pages, arrays):
        pass

    def run(self, shape, packed, masks=None):
        if self.num_to_fail:
            self.num_to_fail -= 1
            raise RuntimeError("device lost")
        num_trips_R, sample_position_R = self.spec.layout(shape).split(packed)[0][3:5].tolist()
        tokens_RI = np.full((shape.rows, self.spec.max_trips), ENDED, np.int32)
        for row, (num_trips, position) in enumerate(zip(num_trips_R, sample_position_R, strict=True)):
            tokens_RI[row, :num_trips] = [counted(position + i) for i in range(num_trips)]
        return tokens_RI, StepLogprobs(None)  # nobody asks


def counted(position):
    return (position * 7 + 3) % 50


class PageCheckingPrograms(CountingPrograms):
    """Also keeps what each place of each page holds, the whole text up to there, and asserts that every token sees its
    own text in every set of layers."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self._texts = {}

    def run(self, shape, packed, masks=None):
        fields, pages, tile_rows, tokens, positions, *_ = self.spec.layout(shape).split(packed)
        pages_WRJ = pages.reshape(-1, shape.rows, pages.shape[1])
        for row, (first, num_trips) in enumerate(fields[[1, 3]].T.tolist()):
            for position in range(first, first + num_trips if first >= 0 else first):
                self._write(pages_WRJ[:, row], position, counted(position))
        for (row,), tile, places in zip(tile_rows, tokens.tolist(), positions.tolist(), strict=True):
            for token, position in zip(tile, places, strict=True):
                if position >= 0:
                    self._write(pages_WRJ[:, row], position, token)
        return super().run(shape, packed, masks)

    def take_pages(self, pages):
        taken = np.full((len(pages), 1, PAGE_SIZE), None, object)
        for i, page in enumerate(pages):
            for place in range(PAGE_SIZE):
                taken[i, 0, place] = self._texts[page, place]
        return [tuple(arrays) for arrays in taken]

    def put_pages(self, pages, arrays):
        for page, (texts,) in zip(pages, arrays, strict=True):
            self._texts.update(((page, place), text) for place, text in enumerate(texts))

    def _write(self, pages_WJ, position, token):
        def texts(pages_J, start):
            places = [(int(pages_J[p // PAGE_SIZE]), p % PAGE_SIZE) for p in range(start, position)]
            assert all(page for page, _ in places), "a token looks at a page that is not there"
            return [self._texts[place] for place in places]

        for pages_J, window in zip(pages_WJ, self.spec.windows, strict=True):
            start = 0 if window is None else max(position + 1 - window, 0)
            before = texts(pages_J, start)
            assert [len(text) for text in before] == [*range(start + 1, position + 1)]
            assert all(later[: len(text)] == text for text, later in pairwise(before)), "another text"
            if window is None or len(self.spec.windows) == 1:
                text = (*(before[-1] if before else ()), token)
            assert not before or before[-1] == text[:-1], "sets differ"
            assert pages_J[position // PAGE_SIZE], "a token has no page"
            self._texts[int(pages_J[position // PAGE_SIZE]), position % PAGE_SIZE] = text


def counting_engine(limits, *, num_slots=4, num_pages=60, config=CONFIG, make=CountingPrograms, **changes):
    """An engine whose answers are known and whose steps take no time: for traces of thousands of steps."""
    settings = {"eos_token_ids": (), "max_seq_len": MAX_SEQ_LEN, "max_waiting": 1024, "trip_s": 0.0, **changes}
    programs = make(num_slots, limits.max_tiles, limits.max_trips, config)
    pool = PagePool(num_pages * len(programs.spec.windows) + 1)
    return Engine(programs, pool, limits, draw_seed=lambda bits: 0, **settings)


def check_random_trace(engine, waiting, expected, rng, pool, written):
    """Arrivals and aborts at random: answers are those `expected` by request id, aborted ones as far as they came.
    `waiting` may repeat a request. `written` is what the engine's `watch` is."""
    answers, aborted = {}, set()
    while waiting or engine.has_work:
        if waiting and rng.random() < 0.15:
            asked = waiting.pop()
            name = f"{asked.request_id} {len(waiting)}"
            answers[name] = []
            engine.submit(dataclasses.replace(asked, request_id=name))
        if answers and rng.random() < 0.03 and engine.abort(name := rng.choice(list(answers))):
            aborted.add(name)
        for output in engine.step():
            answers[output.request_id] += output.token_ids
        engine.check_integrity()
        assert not written.take() & pool.kept_pages, "a step in flight writes into a published page"
    for name, tokens in answers.items():
        whole = expected[name.split()[0]][0]
        assert tokens == (whole[: len(tokens)] if name in aborted else whole)


class WrittenPages:
    """Stands before `Programs` and tells the pages that the step in flight writes."""

    def __init__(self):
        self._newest = frozenset()

    def take(self):
        """After each step of the engine: nothing is in flight unless it dispatched something."""
        newest, self._newest = self._newest, frozenset()
        return newest

    def over(self, programs):
        self._programs = programs
        self.spec, self.shapes, self.draft = programs.spec, programs.shapes, programs.draft
        self.adapters, self.copies_pages = programs.adapters, programs.copies_pages
        return self

    def take_pages(self, pages):
        return self._programs.take_pages(pages)

    def put_pages(self, pages, arrays):
        self._programs.put_pages(pages, arrays)

    def new_masks(self, rows):
        return self._programs.new_masks(rows)

    def write_slot(self, packet):
        self._programs.write_slot(packet)

    def run(self, shape, packed, masks=None):
        fields, pages, tile_rows, _, positions, *_ = self.spec.layout(shape).split(packed)
        pages_WRJ = pages.reshape(-1, shape.rows, pages.shape[1])
        decoded = {
            int(page)
            for row, (at, num_trips) in enumerate(fields[[1, 3]].T)
            for i in range(num_trips + shape.drafts if at >= 0 else 0)
            if (at + i) // PAGE_SIZE < pages.shape[1]
            for page in pages_WRJ[:, row, (at + i) // PAGE_SIZE]
        }
        prefilled = {
            int(page)
            for (row,), tile in zip(tile_rows, positions, strict=True)
            for at in tile
            if at >= 0
            for page in pages_WRJ[:, row, at // PAGE_SIZE]
        }
        self._newest = frozenset(decoded | prefilled)
        return self._programs.run(shape, packed, masks)


def request(name, token_ids, sampling=GREEDY, **changes):
    return EngineRequest(str(name), tuple(token_ids), sampling, **changes)


def run(engine, requests, *, arrive_every=0, check=True, max_steps=2_000):
    """Answers by request id, as (token ids, finish_reason). Requests arrive together or `arrive_every` steps apart."""
    answers = {r.request_id: ([], None) for r in requests}
    waiting = list(requests)
    for step in range(max_steps):
        while waiting and (not arrive_every or step % arrive_every == 0):
            engine.submit(waiting.pop(0))
            if arrive_every:
                break
        for output in engine.step():
            tokens, reason = answers[output.request_id]
            assert reason is None, "news after the end"
            tokens.extend(output.token_ids)
            answers[output.request_id] = (tokens, output.finish_reason)
        if check:
            engine.check_integrity()
        if not waiting and not engine.has_work:
            return answers
    raise AssertionError(f"the engine does not come to an end in {max_steps} steps")
