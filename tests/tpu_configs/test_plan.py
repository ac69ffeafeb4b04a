"""Capacity by arithmetic: figures that can be checked by hand, and what must hold for any demand."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.errors import ConfigError
from tpu_configs.catalog import deployment
from tpu_configs.demand import Demand
from tpu_configs.plan import plan_capacity, with_spares
from tpu_configs.roofline import Assumptions, decode_step
from tpu_configs.rule_of_thumb import Thumb

DEMAND = Demand(rps=2000, concurrent=20_000, prompt=1000, answer=300, ttft_s=0.5, itl_s=0.033)
IDEAL = Assumptions(bandwidth_share=1.0, compute_share=1.0, hop_us=0.0)


def test_the_documented_example():
    """70 billion weights of 16 bit on 3 TB/s, 32 rows: 47 ms, 680 tokens/s, about 900 replicas for 600,000."""
    thumb = Thumb(weight_bytes=140e9, bytes_per_s=3e12, rows=32)
    assert round(thumb.step_s * 1e3) == 47
    assert thumb.tokens_per_s == pytest.approx(680, rel=0.01)
    assert thumb.replicas(600_000) == 875
    assert [line.result for line in thumb.lines(2000, 300)] == ["46.7 ms", "686 tokens/s", "600,000 tokens/s", "875"]


def test_a_step_by_hand():
    """Llama 3.1 8B on one v6e, 32 rows of 2,048 tokens: 15.01 GB of weights and 8.59 GB of pages at 1,638 GB/s."""
    step = decode_step(deployment("llama-3.1-8b-v6e-1"), 32, 2048, IDEAL)
    weights = 2 * (8.03e9 - 128_256 * 4096)
    pages = 32 * 2048 * 131_072
    assert step.memory_s == pytest.approx((weights + pages) / 1638e9, rel=1e-3)
    assert step.links_s == 0


def test_a_plan_shows_what_it_computes():
    plan = plan_capacity(deployment("llama-3.1-70b-int8-v5e-16", {"v5e": 1.2}), DEMAND)
    by_name = {line.what: line.result for line in plan.lines}
    assert by_name["slices"] == f"{plan.slices:,} slices, {plan.chips:,} chips"
    assert plan.cost_per_hour == pytest.approx(plan.chips * 1.2)
    assert plan.cost_per_million == pytest.approx(plan.cost_per_hour / (600_000 * 3600) * 1e6)
    assert plan.chips == 16 * math.ceil(plan.replicas / 2)


def test_a_deployment_that_cannot_meet_a_demand_says_why():
    slow = plan_capacity(deployment("llama-3.1-70b-v5p-8"), replace(DEMAND, itl_s=0.001))
    assert slow.replicas == 0
    assert "one row alone takes" in slow.misses
    late = plan_capacity(deployment("llama-3.1-70b-v5p-8"), replace(DEMAND, ttft_s=0.01))
    assert late.replicas > 0
    assert late.misses.startswith("first token after")


def test_without_a_price_there_is_no_cost():
    plan = plan_capacity(deployment("llama-3.1-8b-v6e-1"), DEMAND)
    assert plan.cost_per_hour is plan.cost_per_million is None
    assert plan.lines[-1].how == "set price_per_hour of v6e, or --price"


@settings(max_examples=50)
@given(
    name=st.sampled_from(["llama-3.1-8b-v6e-1", "gemma-3-27b-v6e-8", "qwen3-30b-a3b-v6e-8"]),
    rps=st.floats(0.1, 5000), concurrent=st.integers(1, 50_000), prompt=st.integers(1, 4000),
    answer=st.integers(1, 2000), itl_s=st.floats(0.02, 0.2),
)  # fmt: skip
def test_replicas_suffice_for_tokens_and_rows(name, rps, concurrent, prompt, answer, itl_s):
    demand = Demand(rps, concurrent, prompt, answer, ttft_s=1.0, itl_s=itl_s)
    plan = plan_capacity(deployment(name), demand)
    if plan.rows:
        assert plan.itl_s <= itl_s
        assert plan.replicas * plan.rows >= concurrent
        assert plan.replicas * plan.rows / plan.itl_s >= demand.tokens_per_s * (1 - 1e-9)


@settings(max_examples=30)
@given(needed=st.integers(1, 3000))
def test_spares_make_up_for_replicas_that_are_down(needed):
    total = with_spares(needed)
    down = (total - needed) - total * 0.01  # spares beyond what is down on average
    assert down > 0
    assert down < 4 * math.sqrt(total * 0.01) + 2


@pytest.mark.parametrize("field", ["rps", "concurrent", "prompt", "answer", "ttft_s", "itl_s"])
def test_a_demand_is_positive(field):
    with pytest.raises(ConfigError, match=f"{field} must be positive, got 0"):
        replace(DEMAND, **{field: 0})
