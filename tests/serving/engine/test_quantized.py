"""The equalities of the engine hold with quantised weights and caches: batched, cut, preempted, cached or sharded, a
request gets the same tokens."""

import pytest

from model.config import ModelConfig
from serving.request import SamplingParams
from tests.engines import ONE_DEVICE, request, run, tiny_engine

pytestmark = pytest.mark.slow
MODEL = ModelConfig.tiny(
    num_layers=1, embed_dim=64, head_dim=32, num_heads=8, num_kv_heads=4, mlp_dim=128, tie_embeddings=False
)
V = MODEL.vocab_size
PROMPTS = [[(31 * n + 7 * j) % V for j in range(n)] for n in (1, 5, 33, 70)]
REQUESTS = [request(len(ids), ids, SamplingParams(temperature=0.0, max_tokens=12)) for ids in PROMPTS]
FOUR = "data=1,tensor=4"
FORMATS = ("int4", "int8")  # the ones with groups and with scales
FP8_CACHE = (None, "fp8")


def engine(**changes):
    return tiny_engine(model=MODEL, **{"formats": FORMATS, **changes})


def answers_alone(**changes):
    answers = {}
    for r in REQUESTS:
        answers |= run(engine(**changes), [r])
    return answers


@pytest.fixture(scope="module")
def alone():
    return answers_alone()


def test_at_once_joining_and_chunked_equal_alone(alone):
    assert run(engine(), REQUESTS) == alone
    assert run(engine(), REQUESTS, arrive_every=2) == alone
    assert run(engine(max_tiles=1), REQUESTS) == alone


def test_several_steps_per_call_equal_one(alone):
    assert run(engine(trips=8), REQUESTS) == alone


def test_warm_equals_cold(alone):
    warm = engine()
    assert [run(warm, REQUESTS) for _ in range(2)] == [alone, alone]
    assert warm.stats.prefix_cache_hits > 0


@pytest.mark.parametrize("formats", [FORMATS, FP8_CACHE])
def test_preempted_equals_undisturbed(formats):
    long = SamplingParams(temperature=0.0, max_tokens=60)
    requests = [request(i, [(13 * i + j) % V for j in range(10 + i)], long) for i in range(4)]
    undisturbed, crowded = engine(formats=formats), engine(formats=formats, num_pages=30)
    assert run(crowded, requests) == run(undisturbed, requests)
    assert crowded.stats.num_preemptions > 0 == undisturbed.stats.num_preemptions


def test_packed_int8_equals_xlas_form_of_it():
    """One device multiplies in the CPU's kernel, four do not."""
    packed, sharded = (tiny_engine(model=MODEL, mesh=mesh, formats=("int8", None)) for mesh in (ONE_DEVICE, FOUR))
    assert run(packed, REQUESTS) == run(sharded, REQUESTS)


def test_with_an_fp8_cache_at_once_and_joining_equal_alone():
    alone = answers_alone(formats=FP8_CACHE)
    assert engine(formats=FP8_CACHE)._programs._cache.dtype == "float8_e4m3fn"
    assert run(engine(formats=FP8_CACHE), REQUESTS) == alone
    assert run(engine(formats=FP8_CACHE), REQUESTS, arrive_every=2) == alone


def test_sharded_equals_one_device():
    assert run(engine(mesh=FOUR), REQUESTS) == run(engine(mesh=ONE_DEVICE), REQUESTS)
