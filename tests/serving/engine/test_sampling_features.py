"""Penalties, biases, bans, min_tokens and logprobs through the engine: the newest token is on the device only, and
still every answer equals a loop over the dense model in numpy, alone, in a batch, overlapped and preempted."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.attention import dense_attention
from serving.errors import InvalidRequest
from serving.request import FinishReason, SamplingParams
from sharding.params import bind
from tests.engines import CONFIG, MAX_SEQ_LEN, request, run, tiny_engine, tiny_params
from tests.sampler import edited

V = CONFIG.vocab_size
EOS = 11
PROMPT = [3, 9, 9, 27, 5]
PENALISED = SamplingParams(
    temperature=0.0, max_tokens=30, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.25
)
STEERED = SamplingParams(
    temperature=0.0,
    max_tokens=30,
    frequency_penalty=-0.5,
    logit_bias=tuple((i, 0.1 * (i % 7)) for i in range(0, V, 3)),
    banned_token_ids=(1, 2, 4),
    min_tokens=20,
    ignore_eos=True,
)
ALL = dataclasses.replace(
    STEERED, temperature=1.1, top_k=50, top_p=0.95, min_p=0.01, seed=3, repetition_penalty=1.2, presence_penalty=0.3
)


@pytest.fixture(scope="module")
def logits_after():
    """The dense model's next logits, float32[V], for any ids."""
    decoder = bind(CONFIG, tiny_params())

    @jax.jit
    def forward(tokens, length):
        positions = jnp.arange(tokens.shape[0])
        logits, _ = decoder(tokens, positions, dense_attention(jnp.zeros_like(positions), positions))
        return logits[length - 1]

    return lambda ids: np.asarray(forward(jnp.asarray([*ids, *[0] * (MAX_SEQ_LEN - len(ids))]), len(ids)))


def by_hand(logits_after, prompt, params, stop_ids=()):
    answer = []
    while len(answer) < params.max_tokens:
        logits = edited(logits_after([*prompt, *answer]), params, prompt, answer, stop_ids)
        answer.append(int(logits.argmax()))
        if answer[-1] in stop_ids:
            break
    return answer


@pytest.mark.parametrize("params", [PENALISED, STEERED], ids=["penalised", "steered"])
@pytest.mark.parametrize("overlap", [True, False])
def test_the_answer_equals_a_loop_over_the_dense_model(logits_after, params, overlap):
    tokens, _ = run(tiny_engine(overlap=overlap), [request("x", PROMPT, params)])["x"]
    assert tokens == by_hand(logits_after, PROMPT, params)
    assert tokens != run(tiny_engine(), [request("x", PROMPT, SamplingParams(0.0, max_tokens=30))])["x"][0]


def test_alone_equals_in_a_batch_of_all_kinds():
    kinds = [PENALISED, ALL, SamplingParams(0.0, max_tokens=30), STEERED, dataclasses.replace(ALL, seed=4)]
    requests = [request(i, [*PROMPT, i], params) for i, params in enumerate(kinds * 2)]
    alone = {}
    for r in requests:
        alone |= run(tiny_engine(), [r])
    assert run(tiny_engine(), requests) == alone
    assert run(tiny_engine(), requests, arrive_every=2) == alone


def test_preempted_equals_undisturbed():
    kinds = [dataclasses.replace(p, max_tokens=80) for p in (ALL, PENALISED, STEERED)]
    requests = [request(i, [(13 * i + j) % V for j in range(10 + i)], kinds[i % 3]) for i in range(6)]
    undisturbed, crowded = tiny_engine(), tiny_engine(num_pages=44)
    assert run(crowded, requests) == run(undisturbed, requests)
    assert crowded.stats.num_preemptions > 0


def test_min_tokens_holds_every_stop_back_and_no_longer(logits_after):
    plain = SamplingParams(temperature=0.0, max_tokens=30)
    first, second = by_hand(logits_after, PROMPT, plain)[2:4]
    params = dataclasses.replace(plain, stop_token_ids=(second,), min_tokens=8)
    tokens, _ = run(tiny_engine(eos=[first]), [request("x", PROMPT, params)])["x"]
    assert tokens == by_hand(logits_after, PROMPT, params, (first, second))
    assert not {first, second} & set(tokens[:8])
    loose = dataclasses.replace(params, min_tokens=0)
    expected = by_hand(logits_after, PROMPT, loose, (first, second)), FinishReason.STOP
    assert run(tiny_engine(eos=[first]), [request("x", PROMPT, loose)])["x"] == expected


def test_the_first_greedy_token_at_minus_100_never_comes_and_any_at_plus_100_always():
    plain = SamplingParams(temperature=0.0, max_tokens=20)
    token = run(tiny_engine(), [request("x", PROMPT, plain)])["x"][0][0]
    never = dataclasses.replace(plain, logit_bias=((token, -100.0),))
    assert token not in run(tiny_engine(), [request("x", PROMPT, never)])["x"][0]
    always = dataclasses.replace(plain, logit_bias=((77, 100.0),), temperature=1.0)
    assert set(run(tiny_engine(), [request("x", PROMPT, always)])["x"][0]) == {77}


def logprobs_of(engine, requests):
    for r in requests:
        engine.submit(r)
    got = {r.request_id: [] for r in requests}
    while engine.has_work:
        for output in engine.step():
            assert len(output.logprobs) in (0, len(output.token_ids))
            got[output.request_id] += zip(output.token_ids, output.logprobs, strict=False)
    return got


def test_logprobs_are_the_dense_models_and_only_for_those_who_asked(logits_after):
    asking = dataclasses.replace(ALL, logprobs=3, max_tokens=10, min_tokens=0)
    requests = [request("asks", PROMPT, asking), request("not", PROMPT, dataclasses.replace(asking, logprobs=None))]
    requests.append(request("few", PROMPT, dataclasses.replace(asking, logprobs=0)))
    got = logprobs_of(tiny_engine(), requests)
    assert got["not"] == []
    assert all(entry.top == () for _, entry in got["few"])
    assert [token for token, _ in got["few"]] == [token for token, _ in got["asks"]]
    ids = list(PROMPT)
    for token, entry in got["asks"]:
        logits = logits_after(ids).astype(np.float64)
        expected = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        assert entry.logprob == pytest.approx(expected[token], abs=1e-4)
        assert [p for _, p in entry.top] == pytest.approx(np.sort(expected)[::-1][:3], abs=1e-4)
        ids.append(token)


def test_too_many_edits_are_refused_at_submit():
    engine = tiny_engine(eos=range(300))
    params = SamplingParams(logit_bias=tuple((i, 1.0) for i in range(300)), min_tokens=1)
    with pytest.raises(InvalidRequest, match="at most 512"):
        engine.submit(request("x", PROMPT, params))
    assert not engine.has_work


@pytest.mark.slow
def test_a_vocabulary_over_four_devices_gives_the_same_answers():
    requests = [request(i, [*PROMPT, i], p) for i, p in enumerate([PENALISED, ALL, STEERED])]
    assert run(tiny_engine(mesh="data=1,tensor=4"), requests) == run(tiny_engine(), requests)


def test_biases_over_the_whole_vocabulary():
    def answer(**params):
        return run(tiny_engine(), [request("x", PROMPT, SamplingParams(temperature=0.0, max_tokens=5, **params))])["x"]

    forced = tuple((i, 100.0 if i == 7 else -100.0) for i in range(V))
    assert answer(logit_bias=forced) == ([7] * 5, FinishReason.LENGTH)
    assert answer(logit_bias=tuple((i, 0.0) for i in range(V))) == answer()
    steered = answer(logit_bias=forced, banned_token_ids=(7,), stop_token_ids=(8,), min_tokens=3)
    assert 7 not in steered[0] and 8 not in steered[0][:3]
