"""`podstream plan`: how many replicas and chips a demand needs on each deployment, and what they cost."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from podstream.columns import columns
from serving.errors import ConfigError
from tpu_configs.catalog import deployment, deployments
from tpu_configs.demand import Demand
from tpu_configs.plan import CapacityPlan, Line, plan_capacity
from tpu_configs.roofline import ASSUMED
from tpu_configs.rule_of_thumb import Thumb

Say = Callable[[str], None]
HEADER = (
    "deployment", "rows", "itl ms", "ttft ms", "replicas", "slices", "chips", "cost/h", "cost/1M tokens", "misses",
)  # fmt: skip


def plan(demand: Demand, names: Sequence[str], prices: Sequence[str], say: Say, *, as_json: bool) -> None:
    """A table of all deployments, or of those named, and the arithmetic: of those named, or of the best."""
    by_chip = dict(map(parse_price, prices))
    plans = [plan_capacity(deployment(name, by_chip), demand) for name in names or deployments()]
    plans.sort(key=_rank)
    if as_json:
        say(json.dumps({"assumed": ASSUMED.lines(), "plans": [one.to_json() for one in plans]}, indent=2))
        return
    for text in columns([HEADER, *map(_row, plans)], right=range(1, len(HEADER) - 1)):
        say(text)
    for one in plans if names else plans[:1]:
        _say_arithmetic(f"{one.deployment}, predicted", one.lines, say)
    say("\nassumed")
    for assumption in ASSUMED.lines():
        say(f"  {assumption}")


def plan_by_thumb(thumb: Thumb, rps: float, answer: int, say: Say, *, as_json: bool) -> None:
    """The same by the rule of thumb alone."""
    lines = thumb.lines(rps, answer)
    if as_json:
        say(json.dumps({"arithmetic": [asdict(line) for line in lines]}, indent=2))
    else:
        _say_arithmetic("keys and values, links, prompts and spares are left out", lines, say)


def parse_price(text: str) -> tuple[str, float]:
    """`v6e=2.7`: of one chip for an hour. Raises ConfigError."""
    chip, equals, price = text.partition("=")
    try:
        if equals and (value := float(price)) >= 0:
            return chip, value
    except ValueError:
        pass
    raise ConfigError(f"--price reads like v6e=2.7, of one chip for an hour, got {text!r}.")


def _say_arithmetic(title: str, lines: Sequence[Line], say: Say) -> None:
    say(f"\n{title}")
    for text in columns([(line.what, line.how, line.result) for line in lines]):
        say(f"  {text}")


def _rank(one: CapacityPlan) -> tuple[Any, ...]:
    """Those that meet the demand first; by cost where prices are known, then by chips."""
    return one.misses is not None, one.cost_per_hour is None, one.cost_per_hour or 0, one.chips


def _row(one: CapacityPlan) -> tuple[str, ...]:
    figures = (
        f"{one.rows:,}",
        f"{one.itl_s * 1e3:,.1f}",
        f"{one.ttft_s * 1e3:,.0f}",
        f"{one.replicas:,}",
        f"{one.slices:,}",
        f"{one.chips:,}",
    )
    shown = figures if one.rows else ("-",) * len(figures)
    cost = "-" if one.cost_per_hour is None else f"{one.cost_per_hour:,.2f}"
    per_million = "-" if one.cost_per_million is None else f"{one.cost_per_million:,.3f}"
    return one.deployment, *shown, cost, per_million, one.misses or ""
