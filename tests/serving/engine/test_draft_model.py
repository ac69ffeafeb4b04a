"""A draft model guesses for another one: the same answers as without it, whatever it guesses, and in fewer calls where
it guesses well. That its own pages hold what they should shows in its guesses: a model that drafts for itself is always
right, after preemption, from cached pages and behind calls that it took no part in."""

import dataclasses
import json
import random

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv.page_keys import PageKeys
from kv.page_pool import PagePool
from kv.page_table import PageTable
from model.card import TextAssets
from model.config import ModelConfig
from model.errors import CheckpointError
from serving.config import EngineConfig
from serving.engine import build
from serving.engine.batch import NOTHING, StepShape
from serving.engine.draft_check import check_draft
from serving.engine.draft_step import CATCH_UP_TILE, num_tiles, pack_chunks
from serving.engine.drafters import ModelDrafter
from serving.engine.sequence import Sequence
from serving.engine.step import make_step
from serving.errors import ConfigError, EngineFailed
from serving.request import SamplingParams
from sharding import checkpoint
from tests.engines import CONFIG, WrittenPages, check_random_trace, request, run, tiny_card, tiny_engine, tiny_params

V = CONFIG.vocab_size
D = 4
ITSELF, STRANGER = 1, 7  # seeds of a draft model's weights; the served model has the first
GREEDY = SamplingParams(temperature=0.0, max_tokens=40)
WARM = SamplingParams(temperature=1.0, seed=9, max_tokens=41)
HOT = SamplingParams(temperature=1.2, top_k=30, top_p=0.9, seed=-3, logit_bias=((5, 2.0),), min_tokens=5, max_tokens=30)
KINDS = [GREEDY, WARM, HOT, dataclasses.replace(GREEDY, repetition_penalty=1.2), dataclasses.replace(WARM, logprobs=2)]


def prompt(seed):
    return [(17 * seed + 5 * i * i) % V for i in range(9 + 11 * seed)]


def requests(count):
    return [request(i, prompt(i), KINDS[i % len(KINDS)]) for i in range(count)]


@pytest.fixture(scope="module")
def expected():
    return run(tiny_engine(prefix_cache=False), requests(9))


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"overlap": False}, {"trips": 8}, {"num_pages": 60, "trips": 3}], ids=str)
@pytest.mark.parametrize("drafter", [ITSELF, STRANGER])
def test_drafted_equals_plain(expected, drafter, changes):
    engine = tiny_engine(drafts=D, drafter=drafter, **changes)
    assert run(engine, requests(9)) == expected
    assert run(engine, requests(9), arrive_every=9) == expected
    drafted, accepted = engine.stats.num_draft_tokens, engine.stats.num_accepted_tokens
    assert drafted > 50
    assert accepted == drafted if drafter == ITSELF else accepted < 0.2 * drafted


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [GREEDY, WARM])
def test_a_lonely_stream_takes_fewer_calls(sampling):
    asked = request("x", prompt(5), sampling)
    plain, engine = tiny_engine(), tiny_engine(drafts=D, drafter=ITSELF)
    assert run(engine, [asked]) == run(plain, [asked])
    assert engine.stats.num_steps == plain.stats.num_steps - engine.stats.num_accepted_tokens
    assert engine.stats.num_accepted_tokens > 25


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_random_traces_under_pressure(expected, seed):
    """Arrivals, aborts, preemption, shared pages: with integrity after every step, and published pages unwritten."""
    rng = random.Random(seed)
    pool, written = PagePool(rng.randrange(44, 60) + 1), WrittenPages()
    engine = tiny_engine(drafts=D, drafter=ITSELF, trips=[1, 5][seed % 2], pool=pool, watch=written)
    check_random_trace(engine, sorted(requests(9) * 3, key=lambda r: r.request_id), expected, rng, pool, written)
    stats = engine.stats
    assert pool.num_free == pool.num_usable and stats.num_preemptions > 0 < stats.prefix_cache_hits
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 50


class Readings:
    """Counts tokens that the draft model is told to read."""

    def __init__(self, monkeypatch, engine):
        self.num_tokens = 0
        draft = engine._programs.draft
        catch_up = draft.catch_up

        def counted(chunks, table):
            self.num_tokens += sum(chunk.length for chunk in chunks)
            catch_up(chunks, table)

        monkeypatch.setattr(draft, "catch_up", counted)


@pytest.mark.slow
def test_what_the_draft_model_has_read_lies_in_cached_pages_too(monkeypatch):
    engine = tiny_engine(drafts=D, drafter=ITSELF)
    read = Readings(monkeypatch, engine)
    first = prompt(6)
    [(answer, _)] = run(engine, [request("first", first, GREEDY)]).values()
    assert read.num_tokens >= len(first)
    read.num_tokens = 0
    follow_up = [*first, *answer, 3, 1, 4]
    run(engine, [request("second", follow_up, GREEDY)])
    assert read.num_tokens < 10
    assert engine.stats.num_accepted_tokens == engine.stats.num_draft_tokens


@pytest.mark.slow
def test_a_draft_model_that_does_not_pay_is_left_alone_and_catches_up_when_it_is_tried_again(monkeypatch):
    engine = tiny_engine(drafts=D, drafter=ITSELF, verify_s=0.1)
    read = Readings(monkeypatch, engine)
    run(engine, [request("x", prompt(2), GREEDY)])
    assert engine.stats.num_drafts == read.num_tokens == 0
    engine = tiny_engine(drafts=D, drafter=ITSELF, verify_s=0.1)
    run(engine, [request("x", prompt(1), dataclasses.replace(GREEDY, max_tokens=100))])
    assert engine.stats.num_drafts == 2 and engine.stats.num_accepted_tokens == 2 * D, "one to catch up, one to measure"
    assert read.num_tokens > 64, "prompt and answer so far, in several calls"


@pytest.mark.slow
def test_a_draft_model_without_numbers_guesses_nothing_and_harms_nobody(expected):
    engine = tiny_engine(drafts=D, drafter=ITSELF)
    draft = engine._programs.draft
    whole = draft.weights
    broken = [leaf * jnp.nan if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf for leaf in whole.leaves]
    draft.weights = dataclasses.replace(whole, leaves=tuple(broken))
    assert run(engine, requests(9), arrive_every=9) == expected
    assert engine.stats.num_accepted_tokens == 0 < engine.stats.num_draft_tokens


@pytest.mark.slow
def test_after_a_failed_step_the_draft_model_starts_anew_too(expected):
    engine = tiny_engine(drafts=D, drafter=ITSELF)
    for asked in requests(3):
        engine.submit(asked)
    for _ in range(20):
        engine.step()
    for leaf in jax.tree.leaves(engine._programs.draft.cache):
        leaf.delete()  # as a call that raises takes the arrays with it
    engine.recover(EngineFailed("lost."))
    assert run(engine, requests(9), arrive_every=9) == expected
    assert engine.stats.num_accepted_tokens > 100


@pytest.mark.slow
def test_a_smaller_model_is_loaded_beside_the_one_it_drafts_for(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "_compile", lambda *_: None)
    target = ModelConfig.tiny(num_layers=1)
    small = dataclasses.replace(target, embed_dim=32, num_heads=2, num_kv_heads=1, mlp_dim=48)
    for name, config in {"target": target, "small": small}.items():
        checkpoint.save(tmp_path / name, tiny_params(config), tiny_card(config))
    config = EngineConfig(str(tmp_path / "target"), num_slots=1, max_seq_len=64, num_pages=4)
    config = dataclasses.replace(config, speculate=f"draft:{tmp_path / 'small'}:2")
    thread, _ = build.build_engine(config, lambda _: None)
    programs, shape = thread._engine._programs, StepShape(0, 1, 2)
    assert programs.draft.cache.v_LPKGH.shape == (1, programs.num_pages, 1, 16, 16)
    step = make_step(programs.spec, shape, programs._decode_weights.treedef, programs.draft.weights.treedef)
    packed = jax.ShapeDtypeStruct((programs.spec.layout(shape).size,), jnp.int32)
    arrays = programs._decode_weights.leaves, *programs._state, packed, programs.new_masks(1)
    tokens_RI, *_, draft_cache = jax.eval_shape(step, *arrays, *programs._draft_of(shape))
    assert (tokens_RI.shape, draft_cache.v_LPKGH.shape) == ((1, 3), programs.draft.cache.v_LPKGH.shape)
    with pytest.raises(CheckpointError, match="nowhere"):
        build.build_engine(dataclasses.replace(config, speculate=f"draft:{tmp_path / 'nowhere'}:2"), lambda _: None)


def sequence(tokens, num_drafted=0):
    made = Sequence(request("x", range(tokens), GREEDY), 10, 0, PageKeys(16, ""))
    made.num_drafted = num_drafted
    return made


@given(st.lists(st.tuples(st.integers(1, 90), st.integers(0, 89)), max_size=8), st.integers(1, 6))
@settings(max_examples=100, deadline=None)
def test_what_was_not_read_is_read_in_order_within_the_limit(lengths, max_tiles):
    sequences = [sequence(tokens, min(drafted, tokens - 1)) for tokens, drafted in lengths]
    drafter = ModelDrafter(max_tiles)
    for _ in range(60):
        ready, chunks = drafter.get_ready(sequences)
        assert num_tiles(chunks) <= max_tiles
        for chunk in chunks:
            assert chunk.start == chunk.sequence.num_drafted and chunk.length > 0
            chunk.sequence.num_drafted += chunk.length
        assert ready == [s for s in sequences if s.num_drafted == len(s.token_ids) - 1]
        if ready == sequences:
            return
    raise AssertionError("some are never ready")


def test_chunks_are_packed_in_tiles_of_one_sequence():
    table = PageTable(2, 4)
    for slot, row in enumerate(([5, 6], [7])):
        table.append(slot, len(row))
        table.fill(slot, row)
    one, other = sequence(40), sequence(9)
    one.slot, other.slot = 0, 1
    _, chunks = ModelDrafter(8).get_ready([one, other])
    packed = pack_chunks(chunks, table, 8)
    J, Q = 4, CATCH_UP_TILE
    pages, tokens, positions = packed[:, :J], packed[:, J : J + Q], packed[:, J + Q :]
    assert pages[:5].tolist() == [[5, 6, 0, 0]] * 3 + [[7, 0, 0, 0], [0] * 4]
    written = [row[row != NOTHING].tolist() for row in positions]
    assert written == [[*range(16)], [*range(16, 32)], [*range(32, 39)], [*range(8)], [], [], [], []]
    assert tokens[2, :7].tolist() == written[2]


def card(name, tokenizer="{}", **changes):
    config = dataclasses.replace(CONFIG, **changes)
    return dataclasses.replace(tiny_card(config), name=name, text=TextAssets(tokenizer))


def test_models_that_do_not_fit_together_are_refused_by_name():
    family = json.dumps({"model": {"vocab": {"a": 1}}, "truncation": None})
    same = json.dumps({"truncation": {"max_length": 9}, "model": {"vocab": {"a": 1}}})
    large = card("large", family)
    check_draft(card("small", same, num_layers=1), large, 200)
    with pytest.raises(ConfigError, match=r"small cannot draft for large: it has 99 tokens instead of 160"):
        check_draft(card("small", family, vocab_size=99), large, 200)
    with pytest.raises(ConfigError, match=r"small cannot draft for large: their tokenizers differ"):
        check_draft(card("small", '{"model": {"vocab": {"b": 1}}}'), large, 200)
    with pytest.raises(ConfigError, match=r"its context has 100 tokens, a request may have 200; lower --max-seq-len"):
        check_draft(card("small", family, max_seq_len=100), large, 200)


@pytest.mark.parametrize(
    ("text", "path"), [("draft:/m/small:4", "/m/small"), ("draft:gs://b/small:15", "gs://b/small")]
)
def test_the_flag_names_a_checkpoint_and_a_number(text, path):
    config = EngineConfig("/m/large", quantize="int8", kv_dtype="int8", speculate=text)
    assert config.max_drafts == int(text.rpartition(":")[2])
    assert config.draft == EngineConfig(path, kv_dtype="int8"), "its weights are taken as they lie"
    assert EngineConfig("x", speculate="ngram:3").draft is EngineConfig("x").draft is None


@pytest.mark.parametrize(
    "text", ["draft:4", "draft::4", "draft:/m/small", "draft:/m:16", "draft:/m:0", "draft:/m:x", "x:4"]
)
def test_a_flag_that_cannot_be_read_is_refused(text):
    with pytest.raises(ConfigError, match=r"--speculate reads like ngram:4 or draft:PATH:4"):
        EngineConfig("x", speculate=text)
