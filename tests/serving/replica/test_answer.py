import pytest

from model.card import TextAssets
from serving.engine.api import SequenceOutput
from serving.engine.tokenizer import StopStrings, Tokenizer
from serving.replica.answer import Answer
from serving.request import FinishReason, Usage
from tests.fakes import END_ID, byte_tokenizer_json


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(TextAssets(byte_tokenizer_json()))


@pytest.fixture
def new_answer(tokenizer):
    def new(*stops, stop_ids=(END_ID,)):
        return Answer(tokenizer.detokenizer(), StopStrings(stops), frozenset(stop_ids), prompt_tokens=5)

    return new


def push(answer, text, reason=None):
    return answer.push(SequenceOutput("r", tuple(text.encode()), reason))


def test_text_and_counts(new_answer):
    answer = new_answer()
    assert push(answer, "ab").text == "ab"
    news = push(answer, "c", FinishReason.LENGTH)
    assert (news.text, news.num_tokens, news.reason, news.abort) == ("c", 1, FinishReason.LENGTH, False)
    assert answer.usage == Usage(5, 3)


def test_a_cut_character_is_held_back_but_its_tokens_are_counted(new_answer):
    answer = new_answer()
    first, last = "é".encode()
    news = answer.push(SequenceOutput("r", (first,)))
    assert (news.text, news.num_tokens) == ("", 1)
    assert answer.push(SequenceOutput("r", (last,))).text == "é"


def test_a_character_that_stays_cut_is_shown_at_the_end(new_answer):
    news = new_answer().push(SequenceOutput("r", ("é".encode()[0],), FinishReason.LENGTH))
    assert news.text == "\ufffd"


def test_a_stop_string_ends_the_answer_and_tells_the_engine(new_answer):
    answer = new_answer("STOP")
    assert push(answer, "abS").text == "ab"
    news = push(answer, "TOPxyz")
    assert (news.text, news.reason, news.abort) == ("", FinishReason.STOP, True)
    assert answer.usage.completion_tokens == 6  # what came after the stop in the same step is not counted


def test_a_stop_string_met_by_the_last_token_needs_no_abort(new_answer):
    news = push(new_answer("c"), "abc", FinishReason.LENGTH)
    assert (news.text, news.reason, news.abort) == ("ab", FinishReason.STOP, False)


def test_a_stop_string_that_does_not_come_is_shown_at_the_end(new_answer):
    answer = new_answer("STOP")
    push(answer, "abSTO")
    assert push(answer, "", FinishReason.LENGTH).text == "STO"


def test_a_stop_token_is_not_shown(new_answer):
    answer = new_answer(stop_ids=[ord("c")])
    news = push(answer, "abc", FinishReason.STOP)
    assert (news.text, news.num_tokens) == ("ab", 3)


def test_a_stop_token_among_others_is_shown(new_answer):
    assert push(new_answer(stop_ids=[ord("b")]), "abc", FinishReason.LENGTH).text == "abc"


def test_an_error_passes_through(new_answer):
    news = push(new_answer(), "", FinishReason.ERROR)
    assert news.reason is FinishReason.ERROR
