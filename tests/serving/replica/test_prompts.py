import dataclasses

import pytest

from serving.engine.grammar import GrammarCompiler
from serving.engine.tokenizer import Tokenizer
from serving.errors import InvalidRequest, ModelNotFound, PromptTooLong
from serving.replica.adapters import AdapterTable
from serving.replica.prompts import PromptReader
from serving.request import ChatPrompt, Grammar, GrammarKind, Priority, Request, SamplingParams, TextPrompt, TokenPrompt
from tests.fakes import FAKE_NAME, VOCAB_SIZE, FakeEngineLoop, fake_card


@pytest.fixture(scope="module")
def reader():
    card = fake_card(temperature=0.5)
    grammars = GrammarCompiler(card.text.tokenizer_json, VOCAB_SIZE, card.generation.eos_token_ids)
    return PromptReader(
        AdapterTable(FAKE_NAME, FakeEngineLoop()), Tokenizer(card.text), grammars, card.generation, 20, VOCAB_SIZE
    )


def request(prompt, *, model=FAKE_NAME, unset=(), **sampling):
    return Request("r", model, prompt, SamplingParams(**sampling), frozenset(unset))


def test_text_and_messages_become_token_ids(reader):
    assert reader.read(request(TextPrompt("Hi"))).token_ids == (72, 105)
    assert reader.read(request(ChatPrompt(({"role": "user", "content": "Hi"},)))).token_ids == (72, 105)
    assert reader.read(request(TokenPrompt((1, 2)))).token_ids == (1, 2)


def test_a_grammar_is_compiled_at_the_door(reader):
    assert reader.read(request(TextPrompt("Hi"))).matcher is None
    asked = dataclasses.replace(request(TextPrompt("Hi")), grammar=Grammar(GrammarKind.REGEX, "a"))
    assert reader.read(asked).matcher.accept(ord("a"))
    with pytest.raises(InvalidRequest, match="unclosed group"):
        reader.read(dataclasses.replace(asked, grammar=Grammar(GrammarKind.REGEX, "(")))


def test_the_priority_goes_with_the_prompt(reader):
    assert reader.read(request(TextPrompt("Hi"))).priority is Priority.INTERACTIVE
    asked = dataclasses.replace(request(TextPrompt("Hi")), priority=Priority.BATCH)
    assert reader.read(asked).priority is Priority.BATCH


def test_an_answer_without_a_limit_may_fill_the_context(reader):
    assert reader.read(request(TextPrompt("Hi"))).sampling.max_tokens == 18
    assert reader.read(request(TextPrompt("Hi"), max_tokens=3)).sampling.max_tokens == 3


def test_a_chat_that_asks_for_too_much_gets_what_fits(reader):
    asked = request(ChatPrompt(({"role": "user", "content": "Hi"},)), max_tokens=100_000_000)
    assert reader.read(asked).sampling.max_tokens == 18


def test_the_context_may_be_filled_exactly(reader):
    assert reader.read(request(TextPrompt("x" * 19))).sampling.max_tokens == 1
    with pytest.raises(PromptTooLong, match="prompt has 20 tokens, the context holds 20 with the answer"):
        reader.read(request(TextPrompt("x" * 20)))


def test_prompt_and_answer_must_fit_together(reader):
    assert reader.read(request(TextPrompt("x"), max_tokens=19)).sampling.max_tokens == 19
    with pytest.raises(PromptTooLong, match=r"prompt has 1 token and max_tokens is 20.*at most 19"):
        reader.read(request(TextPrompt("x"), max_tokens=20))


@pytest.mark.parametrize("ids", [(-1,), (VOCAB_SIZE,), (0, 2**62)])
def test_token_ids_must_be_in_the_vocabulary(reader, ids):
    with pytest.raises(InvalidRequest, match="vocabulary of 257 tokens"):
        reader.read(request(TokenPrompt(ids)))


@pytest.mark.parametrize("field", [{"logit_bias": ((257, 1.0),)}, {"banned_token_ids": (3, 257)}])
def test_steered_tokens_must_be_in_the_vocabulary(reader, field):
    with pytest.raises(InvalidRequest, match="257 is outside the vocabulary of 257 tokens") as caught:
        reader.read(request(TextPrompt("x"), **field))
    assert caught.value.param == next(iter(field))


def test_some_token_must_be_left_to_choose():
    card = fake_card()
    grammars = GrammarCompiler(card.text.tokenizer_json, 4, card.generation.eos_token_ids)
    small = PromptReader(
        AdapterTable(FAKE_NAME, FakeEngineLoop()),
        Tokenizer(card.text),
        grammars,
        card.generation,
        max_seq_len=20,
        vocab_size=4,
    )
    small.read(request(TokenPrompt((1,)), banned_token_ids=(0, 1, 2)))
    with pytest.raises(InvalidRequest, match="no token to choose"):
        small.read(request(TokenPrompt((1,)), banned_token_ids=(0, 1, 2), stop_token_ids=(3,), min_tokens=1))


def test_min_tokens_must_fit_where_the_context_sets_the_limit(reader):
    with pytest.raises(InvalidRequest, match="at most max_tokens, 19, got 20"):
        reader.read(request(TextPrompt("x"), min_tokens=20))


def test_an_empty_prompt_is_refused_under_its_own_name(reader):
    with pytest.raises(InvalidRequest, match="empty") as caught:
        reader.read(request(ChatPrompt(({"role": "user", "content": ""},))))
    assert caught.value.param == "messages"


def test_another_model_is_not_found(reader):
    with pytest.raises(ModelNotFound, match="'gpt-9' is not served here, 'echo' is"):
        reader.read(request(TextPrompt("x"), model="gpt-9"))


def test_the_models_advice_fills_what_the_client_left_out(reader):
    assert reader.read(request(TextPrompt("x"), unset=["temperature", "top_p"])).sampling.temperature == 0.5
    assert reader.read(request(TextPrompt("x"), temperature=0.9)).sampling.temperature == 0.9
