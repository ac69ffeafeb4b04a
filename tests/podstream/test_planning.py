"""`podstream plan` as it prints."""

import json

import pytest

from podstream.columns import columns
from podstream.planning import parse_price, plan, plan_by_thumb
from serving.errors import ConfigError
from tpu_configs.catalog import deployments
from tpu_configs.demand import Demand
from tpu_configs.rule_of_thumb import Thumb

DEMAND = Demand(rps=2000, concurrent=20_000, prompt=1000, answer=300, ttft_s=0.5, itl_s=0.033)


def said(names=(), prices=(), *, as_json=False):
    lines = []
    plan(DEMAND, names, prices, lines.append, as_json=as_json)
    return "\n".join(lines)


def test_all_deployments_the_cheapest_first():
    table = said(prices=["v5e=1", "v5p=1", "v6e=1", "tpu7x=1"]).split("\n\n")[0].splitlines()
    assert {line.split()[0] for line in table[1:]} == set(deployments())
    costs = [float(line.split()[7].replace(",", "")) for line in table[1:] if len(line.split()) == 9]
    assert costs == sorted(costs)


def test_arithmetic_is_shown_for_those_that_are_named():
    text = said(["llama-3.1-8b-v6e-1"])
    assert "llama-3.1-8b-v6e-1, predicted" in text
    assert "GiB of weights" in text
    assert "memory gives 85% of its bandwidth" in text


def test_json_holds_the_same():
    found = json.loads(said(["llama-3.1-8b-v6e-1"], ["v6e=2"], as_json=True))
    [one] = found["plans"]
    assert one["cost_per_hour"] == one["chips"] * 2
    assert {"what", "how", "result"} == set(one["arithmetic"][0])


def test_by_the_rule_of_thumb():
    lines = []
    plan_by_thumb(Thumb(140e9, 3e12, 32), 2000, 300, lines.append, as_json=False)
    assert lines[-1].split() == ["replicas", "600,000", "/", "686", "875"]


@pytest.mark.parametrize("text", ["v6e", "v6e=", "v6e=cheap", "v6e=-1"])
def test_a_price_that_is_none(text):
    with pytest.raises(ConfigError, match=r"--price reads like v6e=2.7"):
        parse_price(text)


def test_columns_stay_whole():
    assert list(columns([("a", "1"), ("bcd", "23")], right=[1])) == ["a     1", "bcd  23"]
