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
    windows=(WINDOW, None), local_rope_theta=500.0, rope_scaling=LinearScaling(2.0), attention_softcap=2.0,
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


def test_a_follow_up_turn_finds_what_was_given_back():
    """Pages are published before they are given back, also those of an answer."""
    engine = tiny_engine(model=MIXTRAL)
    first = request("first", PROMPTS[2], SamplingParams(temperature=0.0, max_tokens=30))
    [(answer, _)] = run(engine, [first]).values()
    follow_up = request("second", [*PROMPTS[2], *answer, 1, 2, 3], SamplingParams(temperature=0.0, max_tokens=16))
    warm = run(engine, [follow_up])
    assert engine.stats.prefix_cache_hits == (33 + 29) // PAGE_SIZE * PAGE_SIZE
    assert warm == run(tiny_engine(model=MIXTRAL, prefix_cache=False), [follow_up])
