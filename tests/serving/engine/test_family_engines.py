"""The equalities of the engine for what other families than Llama have: windows, soft caps, two ropes, experts."""

import jax
import jax.numpy as jnp
import pytest

from model.attention import dense_attention
from model.config import LinearScaling, ModelConfig
from serving.request import FinishReason, SamplingParams
from sharding.params import bind
from tests.engines import MIXTRAL, PAGE_SIZE, request, run, tiny_engine, tiny_params

pytestmark = pytest.mark.slow
WINDOW = 10
GEMMA = ModelConfig.tiny(
    num_layers=5, windows=(*[WINDOW, None] * 2, WINDOW), local_rope_theta=500.0,
    rope_scaling=LinearScaling(2.0), attention_softcap=2.0,
    logits_softcap=3.0, query_scale=20.0, qk_norm=True, qkv_bias=True, sandwich_norms=True, norm_offset=1.0,
    scale_embeddings=True, activation="gelu_tanh", tie_embeddings=False,
)  # fmt: skip
MODELS = {"mixtral": MIXTRAL, "gemma": GEMMA}
V = MIXTRAL.vocab_size
PROMPTS = [[(31 * n + 7 * j) % V for j in range(n)] for n in (1, 5, 33, 70)]
REQUESTS = [request(len(ids), ids, SamplingParams(temperature=0.0, max_tokens=16)) for ids in PROMPTS]


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    return MODELS[request.param]


@pytest.fixture(scope="module")
def expected(model):
    """Greedy answers of the dense model, one whole forward pass per token."""
    decoder = bind(model, tiny_params(model))

    @jax.jit
    def next_token(tokens, length):
        positions = jnp.arange(tokens.shape[0])
        logits, _ = decoder(tokens, positions, dense_attention(jnp.zeros_like(positions), positions))
        return jnp.argmax(logits[length - 1])

    def answer(ids):
        for _ in range(16):
            ids = [*ids, int(next_token(jnp.asarray([*ids, *[0] * (96 - len(ids))]), len(ids)))]
        return ids[-16:]

    answers = {str(len(ids)): (answer(ids), FinishReason.LENGTH) for ids in PROMPTS}
    assert len({token for tokens, _ in answers.values() for token in tokens}) > 16, (
        "answers that differ little say little"
    )
    return answers


def test_however_it_is_served_the_answers_are_those_of_dense_attention(model, expected):
    assert run(tiny_engine(model=model), REQUESTS) == expected
    assert run(tiny_engine(model=model, max_tiles=1, trips=8), REQUESTS, arrive_every=2) == expected
    assert run(tiny_engine(model=model, num_pages=26, overlap=False), REQUESTS) == expected
    warm = tiny_engine(model=model)
    assert [run(warm, REQUESTS) for _ in range(2)] == [expected, expected]
    assert warm.stats.prefix_cache_hits > 0


def texts(lengths, max_tokens):
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return [request(n, [(7 * n + 3 * i) % V for i in range(n)], sampling) for n in lengths]


def test_contexts_of_many_windows_are_cold_as_they_are_warm():
    """At page borders. Layers with a window have a few pages only, and of a cached beginning its last ones."""
    requests = texts([*range(129, 134)], 16)
    expected = run(tiny_engine(model=GEMMA, prefix_cache=False), requests)
    warm = tiny_engine(model=GEMMA, max_tiles=1)
    for asked in requests:
        for num_cached in (0, (len(asked.token_ids) - 1) // PAGE_SIZE * PAGE_SIZE):
            before = warm.stats.prefix_cache_hits
            assert run(warm, [asked])[asked.request_id] == expected[asked.request_id]
            assert warm.stats.prefix_cache_hits - before == num_cached


def test_preempted_equals_undisturbed_where_layers_have_pages_of_their_own():
    requests = texts(range(57, 64), 40)
    undisturbed, crowded = (tiny_engine(model=GEMMA, num_pages=n, max_tiles=1, growth_tokens=0) for n in (128, 23))
    assert run(crowded, requests) == run(undisturbed, requests)
    assert crowded.stats.num_preemptions > 0 == undisturbed.stats.num_preemptions


def test_a_follow_up_turn_finds_what_was_given_back():
    """Pages are published before they are given back, also those of an answer."""
    engine = tiny_engine(model=MIXTRAL)
    first = request("first", PROMPTS[2], SamplingParams(temperature=0.0, max_tokens=30))
    [(answer, _)] = run(engine, [first]).values()
    follow_up = request("second", [*PROMPTS[2], *answer, 1, 2, 3], SamplingParams(temperature=0.0, max_tokens=16))
    warm = run(engine, [follow_up])
    assert engine.stats.prefix_cache_hits == (33 + 29) // PAGE_SIZE * PAGE_SIZE
    assert warm == run(tiny_engine(model=MIXTRAL, prefix_cache=False), [follow_up])
