"""Bands and deadlines over whole traces, without a device: everyone ends, nobody starves, batch makes way."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv.page_table import pages_for
from serving.engine.build import TILE_TOKENS
from serving.engine.plan import Limits
from serving.engine.waiting import SPARE
from serving.errors import DeadlineExceeded
from serving.request import FinishReason, Priority, SamplingParams
from tests.engines import PAGE_SIZE, counted, counting_engine, request

PATIENCE = 20
LIMITS = Limits(PAGE_SIZE, TILE_TOKENS, max_tiles=2, growth_tokens=8, patience=PATIENCE, max_promoted=1)
BATCH, INTERACTIVE = Priority.BATCH, Priority.INTERACTIVE


def ask(name, prompt, answer, priority=INTERACTIVE, **changes):
    tokens = [(13 * prompt + 7 * i) % 50 for i in range(prompt)]
    return request(name, tokens, SamplingParams(max_tokens=answer), priority=priority, **changes)


class Trace:
    """Drives an engine step by step, checks it, and remembers when each request came and ended."""

    def __init__(self, max_trips=1, **changes):
        self.engine = counting_engine(dataclasses.replace(LIMITS, max_trips=max_trips), **changes)
        self.step, self.tokens, self.asked, self.came, self.ended = 0, {}, {}, {}, {}

    def submit(self, asked):
        self.engine.submit(asked)
        self.asked[asked.request_id], self.came[asked.request_id] = asked, self.step
        self.tokens[asked.request_id] = []

    def abort(self, name):
        if output := self.engine.abort(name):
            self.ended[name] = self.step, output

    def advance(self, now=0.0):
        for output in self.engine.step(now):
            assert output.request_id not in self.ended, "news after the end"
            self.tokens[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                self.ended[output.request_id] = self.step, output
        self.engine.check_integrity()
        self.step += 1

    def run_to_end(self, max_steps=3_000):
        for _ in range(max_steps):
            if not self.engine.has_work:
                return
            self.advance()
        raise AssertionError(f"some request never ended in {max_steps} steps")

    def wait_of(self, name):
        return self.ended[name][0] - self.came[name]

    def check_answers(self):
        for name, asked in self.asked.items():
            start, reason = len(asked.token_ids), self.ended[name][1].finish_reason
            count = len(self.tokens[name]) if reason is FinishReason.ABORT else asked.sampling.max_tokens
            assert self.tokens[name] == [counted(start + i) for i in range(count)]


REQUESTS = st.lists(
    st.tuples(st.integers(1, 60), st.integers(1, 60), st.sampled_from(Priority), st.integers(0, 60)),
    min_size=1,
    max_size=14,
)


@given(
    REQUESTS,
    st.integers(32, 60),
    st.dictionaries(st.integers(0, 80), st.integers(0, 13), max_size=5),
    st.booleans(),
    st.sampled_from([1, 5]),
)
@settings(max_examples=60, deadline=None)
def test_any_trace_ends_with_every_answer_whole(requests, num_pages, aborts, overlap, max_trips):
    """Arrivals, aborts, preemption for slots and pages, promotion, shared pages: with integrity after each step."""
    trace = Trace(max_trips, num_pages=num_pages, overlap=overlap, num_slots=3)
    arrivals = sorted((at, i) for i, (_, _, _, at) in enumerate(requests))
    while arrivals or trace.engine.has_work:
        while arrivals and arrivals[0][0] <= trace.step:
            _, i = arrivals.pop(0)
            trace.submit(ask(i, *requests[i][:3]))
        if trace.step in aborts:
            trace.abort(str(aborts[trace.step]))
        trace.advance()
        assert trace.step < 5_000, "some request never ended"
    trace.check_answers()
    assert trace.engine.load.free_pages == num_pages and trace.engine.load.free_slots == 3


def work(asked):
    """Steps that a sequence needs when it is served first: chunks, tokens, and one to be read."""
    return pages_for(len(asked.token_ids), TILE_TOKENS * LIMITS.max_tiles) + asked.sampling.max_tokens + 1


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20)), min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20)), min_size=1, max_size=8),
    st.integers(32, 60),
)
@settings(max_examples=60, deadline=None)
def test_batch_waits_a_bounded_number_of_steps_however_many_chats_come(batch, chats, num_pages):
    """Chats never cease, and at least four wait at any time. What is ahead of a batch request is what came before it;
    the best rank moves on in each step, or in the next when a page or its newest token is still on its way."""
    trace, number = Trace(num_pages=num_pages, num_slots=3), 0

    def more_chats():
        nonlocal number
        while trace.engine.load.num_waiting < 4 + len(batch):
            trace.submit(ask(f"chat{number}", *chats[number % len(chats)]))
            number += 1

    more_chats()
    for i, (prompt, answer) in enumerate(batch):
        trace.submit(ask(f"batch{i}", prompt, answer, BATCH))
    ahead = sum(work(asked) for asked in trace.asked.values())
    bound = PATIENCE + 2 * ahead + 2
    for _ in range(bound):
        if all(f"batch{i}" in trace.ended for i in range(len(batch))):
            return
        more_chats()
        trace.advance()
    raise AssertionError(f"a batch request has not ended in {bound} steps")


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20)), min_size=1, max_size=8), st.integers(32, 60))
@settings(max_examples=30, deadline=None)
def test_batch_never_makes_a_chat_wait_for_its_slots(chats, num_pages):
    """A full house of batch requests and one promoted at most: a chat waits as if two slots were its band's own."""
    trace = Trace(num_pages=num_pages, num_slots=3)
    for i in range(12):
        trace.submit(ask(f"batch{i}", 9 + i, 20, BATCH))
    for _ in range(4):
        trace.advance()
    for i, (prompt, answer) in enumerate(chats):
        trace.submit(ask(f"chat{i}", prompt, answer))
    first = trace.asked["chat0"]
    while "chat0" not in trace.ended:
        trace.advance()
    assert trace.wait_of("chat0") <= work(first) + 2, "the first chat is served at once"
    trace.run_to_end()
    trace.check_answers()


def test_batch_fills_what_interactive_leaves_and_comes_back_after_it():
    trace = Trace(num_slots=4)
    for i in range(4):
        trace.submit(ask(f"batch{i}", 8, 40, BATCH))
    for _ in range(6):
        trace.advance()
    assert trace.engine.load.num_running == 4
    trace.submit(ask("chat", 8, 10))
    trace.advance()
    assert trace.engine.stats.num_preemptions == 1 and trace.engine.load.num_waiting == 1
    trace.run_to_end()
    trace.check_answers()
    assert trace.wait_of("chat") <= 12 < trace.wait_of("batch3")


@pytest.mark.parametrize("priority", Priority)
def test_a_deadline_that_passes_while_waiting_ends_the_request_before_prefill(priority):
    trace = Trace(num_slots=1)
    trace.submit(ask("runs", 8, 30, deadline=5.0))
    trace.submit(ask("late", 8, 30, priority, deadline=5.0))
    trace.submit(ask("patient", 8, 2, priority))
    trace.advance(now=4.9)
    prefilled = trace.engine.stats.prefill_tokens
    trace.advance(now=5.5)
    error = trace.ended["late"][1].error
    assert isinstance(error, DeadlineExceeded) and "still waiting 0.5 s after" in str(error)
    assert trace.engine.stats.prefill_tokens == prefilled
    trace.run_to_end()
    assert trace.ended["runs"][1].finish_reason is trace.ended["patient"][1].finish_reason is FinishReason.LENGTH


def test_a_preempted_request_keeps_its_answer_when_its_deadline_passes():
    trace = Trace(num_slots=1)
    trace.submit(ask("batch", 8, 30, BATCH, deadline=5.0))
    for _ in range(5):
        trace.advance(now=1.0)
    trace.submit(ask("chat", 8, 5))
    trace.advance(now=2.0)
    assert trace.engine.stats.num_preemptions == 1
    for _ in range(60):
        trace.advance(now=9.0)
    trace.check_answers()


def test_ten_thousand_deadlines_and_aborts_take_no_time():
    trace = Trace(num_slots=1, max_waiting=10_000)
    for i in range(10_000):
        trace.submit(ask(str(i), 8, 5, deadline=float(1 + i % 2)))
    for i in range(0, 10_000, 5):
        trace.abort(str(i))
    for output in trace.engine.step(1.5):
        trace.ended[output.request_id] = 0, output
    reasons = [output.finish_reason for _, output in trace.ended.values()]
    assert (reasons.count(FinishReason.ABORT), reasons.count(FinishReason.ERROR)) == (2_000, 4_000)
    trace.engine.check_integrity()


def test_pages_that_a_preempted_request_shares_with_a_newcomer_are_promised_once():
    """In one plan: a chat takes the pages of a batch request, and a second one finds its prompt among them."""
    trace = Trace(num_pages=28, num_slots=3)
    trace.submit(ask("batch", 80, 30, BATCH))
    for _ in range(20):
        trace.advance()
    trace.submit(ask("stranger", 32, 4))
    trace.submit(ask("acquaintance", 80, 4))
    trace.advance()
    assert trace.engine.stats.num_preemptions == 1
    trace.run_to_end()
    trace.check_answers()


def test_deadlines_that_never_come_leave_nothing_behind():
    trace = Trace()
    for i in range(400):
        trace.submit(ask(i, 2, 1, deadline=1e9))
        trace.advance()
    trace.run_to_end()
    assert len(trace.engine._roster.waiting._deadlines) <= 2 * SPARE
