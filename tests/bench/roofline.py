"""Where the time of a decode step goes, and what the machine could do in the same run: a table on stdout.

    python -m tests.bench.roofline                       float32, 1 to 64 rows, context 200
    python -m tests.bench.roofline --dtype bfloat16 --rows 8 64

The parts are programs of their own over the same arrays; the step is the one that is served. What the parts leave of it
is norms, rope, embedding and what lies between calls. "of the machine" is the larger of the share of the bytes that its
memory reads and the share of the products that NumPy's GEMM does, in the time the part took.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from kv.cache import KVCache, make_cache
from kv.cpu_attention import decode_attention
from model.config import ModelConfig
from model.packed import Packed, packed_product
from podstream.home import home
from podstream.importing import ensure_demo_model
from serving.config import EngineConfig
from serving.engine.batch import StepShape
from serving.engine.build import TILE_TOKENS
from serving.engine.loaded_model import LoadedModel
from serving.engine.masks import ALL_TOKENS, num_words
from serving.engine.programs import Programs
from serving.engine.sampling import sample
from serving.engine.slot_state import empty_slots
from serving.engine.step import StepSpec, row_sampling
from sharding.mesh import make_mesh
from sharding.spec import MeshSpec
from sharding.stored_model import StoredModel
from tests.bench.machine import probe

PAGE, PAGES_PER_SLOT = 16, 32
SECONDS = 1.5
console = Console(stderr=True)


@dataclass(frozen=True)
class Part:
    name: str
    call: Callable[[], Any]
    flop: float = 0.0
    num_bytes: float = 0.0
    """Read, at least."""


def best_ms(call: Callable[[], Any]) -> float:
    """The median of the faster half of `SECONDS`."""
    jax.block_until_ready(call())
    times, end = [], time.perf_counter() + SECONDS
    while time.perf_counter() < end or len(times) < 4:
        started = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - started)
    return 1e3 * statistics.median(sorted(times)[: (len(times) + 1) // 2])


def products(weights: list[Packed], rows: int) -> Callable[[], Any]:
    """Each weight with `rows` rows, all of its layers one after the other."""
    inputs = {weight.panels.shape: _inputs(weight, rows) for weight in weights}

    @jax.jit
    def run(weights: list[Packed], inputs: list[jax.Array]) -> jax.Array:
        total = jnp.float32(0)
        for weight, x_RI in zip(weights, inputs, strict=True):

            def one(layer: jax.Array, total: jax.Array, weight: Packed = weight, x_RI: jax.Array = x_RI) -> jax.Array:
                return total + packed_product(x_RI + total * 0, weight.of_layer(layer)).reshape(-1)[0]

            total = jax.lax.fori_loop(0, weight.panels.shape[0], one, total)
        return total

    return functools.partial(run, weights, [inputs[weight.panels.shape] for weight in weights])


def _inputs(weight: Packed, rows: int) -> jax.Array:
    halves = 2 if weight.panels.dtype == jnp.uint16 else 1
    return jnp.asarray(np.random.default_rng(0).normal(size=(rows, weight.panels.shape[2] * halves)), jnp.float32)


def attention(config: ModelConfig, cache: KVCache, rows: int, context: int) -> Callable[[], Any]:
    """All layers, with pages that lie apart as those of running sequences do."""
    draw = np.random.default_rng(0).normal
    q = jnp.asarray(draw(size=(rows, config.num_heads, config.head_dim)), jnp.float32)
    k = jnp.asarray(draw(size=(rows, config.num_kv_heads, config.head_dim)), cache.dtype)
    pages, positions = jnp.asarray(_pages(rows)), jnp.full(rows, context, jnp.int32)
    held = [cache]

    @functools.partial(jax.jit, donate_argnums=0)
    def run(cache: KVCache, q: jax.Array, k: jax.Array) -> tuple[KVCache, jax.Array]:
        def one(layer: jax.Array, state: tuple[KVCache, jax.Array]) -> tuple[KVCache, jax.Array]:
            out, cache = decode_attention(q + state[1][0, 0, 0] * 0, k, k, state[0], layer, pages, positions)
            return cache, out

        return jax.lax.fori_loop(0, config.num_layers, one, (cache, jnp.zeros(q.shape, jnp.float32)))

    def call() -> jax.Array:
        held[0], out = run(held[0], q, k)
        return out

    return call


def _pages(rows: int) -> np.ndarray:
    return 1 + np.arange(PAGES_PER_SLOT, dtype=np.int32)[None] * rows + np.arange(rows, dtype=np.int32)[:, None]


def packed_step(programs: Programs, shape: StepShape, context: int) -> np.ndarray:
    """The upload of a step in which all rows decode, greedily."""
    layout = programs.spec.layout(shape)
    packed = np.zeros(layout.size, np.int32)
    fields_FR, pages_RJ, *_ = layout.split(packed)
    fields_FR[0] = fields_FR[2] = np.arange(shape.rows)
    fields_FR[1], fields_FR[3], fields_FR[4] = context, 1, context + 1
    fields_FR[-4:] = -1
    pages_RJ[:] = _pages(shape.rows)
    return packed


def step(programs: Programs, shape: StepShape, context: int) -> Callable[[], Any]:
    packed = packed_step(programs, shape, context)
    return lambda: programs.run(shape, packed)[0]


def sampler(programs: Programs, shape: StepShape) -> Callable[[], Any]:
    """Greedy rows, as in the step."""
    vocabulary = programs.spec.config.vocab_size
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(shape.rows, vocabulary)), jnp.float32)
    fields = jnp.asarray(programs.spec.layout(shape).split(packed_step(programs, shape, 1))[0])
    masks = jnp.full((shape.rows, num_words(vocabulary)), ALL_TOKENS, jnp.int32)
    slots = jax.device_put(empty_slots(shape.rows + 1, vocabulary))
    run = jax.jit(lambda logits, fields, masks, slots: sample(logits, row_sampling(fields, masks), slots)[0])
    return functools.partial(run, logits, fields, masks, slots)


def parts(model: LoadedModel, config: EngineConfig, rows: int, context: int) -> Iterator[Part]:
    """The served step first."""
    shape, card = StepShape(0, rows), model.card.config
    spec = StepSpec(card, model.mesh, rows, PAGES_PER_SLOT, TILE_TOKENS, model.attention(config).attention)
    programs = Programs(spec, make_cache(model.pages(rows * PAGES_PER_SLOT, config)), *model.forms())
    programs.compile((shape,), lambda _: None, num_threads=2)
    yield Part("step", step(programs, shape, context))
    packed = jax.tree.leaves(model.weights, is_leaf=lambda leaf: isinstance(leaf, Packed))
    layers = [leaf for leaf in packed if isinstance(leaf, Packed) and leaf.panels.shape[0] > 1]
    head = [leaf for leaf in packed if isinstance(leaf, Packed) and leaf.panels.shape[0] == 1]
    for name, weights in (("products of the layers", layers), ("product of the head", head)):
        count = sum(weight.panels.size for weight in weights)
        num_bytes = sum(weight.panels.nbytes for weight in weights)
        yield Part(name, products(weights, rows), 2.0 * rows * count, num_bytes)
    cache = make_cache(model.pages(rows * PAGES_PER_SLOT, config))
    live = rows * (context + 1) * card.num_layers * 2 * card.num_kv_heads * card.head_dim
    flop = 4.0 * rows * (context + 1) * card.num_layers * card.num_heads * card.head_dim
    yield Part("attention", attention(card, cache, rows, context), flop, live * cache.v_LPKGH.dtype.itemsize)
    yield Part("sampler", sampler(programs, shape), num_bytes=4.0 * rows * card.vocab_size)


def table(all_rows: list[int], model: LoadedModel, config: EngineConfig, context: int) -> Iterator[str]:
    can = probe()
    yield (
        f"{model.card.name}, {config.dtype}, context {context}; in this run the memory gave {can['read_gb_per_s']} "
        f"GB/s and NumPy's GEMM {can['gemm_gflops']} GFLOP/s.\n"
    )
    yield "| rows | part | ms | share of the step | GFLOP/s | GB/s | of the machine |"
    yield "|---|---|---|---|---|---|---|"
    for rows in all_rows:
        whole, left = 0.0, 0.0
        for part in parts(model, config, rows, context):
            console.print(f"{rows} rows: {part.name}")
            ms = best_ms(part.call)
            if part.name == "step":
                whole = left = ms
                yield f"| {rows} | **step** | {ms:.1f} | 100 % | | | |"
                continue
            left -= ms
            gflops, gb = part.flop / ms / 1e6, part.num_bytes / ms / 1e6
            of_all = max(gflops / can["gemm_gflops"], gb / can["read_gb_per_s"])
            yield f"| {rows} | {part.name} | {ms:.1f} | {ms / whole:.0%} | {gflops:.1f} | {gb:.1f} | {of_all:.0%} |"
        yield f"| {rows} | all else | {left:.1f} | {left / whole:.0%} | | | |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--context", type=int, default=200, help=f"at most {PAGE * PAGES_PER_SLOT - 1}")
    options = parser.parse_args()
    config = EngineConfig(str(ensure_demo_model(home(), console)), dtype=options.dtype, page_size=PAGE)
    mesh = make_mesh(MeshSpec.parse(config.mesh))
    model = LoadedModel.load(config, StoredModel.open(config.checkpoint), MeshSpec(), mesh, lambda _: None)
    for line in table(options.rows, model, config, options.context):
        print(line, flush=True)


if __name__ == "__main__":
    main()
