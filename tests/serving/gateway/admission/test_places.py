"""A crowd before a full gateway: who comes back when he was told finds room, and no place stays empty for him."""

import random

import pytest

from serving.gateway.admission.places import AT_DOOR, Place, Places
from tests.serving.gateway.admission.crowd import Crowd

ANSWERS = {
    "quick": lambda drawn, running: 0.5 * drawn.uniform(0.5, 1.5),
    "all of a crowd together": lambda drawn, running: 5.0,
    "slow": lambda drawn, running: 20.0 * drawn.uniform(0.5, 1.5),
    "the slower the more there are": lambda drawn, running: 0.3 + 0.1 * running,
}
WARM_UPS = {"cold": 0, "after one": 1, "warm": 4}  # crowds as large as the slots


def crowd(max_queued, slots, answer, *, size, crowds_before=4, tokens=64, newcomers=0):
    drawn = random.Random(1)
    crowd = Crowd(
        max_queued, slots, lambda running: ANSWERS[answer](drawn, running), tokens, lambda: drawn.uniform(0, 0.05)
    )
    for caller in range(crowds_before * slots):
        crowd.come(0.01 * caller, caller)
    start_s = 1000.0 if crowds_before else 0.0
    for caller in range(size):
        crowd.come(start_s + drawn.uniform(0, 0.2), 10_000 + caller)
    for caller in range(newcomers):
        crowd.come(start_s + 0.25 * caller, 100_000 + caller)
    return crowd


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("warm_up", WARM_UPS)
@pytest.mark.parametrize(("max_queued", "slots"), [(100, 8), (100, 64), (8, 4)])
def test_three_hundred_before_a_hundred_places(max_queued, slots, answer, warm_up):
    seen = crowd(max_queued, slots, answer, size=3 * max_queued, crowds_before=WARM_UPS[warm_up]).run()
    assert seen.num_came_back >= max_queued
    assert seen.num_refused_again <= 0.05 * seen.num_came_back
    assert seen.longest_empty_s <= 1.05, "the second that a client is late at most, and his way"


@pytest.mark.parametrize("answer", ["quick", "all of a crowd together", "the slower the more there are"])
@pytest.mark.parametrize(("max_queued", "slots"), [(100, 8), (64, 16), (8, 4)])
def test_ten_times_as_many_as_there_are_places_once_it_is_known_how_fast_answers_end(max_queued, slots, answer):
    seen = crowd(max_queued, slots, answer, size=10 * max_queued).run()
    assert seen.num_refused_again <= 0.05 * seen.num_came_back
    assert seen.longest_empty_s <= 1.05


def test_those_who_were_told_go_before_newcomers():
    """Newcomers come all the time, twice as many as are served."""
    seen = crowd(100, 8, "all of a crowd together", size=300, newcomers=800).run()
    assert seen.num_told > 800
    assert seen.num_refused_again <= 0.05 * seen.num_came_back


def ask(places, now_s, caller, answers=1):
    place = Place(answers, tokens=10)
    return place, places.ask(now_s, place, 1, lambda: caller)


def test_a_newcomer_gets_no_place_that_is_kept_but_after_a_second_it_is_his():
    places = Places(1)
    first, _ = ask(places, 0.0, caller=1)
    _, wait_s = ask(places, 0.0, caller=2)
    places.leave(0.5, first, served=True)
    assert ask(places, wait_s + 0.5, caller=3)[1], "it is kept for the second"
    second, stays = ask(places, wait_s + 0.6, caller=2)
    assert (second.entered, stays) == (True, 0)
    places.leave(wait_s + 0.7, second, served=True)
    assert ask(places, 100.0, caller=4)[0].entered, "nobody came for the third's"


def test_who_comes_back_to_a_full_house_waits_at_the_door_in_order():
    places = Places(2)
    running = [ask(places, 0.0, caller)[0] for caller in (1, 2)]
    told = {caller: ask(places, 0.0, caller, answers)[1] for caller, answers in ((3, 2), (4, 1))}
    large, stays = ask(places, told[3], 3, answers=2)
    assert (large.entered, stays, places.num_at_door) == (False, 0, 2)
    small, _ = ask(places, told[4], 4)
    assert places.leave(5.0, running[0], served=True) == [], "the first in line wants two"
    assert places.leave(6.0, running[1], served=True) == [large]
    assert places.leave(7.0, large, served=True) == [small]
    assert places.num_at_door == 0


def test_one_who_leaves_the_door_makes_way_for_those_behind():
    places = Places(2)
    running = [ask(places, 0.0, caller)[0] for caller in (1, 2)]
    told = {caller: ask(places, 0.0, caller, answers)[1] for caller, answers in ((3, 2), (4, 1))}
    large, _ = ask(places, told[3], 3, answers=2)
    small, _ = ask(places, told[4], 4)
    places.leave(5.0, running[0], served=True)
    assert places.give_up(large) == [small]


def test_the_door_is_bounded():
    places = Places(1)
    ask(places, 0.0, caller=0)
    told = {caller: ask(places, 0.0, caller)[1] for caller in range(1, 10)}
    stayed = [ask(places, 50.0 if told[caller] > 50 else told[caller], caller)[1] == 0 for caller in told]
    assert places.num_at_door == sum(stayed) <= AT_DOOR
