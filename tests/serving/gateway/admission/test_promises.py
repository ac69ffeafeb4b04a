"""Who was told when to come back."""

from hypothesis import given
from hypothesis import strategies as st

from serving.gateway.admission.promises import KEPT_S, LATE_S, MAX_PROMISES, Promises


def test_a_place_is_kept_from_the_time_that_was_told_for_a_second():
    promises = Promises()
    promises.make(caller=7, answers=2, due_s=10.0)
    kept = {}
    for now_s in (9.9, 10.0, 10.9, 11.0):
        promises.pass_time(now_s)
        kept[now_s] = promises.num_kept, promises.num_answers
    assert kept == {9.9: (0, 2), 10.0: (2, 2), 10.9: (2, 2), 11.0: (0, 0)}


def test_who_comes_when_told_or_a_little_later_is_known_once():
    for late_s in (0, KEPT_S / 2, KEPT_S, LATE_S / 2):
        promises = Promises()
        promises.make(7, 1, 10.0)
        assert promises.claim(7, 1, 10.0 + late_s)
        assert promises.num_kept == 0
        assert not promises.claim(7, 1, 10.0 + late_s)


def test_who_comes_too_early_or_much_too_late_or_asks_something_else_is_a_newcomer():
    promises = Promises()
    promises.make(7, 1, 10.0)
    assert not promises.claim(7, 1, 9.9)
    assert not promises.claim(8, 1, 10.0)
    assert not promises.claim(7, 2, 10.0)
    assert not promises.claim(7, 1, 10.0 + LATE_S)
    assert not promises, "it is forgotten"


def test_equal_callers_have_a_promise_each():
    promises = Promises()
    for due_s in (3.0, 5.0, 5.0):
        promises.make(7, 1, due_s)
    assert [promises.claim(7, 1, 4.0), promises.claim(7, 1, 4.0)] == [True, False]
    assert [promises.claim(7, 1, 5.0) for _ in range(3)] == [True, True, False]


def test_their_number_is_bounded():
    promises = Promises()
    for caller in range(MAX_PROMISES + 10):
        promises.make(caller, 1, 5.0)
    assert len(promises) == MAX_PROMISES


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["make", "claim", "wait"]), st.integers(0, 3), st.integers(1, 3), st.floats(0, 8)),
        max_size=60,
    )
)
def test_the_books_agree_with_the_promises(steps):
    """Counted anew from all that were made, as the definition says."""
    promises, made, now_s = Promises(), [], 0.0
    for what, caller, answers, seconds in steps:
        if what == "make":
            promises.make(caller, answers, now_s + seconds)
            made.append([caller, answers, now_s + seconds])
        elif what == "wait":
            now_s += seconds
        else:
            mine = [one for one in made if one[:2] == [caller, answers] and one[2] <= now_s < one[2] + LATE_S]
            assert promises.claim(caller, answers, now_s) == bool(mine)
            if mine:
                made.remove(mine[0])
        promises.pass_time(now_s)
        assert promises.num_coming == sum(answers for _, answers, due_s in made if now_s < due_s)
        assert promises.num_kept == sum(answers for _, answers, due_s in made if due_s <= now_s < due_s + KEPT_S)
    promises.pass_time(now_s + 8 + LATE_S)
    assert len(promises) == 0, "all that nobody came for is forgotten"
