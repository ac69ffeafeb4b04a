"""Equalities of the engine: batched, cut, delayed, preempted or sharded, a request gets the same tokens."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from model.attention import dense_attention
from serving.engine.api import EngineRequest
from serving.errors import Overloaded, PromptTooLong
from serving.request import FinishReason, SamplingParams
from sharding.params import bind
from sharding.rules import choose_rules
from sharding.spec import MeshSpec
from tests.engines import CONFIG, GREEDY, request, run, tiny_engine, tiny_params

V = CONFIG.vocab_size
PROMPTS = {str(n): [(31 * n + 7 * j) % V for j in range(n)] for n in (1, 3, 4, 5, 31, 32, 33, 70, 130)}
REQUESTS = [request(name, ids) for name, ids in PROMPTS.items()]
LONG = SamplingParams(temperature=0.0, max_tokens=80)
SEEDED = SamplingParams(temperature=1.3, top_k=40, top_p=0.95, min_p=0.01, seed=-17, max_tokens=12)


@pytest.fixture(scope="module")
def expected():
    """Greedy answers of the dense model, one whole forward pass per token."""
    decoder = bind(CONFIG, tiny_params())

    @jax.jit
    def next_token(tokens, length):
        positions = jnp.arange(tokens.shape[0])
        logits, _ = decoder(tokens, positions, dense_attention(jnp.zeros_like(positions), positions))
        return jnp.argmax(logits[length - 1])

    def answer(ids):
        for _ in range(GREEDY.max_tokens):
            padded = jnp.asarray([*ids, *[0] * (160 - len(ids))])
            ids = [*ids, int(next_token(padded, len(ids)))]
        return ids[-GREEDY.max_tokens :]

    return {name: (answer(ids), FinishReason.LENGTH) for name, ids in PROMPTS.items()}


def test_alone_equals_dense(expected):
    engine = tiny_engine()
    for r in REQUESTS:
        assert run(engine, [r])[r.request_id] == expected[r.request_id]


def test_all_at_once_equals_alone(expected):
    assert run(tiny_engine(), REQUESTS) == expected


@pytest.mark.parametrize("arrive_every", [1, 3])
def test_joining_a_running_batch_equals_alone(expected, arrive_every):
    assert run(tiny_engine(), REQUESTS, arrive_every=arrive_every) == expected


def test_overlapped_equals_synchronous(expected):
    assert run(tiny_engine(overlap=False), REQUESTS) == expected


def test_chunked_prefill_equals_at_once(expected):
    assert run(tiny_engine(max_tiles=1), REQUESTS) == expected


@pytest.mark.parametrize("sampling", [LONG, dataclasses.replace(LONG, temperature=1.2, seed=5)])
def test_preempted_equals_undisturbed(sampling):
    requests = [request(i, [(13 * i + j) % V for j in range(10 + i)], sampling) for i in range(6)]
    undisturbed, crowded = tiny_engine(), tiny_engine(num_pages=44)
    assert run(crowded, requests) == run(undisturbed, requests)
    assert crowded.stats.num_preemptions > 0 == undisturbed.stats.num_preemptions


@pytest.mark.slow
def test_sharded_equals_one_device(expected):
    assert run(tiny_engine(mesh="data=1,tensor=4", trips=8), REQUESTS) == expected


@pytest.mark.slow
def test_what_cannot_be_split_is_replicated_and_the_answers_stay(expected):
    """Over three devices only the MLP can be split: 8 heads, 4 KV heads and a vocabulary of 160 cannot."""
    assert len(choose_rules(CONFIG, MeshSpec(tensor=3)).notes) == 2
    assert run(tiny_engine(mesh="tensor=3"), REQUESTS) == expected


def test_seeded_answers_do_not_depend_on_the_batch():
    seeded = [request(r.request_id, r.token_ids, SEEDED) for r in REQUESTS]
    alone = {}
    for r in seeded:
        alone |= run(tiny_engine(), [r])
    assert run(tiny_engine(), seeded) == alone
    assert len({tuple(tokens) for tokens, _ in alone.values()}) == len(alone)


def test_requests_without_a_seed_differ():
    params = SamplingParams(temperature=1.5, max_tokens=12)
    answers = run(tiny_engine(), [request(i, [1, 2, 3], params) for i in range(4)])
    assert len({tuple(tokens) for tokens, _ in answers.values()}) == 4


def test_eos_ends_the_answer_unless_ignored(expected):
    tokens, _ = expected["5"]
    eos = tokens[4]
    first = tokens.index(eos)
    answers = run(tiny_engine(eos=[eos]), [REQUESTS[3]])
    assert answers["5"] == (tokens[: first + 1], FinishReason.STOP)
    ignoring = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    assert run(tiny_engine(eos=[eos]), [request("5", PROMPTS["5"], ignoring)]) == {"5": expected["5"]}


def test_stop_token_ids_end_the_answer(expected):
    tokens, _ = expected["5"]
    params = SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=(tokens[2],))
    answers = run(tiny_engine(), [request("5", PROMPTS["5"], params)])
    assert answers["5"] == (tokens[: tokens.index(tokens[2]) + 1], FinishReason.STOP)


def test_an_answer_fills_the_context_and_not_one_token_more():
    params = SamplingParams(temperature=0.0)
    tokens, reason = run(tiny_engine(), [request("x", range(150), params)])["x"]
    assert (len(tokens), reason) == (10, FinishReason.LENGTH)


def test_abort_frees_slot_and_pages_at_once_and_leaves_the_others_alone(expected):
    engine = tiny_engine()
    for r in REQUESTS:
        engine.submit(r)
    for _ in range(3):
        engine.step()
    free_before = engine.load.free_pages
    aborted = engine.abort("5")
    assert aborted.finish_reason is FinishReason.ABORT
    engine.check_integrity()
    assert engine.load.free_pages > free_before
    assert engine.abort("5") is None
    rest = run_to_end(engine)
    assert "5" not in {output.request_id for output in rest}
    last = {output.request_id: output.finish_reason for output in rest if output.finish_reason}
    assert last == {r.request_id: FinishReason.LENGTH for r in REQUESTS if r.request_id != "5"}


def test_abort_of_a_waiting_request():
    engine = tiny_engine()
    for i in range(6):
        engine.submit(request(i, [1, 2, 3]))
    for _ in range(2):  # two prefill tiles a step
        engine.step()
    assert engine.load.num_waiting == 2
    assert engine.abort("5").finish_reason is FinishReason.ABORT
    engine.check_integrity()
    run_to_end(engine)


def test_a_full_queue_is_refused_at_once():
    engine = tiny_engine(max_waiting=2)
    engine.submit(request(0, [1]))
    engine.submit(request(1, [1]))
    with pytest.raises(Overloaded, match="2 requests are waiting"):
        engine.submit(request(2, [1]))


def test_a_prompt_that_can_never_fit_is_refused_with_its_numbers():
    engine = tiny_engine(num_pages=10)  # 40 tokens
    with pytest.raises(PromptTooLong, match=r"the prompt has 40 tokens.*40 together"):
        engine.submit(request("x", range(40)))


def test_failing_all_ends_each_request_once_and_leaves_nothing_behind():
    engine = tiny_engine()
    for r in REQUESTS:
        engine.submit(r)
    engine.step()
    outputs = engine.fail_all(Overloaded("test"))
    assert sorted(o.request_id for o in outputs) == sorted(PROMPTS)
    assert all(o.finish_reason is FinishReason.ERROR for o in outputs)
    engine.check_integrity()
    assert not engine.has_work and engine.load.free_pages == engine.load.total_pages


def test_the_tokens_of_an_aborted_request_are_not_given_to_its_successor_in_the_slot(expected):
    """The step in flight still carries the old request's row; the new one starts in the same slot and pages."""
    engine = tiny_engine(num_pages=40)
    for _ in range(10):
        engine.submit(EngineRequest("old", tuple(range(60)), GREEDY))
        for _ in range(4):
            engine.step()
        engine.abort("old")
        assert run(engine, [REQUESTS[6]]) == {"33": expected["33"]}


def run_to_end(engine):
    outputs = []
    while engine.has_work:
        outputs += engine.step()
        engine.check_integrity()
    return outputs
