"""Tokens are shown with their text, and never with text that a stop string took away."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.card import TextAssets
from serving.engine.api import SequenceOutput, TokenLogprobs
from serving.engine.tokenizer import StopStrings, Tokenizer
from serving.replica.answer import Answer
from serving.request import FinishReason
from tests.fakes import END_ID, END_TEXT, byte_tokenizer_json

TOKENIZER = Tokenizer(TextAssets(byte_tokenizer_json()))


def new_answer(*stops, min_tokens=0):
    return Answer(
        TOKENIZER.detokenizer(),
        StopStrings(stops),
        frozenset({END_ID}),
        prompt_tokens=5,
        min_tokens=min_tokens,
        token_bytes=TOKENIZER.token_bytes,
    )


def run(answer, ids, reason=FinishReason.LENGTH, per_step=1):
    """Text and entries of every piece of news, until the answer is over."""
    news = []
    for start in range(0, len(ids), per_step):
        part = tuple(ids[start : start + per_step])
        last = start + per_step >= len(ids)
        entries = tuple(
            TokenLogprobs(-(start + i) / 8, ((token, -0.5), (END_ID, -1.5))) for i, token in enumerate(part)
        )
        news.append(answer.push(SequenceOutput("r", part, reason if last else None, logprobs=entries)))
        if news[-1].reason:
            break
    return [(n.text, [e.token for e in n.logprobs]) for n in news]


def test_a_token_comes_with_its_text():
    assert run(new_answer(), b"abc") == [("a", [b"a"]), ("b", [b"b"]), ("c", [b"c"])]


def test_a_cut_character_holds_its_tokens_until_it_is_whole():
    first, last = [bytes([byte]) for byte in "é".encode()]
    assert run(new_answer(), "éx".encode()) == [("", []), ("é", [first, last]), ("x", [b"x"])]
    assert run(new_answer(), "é".encode()[:1]) == [("\ufffd", [first])]


def test_what_may_become_a_stop_string_is_held_back_with_its_tokens():
    assert run(new_answer("STOP"), b"aSTx") == [("a", [b"a"]), ("", []), ("", []), ("STx", [b"S", b"T", b"x"])]


@pytest.mark.parametrize("per_step", [1, 2, 9])
def test_what_a_stop_string_takes_away_has_no_entries(per_step):
    news = run(new_answer("éS"), "aéSb".encode(), per_step=per_step)
    assert "".join(text for text, _ in news) == "a"
    assert [token for _, tokens in news for token in tokens] == [b"a"]


def test_the_token_that_says_stop_has_no_entry_and_a_special_one_on_the_way_has_its_name():
    assert run(new_answer(), [97, END_ID], FinishReason.STOP) == [("a", [b"a"]), ("", [])]
    shown = run(new_answer(), [END_ID, 97])
    assert shown == [("", []), ("a", [END_TEXT.encode(), b"a"])]


def test_rivals_are_named_and_offsets_are_characters():
    answer = new_answer()
    answer.push(SequenceOutput("r", tuple("é".encode())))
    news = answer.push(SequenceOutput("r", (97,), logprobs=(TokenLogprobs(-0.25, ((98, -0.125), (0xE2, -3.0))),)))
    (entry,) = news.logprobs
    assert (entry.token, entry.logprob, entry.top) == (b"a", -0.25, ((b"b", -0.125), (b"\xe2", -3.0)))


def test_stop_strings_do_not_count_before_min_tokens():
    assert "".join(text for text, _ in run(new_answer("b", min_tokens=3), b"abcabc")) == "abca"
    assert "".join(text for text, _ in run(new_answer("b", min_tokens=0), b"abcabc")) == "a"


@given(
    text=st.text("abé🙂", max_size=12),
    stops=st.lists(st.text("abé🙂", min_size=1, max_size=3), max_size=2),
    per_step=st.integers(1, 4),
)
def test_entries_join_to_the_text_however_it_is_cut(text, stops, per_step):
    ids = [*text.encode(), ord("!")]
    news = run(new_answer(*stops), ids, per_step=per_step)
    shown = "".join(part for part, _ in news)
    assert b"".join(token for _, tokens in news for token in tokens) == shown.encode()
    joined = ""
    for part, tokens in news:  # nothing is shown before its text
        joined += part
        assert len(b"".join(tokens)) <= len(joined.encode())
