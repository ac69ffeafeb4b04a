"""The memory plan never promises more than there is, and uses what there is."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.engine.memory import MIB, Needs, host_cache_line, plan_memory
from serving.errors import ConfigError

NEEDS = Needs(weights=500 * MIB, temporaries=20 * MIB, page=MIB, least_pages=10, most_pages=1_000)


def test_pages_get_what_is_left():
    budget = plan_memory(1_000 * MIB, NEEDS, page_size=16)
    assert budget.num_pages == 1_000 - 500 - 20 - 30 - 1  # 3 % reserve, one null page
    assert budget.unused == 0
    assert budget.lines()[3] == "KV pages                  450 MiB  449 pages of 16: 7,184 tokens"


def test_pages_of_sets_of_layers_hold_tokens_together():
    budget = plan_memory(1_000 * MIB, dataclasses.replace(NEEDS, num_sets=7), page_size=16)
    assert budget.lines()[3].endswith(
        "449 pages of 16: 1,024 tokens for 7 sets of layers, and more beyond their windows"
    )


def test_a_draft_model_and_adapters_have_lines_of_their_own():
    needs = dataclasses.replace(NEEDS, draft_weights=50 * MIB, adapters=8 * MIB)
    budget = plan_memory(1_000 * MIB, needs, page_size=16)
    assert budget.num_pages == 1_000 - 500 - 50 - 8 - 20 - 30 - 1
    assert budget.lines()[:3] == (
        "weights                   500 MiB",
        "draft weights              50 MiB",
        "adapters                    8 MiB",
    )


def test_pages_on_their_way_to_the_host_take_room_and_the_host_has_a_line():
    budget = plan_memory(1_000 * MIB, dataclasses.replace(NEEDS, copies=256 * MIB), page_size=16)
    assert budget.num_pages == 1_000 - 500 - 20 - 30 - 256 - 1 and budget.unused == 0
    assert budget.lines()[2] == "page copies               256 MiB  on their way to the host and back"
    line = host_cache_line(num_pages=100, page_bytes=2 * MIB, page_size=16, num_sets=1)
    assert line == "host cache                200 MiB  100 pages of 16: 1,600 tokens, of the host's memory"


def test_no_more_pages_than_all_slots_can_fill():
    assert plan_memory(9_000 * MIB, NEEDS, page_size=16).num_pages == 1_000


def test_too_little_memory_is_told_in_numbers():
    with pytest.raises(ConfigError, match=r"530 MiB .* 500 MiB weights, 20 MiB temporaries, 16 MiB .* lack 10 MiB"):
        plan_memory(530 * MIB, NEEDS, page_size=16)


def test_a_wished_for_number_of_pages_is_kept_or_refused():
    assert plan_memory(1_000 * MIB, NEEDS, 16, wanted_pages=7).num_pages == 7
    with pytest.raises(ConfigError, match="600 pages lack"):
        plan_memory(1_000 * MIB, NEEDS, 16, wanted_pages=600)


@given(
    limit=st.integers(1, 10**12),
    needs=st.builds(
        Needs,
        weights=st.integers(1, 10**11),
        temporaries=st.integers(0, 10**10),
        draft_weights=st.integers(0, 10**10),
        adapters=st.integers(0, 10**10),
        copies=st.integers(0, 10**10),
        page=st.integers(1, 10**9),
        least_pages=st.integers(1, 10**4),
        most_pages=st.integers(10**4, 10**7),
    ),
)
def test_what_is_promised_is_there(limit, needs):
    try:
        budget = plan_memory(limit, needs, page_size=16)
    except ConfigError:
        return
    assert budget.unused >= 0
    assert needs.least_pages <= budget.num_pages <= needs.most_pages
    assert budget.unused < needs.page or budget.num_pages == needs.most_pages, "memory is left over"
