"""Sets of layers: every layer has its place, nobody else's pages, and splitting never costs more than it saves."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv.layer_sets import LayerSets, Reach, choose_sets, tokens_ahead
from kv.page_table import pages_for


def gemma_3(num_layers, window):
    return tuple(None if layer % 6 == 5 else window for layer in range(num_layers))


@pytest.mark.parametrize(
    ("windows", "size", "of_sets"),
    [
        (gemma_3(18, 512), 3, (None, *[512] * 5)),
        (gemma_3(26, 512), 4, (None, *[512] * 6)),
        (gemma_3(34, 1024), 5, (None, *[1024] * 6)),
        (gemma_3(48, 1024), 8, (None, *[1024] * 5)),
        (gemma_3(62, 1024), 10, (None, *[1024] * 6)),
        ((4096, None) * 21, 21, (None, 4096)),  # Gemma 2 9B
        ((None,) * 21 + (1024,) * 7, 7, (None, None, None, 1024)),
    ],
)
def test_models_that_there_are(windows, size, of_sets):
    sets = choose_sets(windows, max_tokens=8192, page_size=128)
    assert (sets.size, sets.windows) == (size, of_sets)


@pytest.mark.parametrize("windows", [(), (None,) * 4, (512,) * 4])
def test_layers_of_one_kind_have_all_pages_in_common(windows):
    assert choose_sets(windows, 8192, 128) is None


def test_nothing_is_split_where_no_text_outgrows_a_window():
    assert choose_sets((4096, None), 4096, 128) is None
    assert choose_sets((4096, None), 8192, 128) is not None


def test_stages_have_the_same_sets_or_none():
    assert choose_sets(gemma_3(48, 1024), 8192, 128, num_stages=2) == choose_sets(gemma_3(24, 1024), 8192, 128)
    assert choose_sets(gemma_3(62, 1024), 8192, 128, num_stages=2) is None


windows_of_layers = st.lists(st.sampled_from([None, 7, 64, 300]), min_size=1, max_size=40).map(tuple)


@given(windows_of_layers, st.integers(1, 2000), st.integers(1, 64), st.integers(1, 3))
def test_every_layer_has_a_place_of_its_own_and_a_sequence_holds_no_more_than_in_one_set(
    of_stage, max_tokens, page_size, num_stages
):
    sets = choose_sets(of_stage * num_stages, max_tokens, page_size, num_stages)
    if sets is None:
        return
    assert isinstance(sets, LayerSets) and len(sets.windows) > 1
    places = list(zip(sets.set_of_layer, sets.place_of_layer, strict=True))
    assert len({*places}) == len(of_stage)
    assert all(place < sets.size for _, place in places)
    assert tuple(sets.windows[number] for number, _ in places) == of_stage
    for number, window in enumerate(sets.windows):  # only the last of a window may have room left
        filled = sets.set_of_layer.count(number)
        assert filled == sets.size or (*sets.windows, 0)[number + 1] != window
    held = sets.size * Reach(sets.windows, page_size, 0).num_held(max_tokens)
    whole = max((w for w in of_stage if w), default=None) if None not in of_stage else None
    assert held < len(of_stage) * Reach((whole,), page_size, 0).num_held(max_tokens)


@given(
    st.one_of(st.none(), st.integers(1, 100)), st.integers(1, 16), st.integers(1, 90), st.integers(0, 400), st.data()
)
def test_a_window_never_reaches_over_more_columns_than_are_counted(window, page_size, ahead, written, data):
    """From the first column that the next token sees to the last that may have pages."""
    reach = Reach((window,), page_size, ahead)
    end = pages_for(written + data.draw(st.integers(1, ahead)), page_size)
    assert end - reach.first_seen(window, written) <= reach.most(window, end)


@given(st.lists(st.sampled_from([None, 5, 40]), min_size=1, max_size=4), st.integers(4, 400), st.integers(1, 300))
def test_the_longest_sequence_is_the_longest(windows, num_pages, max_tokens):
    reach = Reach(tuple(windows), 4, tokens_ahead(8, 1, 0))
    longest = reach.longest(num_pages, max_tokens)
    assert longest <= max_tokens and reach.num_held(longest) <= num_pages
    assert longest == max_tokens or reach.num_held(longest + 1) > num_pages
