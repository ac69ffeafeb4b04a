"""Speculative decoding: the same answers as without it, in fewer calls, and only where it pays."""

import dataclasses
import math
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv.page_keys import PageKeys
from kv.page_pool import PagePool
from serving.engine.batch import NOT_FINITE
from serving.engine.drafters import TextDrafter
from serving.engine.guesses import HOPE, Guesses
from serving.engine.ngrams import SIZES, NgramIndex
from serving.engine.sequence import Sequence
from serving.engine.slot_state import empty_slots
from serving.engine.slots import SlotTable
from serving.engine.speculation import PROBE_EVERY, Speculation, pays
from serving.engine.trips import ENDED
from serving.engine.verify import accept, draft_rows
from serving.request import FinishReason, SamplingParams
from tests.engines import CONFIG, WrittenPages, check_random_trace, request, run, tiny_engine
from tests.sampler import DRAWS, VOCAB, assert_follows, rows, sample_all

V = CONFIG.vocab_size
D = 4
EOS = 11
GREEDY = SamplingParams(temperature=0.0, max_tokens=40)
WARM = SamplingParams(temperature=0.1, seed=9, max_tokens=41)
HOT = SamplingParams(temperature=1.2, top_k=30, top_p=0.9, seed=-3, logit_bias=((5, 2.0),), min_tokens=5, max_tokens=30)
KINDS = [GREEDY, WARM, HOT, dataclasses.replace(GREEDY, repetition_penalty=1.2), dataclasses.replace(WARM, logprobs=2)]


def prompt(seed, repeats=4):
    """Repeats itself, so that there is something to guess from."""
    return [(17 * seed + 5 * i) % V for i in range(4 + seed)] * repeats


def requests(count, kinds=KINDS):
    return [request(i, prompt(i), kinds[i % len(kinds)]) for i in range(count)]


@pytest.fixture(scope="module")
def expected():
    return run(tiny_engine(eos=[EOS], prefix_cache=False), requests(9))


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"overlap": False}, {"trips": 8}, {"num_pages": 60, "trips": 3}], ids=str)
def test_speculative_equals_plain(expected, changes):
    engine = tiny_engine(eos=[EOS], drafts=D, **changes)
    assert run(engine, requests(9)) == expected
    assert run(engine, requests(9), arrive_every=9) == expected
    assert 0 < engine.stats.num_accepted_tokens < engine.stats.num_draft_tokens


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [GREEDY, WARM])
def test_a_lonely_stream_takes_fewer_calls(sampling):
    asked = request("x", prompt(5), sampling)
    plain, engine = tiny_engine(), tiny_engine(drafts=D)
    assert run(engine, [asked]) == run(plain, [asked])
    assert engine.stats.num_steps == plain.stats.num_steps - engine.stats.num_accepted_tokens
    assert engine.stats.num_accepted_tokens > 5


@pytest.mark.slow
def test_a_stop_among_the_guesses_ends_the_answer_there():
    [(plain, _)] = run(tiny_engine(), [request("x", prompt(4), GREEDY)]).values()
    for token in set(plain):
        stop = dataclasses.replace(GREEDY, stop_token_ids=(token,))
        answer = run(tiny_engine(drafts=D), [request("x", prompt(4), stop)])["x"]
        assert answer == (plain[: plain.index(token) + 1], FinishReason.STOP)


@pytest.mark.slow
def test_a_request_learns_how_its_guesses_went():
    engine = tiny_engine(drafts=D)
    engine.submit(request("x", prompt(5), GREEDY))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    stats = engine.stats
    assert outputs[-1].drafted_tokens == stats.num_draft_tokens
    assert 0 < outputs[-1].accepted_tokens == stats.num_accepted_tokens
    assert stats.num_drafts <= stats.num_draft_tokens <= D * stats.num_drafts


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_random_traces_under_pressure(expected, seed):
    """Arrivals, aborts, preemption, shared pages: with integrity after every step, and published pages unwritten."""
    rng = random.Random(seed)
    pool, written = PagePool(rng.randrange(44, 70) + 1), WrittenPages()
    engine = tiny_engine(eos=[EOS], drafts=D, trips=[1, 5][seed % 2], pool=pool, watch=written)
    check_random_trace(engine, requests(9) * 3, expected, rng, pool, written)
    assert pool.num_free == pool.num_usable and engine.stats.num_accepted_tokens > 0


@pytest.mark.slow
def test_nothing_is_guessed_where_it_does_not_pay():
    engine = tiny_engine(drafts=D, verify_s=0.1)
    run(engine, [request("x", prompt(5), GREEDY)])
    assert engine.stats.num_drafts == 0
    engine = tiny_engine(drafts=D, verify_s=0.1)
    run(engine, [request("x", prompt(5, repeats=2), dataclasses.replace(GREEDY, max_tokens=PROBE_EVERY + 40))])
    assert engine.stats.num_drafts == 1, "from time to time it is tried again"


def test_a_call_pays_if_it_gives_more_tokens_a_second():
    assert pays(5.0, 2, plain_s=0.01, verify_s=0.02)
    assert not pays(3.9, 2, plain_s=0.01, verify_s=0.02)
    assert not pays(99.0, 1, plain_s=math.inf, verify_s=math.inf), "the plain call is measured first"
    assert pays(1.1, 1, plain_s=0.01, verify_s=math.inf)


def test_a_sequence_whose_guesses_fail_expects_little_and_can_recover():
    guesses = Guesses()
    assert guesses.expect(2) == pytest.approx(HOPE + HOPE**2)
    for _ in range(10):
        guesses.learn(4, 0)
    assert guesses.expect(4) < 0.1
    for _ in range(10):
        guesses.learn(4, 4)
    assert guesses.expect(4) > 3
    assert (guesses.num_drafted, guesses.num_accepted) == (80, 40)


def test_a_sequence_without_guesses_expects_what_others_had():
    def expected(learnt):
        speculation, table = Speculation(2, TextDrafter()), SlotTable(1)
        for guesses in learnt:
            speculation.learn(*guesses)
        asked = request("x", [1, 2, 1, 2, 1, 2], GREEDY)
        sequence = Sequence(asked, 9, 0, PageKeys(4, ""))
        table.enter(sequence)
        table.decodes_B[0] = True
        table.num_tokens_B[0] = 6
        drafts_BD, _ = speculation.draft(table, plain_s=0.01, verify_s=0.02)
        return sequence.guesses.rate, drafts_BD is not None

    assert expected([]) == (HOPE, True)
    rate, pays = expected([(2, 0)] * 30)
    assert rate < 0.1 and not pays
    rate, pays = expected([(2, 0)] * 30 + [(2, 2)] * 30)
    assert rate > 0.9 and pays


tokens_lists = st.lists(st.integers(0, 3), min_size=1, max_size=40)


@given(tokens_lists, st.integers(1, 6), st.lists(st.integers(1, 40), max_size=3))
@settings(max_examples=200)
def test_a_guess_is_what_followed_the_last_time(tokens, most, looks):
    """Read at once or in pieces, against a search from the end."""

    def search():
        for size in SIZES:
            for at in range(len(tokens) - 1, size - 1, -1):
                if len(tokens) > size and tokens[at - size : at] == tokens[len(tokens) - size :]:
                    text = list(tokens)
                    for i in range(most):
                        text.append(text[at + i])
                    return text[len(tokens) :]
        return []

    index = NgramIndex()
    for end in sorted(looks):
        index.propose(tokens[:end], most)
    assert index.propose(tokens, most) == search()


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_what_is_accepted_equals_a_loop(data):
    R, small = 5, st.integers(0, 2)
    chosen = data.draw(st.lists(st.lists(small, min_size=4, max_size=4), min_size=R, max_size=R))
    counts = data.draw(st.lists(st.integers(0, 3), min_size=R, max_size=R))
    drafts = [[data.draw(small) if i < n else -1 for i in range(3)] for n in counts]
    broken = data.draw(st.lists(st.lists(st.sampled_from([False] * 5 + [True]), min_size=4, max_size=4),
                                min_size=R, max_size=R))  # fmt: skip
    sampled, stop = data.draw(st.lists(st.booleans(), min_size=R, max_size=R)), 2
    arrays = [np.asarray(x) for x in (chosen, drafts, broken, sampled, [[stop, -1]] * R)]
    tokens, newest = jax.tree.map(np.asarray, _accept(*arrays))
    for r in range(R):
        expected = []
        for i in range(4 if sampled[r] else 0):
            expected.append(NOT_FINITE if broken[r][i] else chosen[r][i])
            if broken[r][i] or i == 3 or chosen[r][i] != drafts[r][i]:
                break
        assert tokens[r].tolist() == expected + [ENDED] * (4 - len(expected))
        if sampled[r]:
            ends = stop in expected or NOT_FINITE in expected
            assert newest[r] == (ENDED if ends else expected[-1])


_accept = jax.jit(accept)


@pytest.mark.parametrize("params", [{"temperature": 1.0}, {"temperature": 1.3, "top_k": 12, "top_p": 0.8}], ids=str)
def test_accepted_and_rejected_tokens_together_follow_the_distribution(params):
    """Every row guesses the likeliest token; what comes out at the first place, and behind a right guess, is drawn."""
    rng = np.random.default_rng(4)
    logits_QV = rng.standard_normal((2, VOCAB)).astype(np.float32) * 1.5
    guess = int(logits_QV[0].argmax())
    asked = draft_rows(rows(DRAWS, position=3, seed=jnp.arange(DRAWS), **params), 2)
    chosen_T, _ = sample_all(jnp.tile(logits_QV, (DRAWS, 1)), asked, empty_slots(1, VOCAB))
    none, sampled = jnp.zeros((DRAWS, 2), bool), jnp.ones(DRAWS, bool)
    tokens_RQ, _ = _accept(
        chosen_T.reshape(DRAWS, 2), jnp.full((DRAWS, 1), guess), none, sampled, jnp.full((DRAWS, 1), -1)
    )
    first, second = np.asarray(tokens_RQ).T
    assert_follows(first, probabilities(logits_QV[0], params))
    assert ((second != ENDED) == (first == guess)).all()
    assert_follows(second[first == guess], probabilities(logits_QV[1], params))


def probabilities(logits_V, params):
    """Temperature, top-k, top-p."""
    scaled = logits_V.astype(np.float64) / params["temperature"]
    p = np.exp(scaled - scaled.max())
    order = np.argsort(-p)
    p[order[params.get("top_k", VOCAB) :]] = 0
    mass = np.cumsum(p[order]) / p.sum()
    p[order[np.searchsorted(mass, params.get("top_p", 1.0)) + 1 :]] = 0
    return p / p.sum()
