"""What is packed is unpacked equal."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving import errors
from serving.engine.api import StepStats
from serving.replica import convert
from serving.replica.events import Ending, Finished
from serving.replica.proto import replica_pb2 as pb
from serving.replica.status import ReplicaState, ReplicaStatus, ServedAdapter
from serving.request import (
    MAX_CHOICES,
    ChatPrompt,
    FinishReason,
    Grammar,
    GrammarKind,
    Load,
    Priority,
    Request,
    SamplingParams,
    TextPrompt,
    TokenPrompt,
    Usage,
)

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
FLOAT32 = st.floats(0.0, 1.0, width=32)
PROMPTS = (
    st.builds(TextPrompt, TEXT)
    | st.builds(TokenPrompt, st.lists(st.integers(-(2**63), 2**63 - 1)).map(tuple))
    | st.builds(lambda text: ChatPrompt(({"role": "user", "content": text},)), TEXT)
)
SAMPLINGS = st.builds(
    SamplingParams,
    temperature=st.floats(0, 2, width=32),
    top_k=st.integers(0, 2**31 - 1),
    top_p=st.floats(0.125, 1, width=32),
    min_p=FLOAT32,
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    max_tokens=st.none() | st.integers(1, 2**31 - 1),
    stop=st.lists(TEXT.filter(bool), max_size=3).map(tuple),
    stop_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=3).map(tuple),
    ignore_eos=st.booleans(),
    min_tokens=st.just(0),
    repetition_penalty=st.floats(0.125, 10, width=32),
    presence_penalty=st.floats(-2, 2, width=32),
    frequency_penalty=st.floats(-2, 2, width=32),
    logit_bias=st.dictionaries(st.integers(0, 2**31 - 1), st.floats(-100, 100, width=32), max_size=3).map(
        lambda biases: tuple(biases.items())
    ),
    banned_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=3).map(tuple),
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
)


GRAMMARS = st.none() | st.builds(Grammar, st.sampled_from(GrammarKind), TEXT)


@given(
    prompt=PROMPTS,
    sampling=SAMPLINGS,
    grammar=GRAMMARS,
    num_choices=st.integers(1, MAX_CHOICES),
    deadline_ms=st.none() | st.integers(1, 2**31 - 1),
    cache_salt=TEXT,
    echo=st.booleans(),
    prompt_only=st.booleans(),
)
def test_a_request_comes_back(prompt, sampling, **fields):
    request = Request("id", "model", prompt, sampling, **fields)
    packed = convert.submit_to_pb(7, request).SerializeToString()
    submit = pb.Submit.FromString(packed)
    assert submit.handle == 7
    assert convert.request_from_pb(submit) == request


def test_min_tokens_come_back():
    request = Request("id", "m", TextPrompt("x"), SamplingParams(min_tokens=3, max_tokens=4))
    assert convert.request_from_pb(convert.submit_to_pb(1, request)) == request


def test_unset_fields_stay_unset():
    request = Request("id", "m", TextPrompt("x"), SamplingParams(), frozenset({"temperature", "top_p"}))
    assert convert.request_from_pb(convert.submit_to_pb(1, request)) == request


@pytest.mark.parametrize("priority", Priority)
def test_a_priority_comes_back(priority):
    request = Request("id", "m", TextPrompt("x"), SamplingParams(), priority=priority)
    assert convert.request_from_pb(convert.submit_to_pb(1, request)) == request


def test_a_priority_is_interactive_when_nothing_is_said_and_refused_when_unknown():
    assert convert.request_from_pb(pb.Submit(text="x")).priority is Priority.INTERACTIVE
    with pytest.raises(errors.InvalidRequest, match="interactive or batch, got 'urgent'"):
        convert.request_from_pb(pb.Submit(text="x", priority="urgent"))


def test_a_submit_without_a_prompt_is_refused():
    with pytest.raises(errors.InvalidRequest, match="no prompt"):
        convert.request_from_pb(pb.Submit(handle=1))


def test_a_grammar_of_an_unknown_kind_is_refused():
    with pytest.raises(errors.InvalidRequest, match="'ebnf' is no kind of grammar"):
        convert.request_from_pb(pb.Submit(text="x", grammar=pb.Grammar(kind="ebnf")))


def test_messages_that_are_no_list_are_refused():
    with pytest.raises(errors.InvalidRequest, match="not a JSON list"):
        convert.request_from_pb(pb.Submit(messages_json="3"))


@pytest.mark.parametrize("state", ReplicaState)
def test_a_status_comes_back(state):
    status = ReplicaStatus(
        state,
        "m",
        512,
        9,
        "busy",
        Load(1, 2, 3, 4, 5, 6, 7),
        StepStats(1, 2, 3, 4, 5, 6, 7, 8, 0.5, 0.25, 9, 10, 11, 12),
        adapters=(ServedAdapter("a", "/a", 3, 4), ServedAdapter("b", "gs://b")),
        max_adapters=5,
        source="run/12",
    )
    assert convert.status_from_pb(convert.status_to_pb(status)) == status


def test_an_end_comes_back():
    end = convert.end_from_pb(convert.finished_to_pb(1, Ending(FinishReason.LENGTH, Usage(1, 2, 3, 4, 5, 6))))
    assert end == Finished(FinishReason.LENGTH, Usage(1, 2, 3, 4, 5, 6))


@pytest.mark.parametrize(
    "error",
    [
        errors.PromptTooLong("long", param="prompt"),
        errors.ModelNotFound("who?"),
        errors.Overloaded("full", retry_after_s=3),
        errors.ReplicaUnavailable("gone"),
        errors.EngineFailed("bad step"),
    ],
)
def test_an_error_comes_back(error):
    back = convert.end_from_pb(convert.finished_to_pb(1, Ending(FinishReason.ERROR, error=error)))
    assert type(back) is type(error)
    assert (str(back), back.param, back.retry_after_s) == (str(error), error.param, error.retry_after_s)


def test_an_error_without_a_cause_is_the_engines():
    back = convert.end_from_pb(convert.finished_to_pb(1, Ending(FinishReason.ERROR)))
    assert isinstance(back, errors.EngineFailed)
