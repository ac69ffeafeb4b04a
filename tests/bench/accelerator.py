"""The stack on one NVIDIA GPU: an 8B-shaped model with random weights, as one JSON line; under five minutes.

    pip install "jax[cuda13]==$(python -c 'import jax; print(jax.__version__)')"
    python -m tests.bench.accelerator

The engine is the real one, with the kernel of `kv.gpu_attention`. Figures are of all streams together. The bandwidth
of decode is (weights that a step reads + live keys and values) per step, as a share of what a plain read reaches.
"""

import json
import secrets
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import jax
import jax.numpy as jnp
import numpy as np

from model.card import GenerationDefaults, ModelCard, TextAssets
from model.config import ModelConfig
from model.tree import names_of
from serving.config import EngineConfig
from serving.engine.api import EngineRequest
from serving.engine.build import make_engine, make_programs
from serving.engine.engine import Engine
from serving.engine.loaded_model import LoadedModel
from serving.request import SamplingParams
from sharding.mesh import make_mesh
from sharding.params import abstract_params, param_specs
from sharding.rules import choose_rules
from sharding.sizes import device_bytes
from sharding.spec import MeshSpec

LLAMA_8B = ModelConfig(
    vocab_size=128_256, num_layers=32, embed_dim=4_096, mlp_dim=14_336, num_heads=32, num_kv_heads=8, head_dim=128,
    max_seq_len=2_048, rope_theta=500_000.0,
)  # fmt: skip
STREAMS, PROMPT, ANSWER = 32, 1_024, 256
PAGE, CONTEXT = 64, PROMPT + ANSWER + 64
READ_BYTES, READS = 1 << 31, 8
GIB = 1 << 30
LEAST_BYTES = 24 * GIB


@dataclass(frozen=True)
class Rates:
    """Of all streams together."""

    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    step_ms: float
    """Device call for one token of every stream."""


def main() -> None:
    device = jax.devices()[0]
    if device.platform != "gpu":
        sys.exit(f"No GPU here: JAX has {device.platform} devices only, and this measures the kernels for NVIDIA's.")
    memory = device.memory_stats()["bytes_limit"]
    if memory < LEAST_BYTES:
        sys.exit(f"An 8B model in 16 bit needs {LEAST_BYTES // GIB} GiB, this GPU gives {memory / GIB:.1f} GiB.")
    config = EngineConfig(
        "random", dtype="bfloat16", num_slots=STREAMS, page_size=PAGE, num_pages=STREAMS * (CONTEXT // PAGE),
        max_seq_len=CONTEXT, chunk_tokens=1_024, prefix_cache=False, attention="gpu",
    )  # fmt: skip
    started = time.perf_counter()
    model = random_model(LLAMA_8B, "bfloat16")
    engine = make_engine(config, model.card, make_programs(config, model, None, _progress))
    compile_s = time.perf_counter() - started
    measure(engine, STREAMS, PROMPT, 8)  # the first calls of a program are slower
    rates = measure(engine, STREAMS, PROMPT, ANSWER)
    step_bytes = decode_bytes(model, STREAMS, PROMPT + ANSWER / 2)
    read = read_bytes_per_s()
    print(
        json.dumps(
            {
                "device": device.device_kind,
                "model": "8B, random bfloat16 weights",
                "streams": STREAMS, "prompt": PROMPT, "answer": ANSWER,
                **{name: round(value, 2) for name, value in asdict(rates).items()},
                "decode_gb_per_s": round(step_bytes / rates.step_ms / 1e6, 1),
                "read_gb_per_s": round(read / 1e9, 1),
                "bandwidth_share": round(step_bytes / rates.step_ms * 1e3 / read, 3),
                "load_and_compile_s": round(compile_s, 1),
            }
        )
    )  # fmt: skip


def random_model(config: ModelConfig, dtype: str) -> LoadedModel:
    """Weights whose products neither vanish nor explode, made on the device, leaf after leaf."""
    spec = MeshSpec()
    mesh, rules = make_mesh(spec), choose_rules(config, spec)
    specs, keys = param_specs(config), iter(jax.random.split(jax.random.key(0), 64))
    normal = jax.jit(
        lambda key, shape, kind: (jax.random.normal(key, shape) * 0.02).astype(kind), static_argnums=(1, 2)
    )

    def make(path: tuple[object, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
        is_norm = not specs[names_of(path)].inputs
        return jnp.ones(leaf.shape, leaf.dtype) if is_norm else normal(next(keys), leaf.shape, leaf.dtype)

    weights = jax.tree.map_with_path(make, abstract_params(config, mesh, rules, dtype))
    card = ModelCard("random", config, TextAssets("{}"), GenerationDefaults(()), "random")
    return LoadedModel(card, mesh, rules, dtype, weights)


def measure(
    engine: Engine, num_streams: int, prompt: int, answer: int, clock: Callable[[], float] = time.perf_counter
) -> Rates:
    """All streams arrive at once; decode is measured from when the last one has its first token."""
    rng = np.random.default_rng(0)
    greedy = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
    for _ in range(num_streams):
        tokens = tuple(rng.integers(1, engine.vocab_size, prompt).tolist())
        engine.submit(EngineRequest(secrets.token_hex(8), tokens, greedy))
    got: dict[str, int] = {}
    started = clock()
    while len(got) < num_streams:
        _step(engine, got)
    prefilled, before = clock(), sum(got.values())
    while engine.has_work:
        _step(engine, got)
    decode_s = clock() - prefilled
    decoded = sum(got.values()) - before
    return Rates(
        num_streams * prompt / (prefilled - started), decoded / decode_s, decode_s / decoded * num_streams * 1e3
    )


def _step(engine: Engine, got: dict[str, int]) -> None:
    for output in engine.step():
        if output.token_ids:
            got[output.request_id] = got.get(output.request_id, 0) + len(output.token_ids)


def decode_bytes(model: LoadedModel, num_streams: int, context: float) -> float:
    """What one decode step must read: all weights but the table of embeddings, and every live key and value."""
    config = model.card.config
    table = config.vocab_size * config.embed_dim * jnp.dtype(model.dtype).itemsize
    weights = device_bytes(model.weights) - (0 if config.tie_embeddings else table)
    token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * jnp.dtype(model.dtype).itemsize
    return weights + num_streams * context * token


def read_bytes_per_s() -> float:
    """The best of a few plain reads."""
    x = jnp.ones((READ_BYTES // 4 // 1_024, 1_024), jnp.float32)
    total = jax.jit(jnp.sum)
    total(x).block_until_ready()
    best = 0.0
    for _ in range(READS):
        started = time.perf_counter()
        total(x).block_until_ready()
        best = max(best, READ_BYTES / (time.perf_counter() - started))
    return best


def _progress(line: str) -> None:
    print(line, file=sys.stderr)


if __name__ == "__main__":
    main()
