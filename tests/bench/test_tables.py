from hypothesis import given
from hypothesis import strategies as st

from tests.bench.load import Answer, Level, milliseconds
from tests.bench.peer_tables import all_tables
from tests.bench.tables import Column, comparison, median


def record(server, streams, speed, **more):
    return {"server": server, "streams": streams, "speed": speed, **more}


def test_a_comparison_has_medians_and_how_ours_compares():
    records = [
        record("other", 1, 10.0), record("ours", 1, 30.0), record("ours", 1, 20.0), record("ours", 1, 99.0),
        record("other", 8, None), record("ours", 8, 5_000.0, shown=1.0),
    ]  # fmt: skip
    columns = [Column("tokens/s", "speed"), Column("shown", "shown", 2, compared=False)]
    assert comparison(records, "streams", "streams", columns, "ours").splitlines() == [
        "| streams | server | tokens/s | shown | runs |",
        "| --- | --- | --- | --- | --- |",
        "| 1 | ours | 30.0 | - | 3 |",
        "| 1 | other | 10.0 (3.00) | - | 1 |",
        "| 8 | ours | 5,000.0 | 1.00 | 1 |",
        "| 8 | other | - | - | 1 |",
    ]


def test_a_median_of_nothing():
    assert median([], "x") is None
    assert median([{"x": None}, {}], "x") is None


@given(st.lists(st.integers(0, 10_000), min_size=1), st.sampled_from([0.5, 0.95, 0.99]))
def test_a_percentile_is_one_of_the_values_and_covers_its_share(values, share):
    found = milliseconds([value / 1_000 for value in values], share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values)


def test_no_value_has_no_percentile():
    assert milliseconds([], 0.5) is None


def test_an_answer_tells_its_times():
    answer = Answer(10.0, [10.5, 10.6, 11.0], output_tokens=6)
    assert (answer.ttft_s, answer.tpot_s) == (0.5, 0.1)
    assert [round(gap, 6) for gap in answer.gaps_s] == [0.1, 0.4]
    cut = Answer(10.0)
    assert (cut.ttft_s, cut.tpot_s, cut.gaps_s) == (None, None, [])
    summary = Level(2, wall_s=3.0, answers=[answer, cut]).summary()
    assert (summary["output_tokens_per_s"], summary["ttft_p50_ms"], summary["itl_p95_ms"]) == (2.0, 500.0, 400.0)


def test_the_printed_tables_show_what_was_measured_and_what_failed():
    base = {"dtype": "float32", "size": "64x640", "round": 0}
    text = all_tables(
        [
            {**base, "server": "podstream", "kind": "start", "first_token_s": 60.0, "gemm_gflops": 150.0},
            {**base, "server": "podstream", "kind": "level", "streams": 8, "output_tokens_per_s": 200.0},
            {**base, "server": "podstream", "kind": "memory", "resident_gib": 2.0},
            {**base, "server": "podstream", "kind": "start", "first_token_s": 9.0, "round": 1},
            {**base, "server": "vllm", "kind": "level", "streams": 8, "output_tokens_per_s": 160.0},
            {**base, "server": "slow", "kind": "failure", "error": "it took too long"},
        ]
    )
    assert "| 8 | vllm | 160.0 (1.25) |" in text
    assert "| 64x640 | podstream | 60.0 | 9.0 | 2.00 | 2 |" in text
    assert "slow (64x640) failed in round 0: it took too long" in text
    assert "mixed load" not in text
    assert all_tables([]) == ""
