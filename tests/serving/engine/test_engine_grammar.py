"""Grammars in the engine: answers fit, whatever else runs, and nobody else notices."""

import dataclasses
import json
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.attention import dense_attention
from serving.engine.grammar import GrammarCompiler
from serving.engine.masks import keep_allowed, num_words
from serving.errors import InvalidRequest
from serving.request import FinishReason, Grammar, GrammarKind, SamplingParams
from sharding.params import bind
from tests.engines import CONFIG, request, run, tiny_engine, tiny_params
from tests.fakes import byte_tokenizer_json
from tests.grammars import is_valid, schema_grammar

V = CONFIG.vocab_size
END_ID = 128
LONG = SamplingParams(temperature=0.0, max_tokens=110)
BLANKS = tuple(b" \t\r\n")
TERSE = dataclasses.replace(LONG, banned_token_ids=BLANKS)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "yes", None]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
PLAIN = [request(f"plain {n}", [(7 * n + j) % V for j in range(n)]) for n in (1, 5, 33)]


@pytest.fixture(scope="module")
def compiler():
    """Token ids are ASCII codes, so that they fit the tiny model's vocabulary."""
    return GrammarCompiler(byte_tokenizer_json(END_ID), V, [END_ID])


@pytest.fixture
def ask(compiler):
    """A request that follows a grammar."""

    def make(name, grammar, sampling=LONG, prompt=(1, 2, 3)):
        return request(name, prompt, sampling, matcher=compiler.compile(grammar))

    return make


def text_of(answer):
    return "".join(chr(token) for token in answer[0] if token != END_ID)


def requests(ask, count=5):
    """Of all kinds of sampling; made anew for each run, since an answer uses its matcher up."""
    hot = [
        SamplingParams(temperature=1.5, seed=seed, max_tokens=110, banned_token_ids=BLANKS) for seed in range(count - 1)
    ]
    return [
        ask(f"json {i}", schema_grammar(SCHEMA), sampling, range(1, 2 + 9 * i))
        for i, sampling in enumerate([TERSE, *hot])
    ]


@pytest.fixture(scope="module")
def alone():
    """What everybody answers when nobody else is there."""
    made = {}

    def answers_of(wanted):
        for r in wanted:
            if r.request_id not in made:
                made.update(run(tiny_engine(eos=[END_ID]), [r]))
        return made

    return answers_of


def test_answers_fit_and_stop(ask):
    answers = run(tiny_engine(eos=[END_ID]), requests(ask))
    for answer in answers.values():
        assert answer[1] is FinishReason.STOP
        assert is_valid(SCHEMA, json.loads(text_of(answer))), text_of(answer)
    assert len({text_of(answer) for answer in answers.values()}) > 1


@pytest.mark.parametrize(
    "changes",
    [{}, {"overlap": False}, {"num_pages": 40}, pytest.param({"mesh": "data=1,tensor=4"}, marks=pytest.mark.slow)],
    ids=str,
)
def test_together_equals_alone(ask, alone, changes):
    expected = alone([*requests(ask), *PLAIN])
    assert run(tiny_engine(eos=[END_ID], **changes), [*PLAIN, *requests(ask)]) == expected


def test_greedy_equals_the_dense_model_under_the_mask(compiler, ask):
    decoder = bind(CONFIG, tiny_params())

    @jax.jit
    def next_token(tokens, length, mask):
        positions = jnp.arange(tokens.shape[0])
        logits, _ = decoder(tokens, positions, dense_attention(jnp.zeros_like(positions), positions))
        return jnp.argmax(keep_allowed(logits[length - 1][None], jnp.ones(1, bool), mask[None]))

    grammar, ids = Grammar(GrammarKind.REGEX, "[a-m]{3}(x|yy|[0-9]{5})"), [1, 2, 3]
    matcher = compiler.compile(grammar)
    while not matcher.is_stopped:
        mask = jnp.asarray(np.frombuffer(matcher.native.compute_bitmask(), np.int32))
        ids.append(int(next_token(jnp.asarray([*ids, *[0] * (32 - len(ids))]), len(ids), mask)))
        assert matcher.accept(ids[-1])
    answer = run(tiny_engine(eos=[END_ID]), [ask("x", grammar)])["x"]
    assert answer == (ids[3:], FinishReason.STOP)


def test_neighbours_take_no_step_longer(ask):
    def tokens_by_step(wanted):
        engine, by_step = tiny_engine(eos=[END_ID]), []
        for r in wanted:
            engine.submit(r)
        while engine.has_work:
            outputs = {output.request_id: output.token_ids for output in engine.step()}
            by_step.append(outputs.get("plain 5", ()))
        return [len(tokens) for tokens in by_step]

    quiet, beside = tokens_by_step([PLAIN[1]]), tokens_by_step([PLAIN[1], ask("json", schema_grammar(SCHEMA))])
    assert beside[: len(quiet)] == quiet
    assert sum(quiet) == sum(beside) == 12


def test_a_grammar_without_end_is_bounded_by_max_tokens(ask):
    endless = ask("x", Grammar(GrammarKind.REGEX, "a+b"), dataclasses.replace(LONG, banned_token_ids=(ord("b"),)))
    assert run(tiny_engine(eos=[END_ID]), [endless])["x"] == ([ord("a")] * 110, FinishReason.LENGTH)


def test_an_answer_that_cannot_go_on_fails_alone(ask, alone):
    banned = dataclasses.replace(LONG, banned_token_ids=(ord("b"),))
    engine = tiny_engine(eos=[END_ID])
    outputs = []
    for r in (PLAIN[0], ask("bad", Grammar(GrammarKind.REGEX, "ab"), banned)):
        engine.submit(r)
    while engine.has_work:
        outputs += engine.step()
        engine.check_integrity()
    (end,) = [o for o in outputs if o.request_id == "bad" and o.finish_reason]
    assert end.finish_reason is FinishReason.ERROR
    assert isinstance(end.error, InvalidRequest)
    plain = [token for o in outputs if o.request_id == PLAIN[0].request_id for token in o.token_ids]
    assert plain == alone([PLAIN[0]])[PLAIN[0].request_id][0]


def test_ignore_eos_ends_with_the_grammar(ask):
    params = dataclasses.replace(LONG, ignore_eos=True)
    answer = run(tiny_engine(eos=[END_ID]), [ask("x", Grammar(GrammarKind.REGEX, "a{1,3}"), params)])["x"]
    assert answer[1] is FinishReason.STOP
    assert 1 <= len(text_of(answer)) <= 3


def test_aborts_at_every_step_leave_nothing(ask):
    for step in range(6):
        engine = tiny_engine(eos=[END_ID])
        for r in requests(ask, 3):
            engine.submit(r)
        for _ in range(step):
            engine.step()
        assert engine.abort("json 1").finish_reason is FinishReason.ABORT
        while engine.has_work:
            engine.step()
            engine.check_integrity()
        assert engine.load.free_pages == engine.load.total_pages


@pytest.mark.parametrize("V", [1, 31, 32, 33, 160])
def test_masks_keep_what_they_allow(V):
    chosen = random.Random(V).choices([0, 1], k=3 * V)
    allowed_RV = np.asarray(chosen, bool).reshape(3, V)
    padded_RV = np.zeros((3, num_words(V) * 32), bool)
    padded_RV[:, :V] = allowed_RV
    masks_RW = np.packbits(padded_RV, axis=1, bitorder="little").view(np.int32)
    logits_RV = np.arange(3 * V, dtype=np.float32).reshape(3, V)
    kept_RV = keep_allowed(logits_RV, jnp.asarray([True, False, True]), masks_RW)
    expected_RV = np.where(allowed_RV | np.asarray([[False], [True], [False]]), logits_RV, -np.inf)
    np.testing.assert_array_equal(kept_RV, expected_RV)
