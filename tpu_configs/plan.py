"""Plan: from demand to replicas, chips and cost for one deployment, by arithmetic that can be followed by hand."""

import math
from bisect import bisect_right
from dataclasses import asdict, dataclass, field
from typing import Any

from tpu_configs.chip import GIB
from tpu_configs.demand import Demand
from tpu_configs.deployment import Deployment
from tpu_configs.pages import HeldPages
from tpu_configs.roofline import ASSUMED, Assumptions, StepTime, decode_step, prefill_seconds
from tpu_configs.sizes import Sizes

KEPT_FREE = 0.06  # of memory: 3 % for what steps need, 3 % in reserve (serving.engine.memory)
AVAILABILITY = 0.999  # of capacity
REPLICA_AVAILABILITY = 0.99  # maintenance, preemption, restarts
HOUR_S = 3600


@dataclass(frozen=True, slots=True)
class Line:
    """One step of the arithmetic."""

    what: str
    how: str
    result: str


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """What a deployment needs to meet a demand. `misses` says why it cannot, if it cannot."""

    deployment: str
    slice: str
    lines: tuple[Line, ...]
    misses: str | None = None
    rows: int = 0
    itl_s: float = 0.0
    ttft_s: float = 0.0
    replicas: int = 0
    slices: int = 0
    chips: int = 0
    cost_per_hour: float | None = None
    cost_per_million: float | None = None
    """Generated tokens; None without a price."""

    def to_json(self) -> dict[str, Any]:
        fields = asdict(self)
        return {**fields, "arithmetic": fields.pop("lines")}


@dataclass(slots=True)
class _Arithmetic:
    """Lines as they are written."""

    lines: list[Line] = field(default_factory=list)

    def add(self, what: str, how: str, result: str) -> None:
        self.lines.append(Line(what, how, result))


def plan_capacity(deployment: Deployment, demand: Demand, assumed: Assumptions = ASSUMED) -> CapacityPlan:
    """Rows that memory and `demand.itl_s` allow, replicas for the tokens and the answers at once, spares, and cost."""
    paper, chip = _Arithmetic(), deployment.slice.chip
    rows_in_memory = _rows_in_memory(paper, deployment, demand)
    prefill_s = prefill_seconds(deployment, demand.prompt, assumed)
    paper.add(
        "a prompt costs",
        f"{Sizes.of(deployment).flops(demand.prompt, demand.prompt / 2) / 1e12:,.1f} TFLOP / "
        f"({chip.device_flops / 1e12:,.0f} TFLOP/s x {assumed.compute_share:.0%})",
        f"{prefill_s * 1e3:,.1f} ms",
    )

    def itl_s(rows: int) -> float:
        """Each row ends after `answer` steps and makes room for a prompt."""
        return decode_step(deployment, rows, demand.context, assumed).total_s + rows / demand.answer * prefill_s

    rows = bisect_right(range(1, rows_in_memory + 1), demand.itl_s, key=itl_s)
    if rows == 0:
        return _missed(paper, deployment, rows_in_memory, itl_s(1), demand)
    _show_step(paper, deployment, demand, rows, decode_step(deployment, rows, demand.context, assumed), assumed)
    interval_s, ttft_s = itl_s(rows), _ttft_s(paper, deployment, demand, rows, assumed)
    paper.add("between two tokens", f"a step and {rows} / {demand.answer} of a prompt", f"{interval_s * 1e3:,.1f} ms")
    replicas = _replicas(paper, deployment, demand, rows, interval_s)
    misses = None if ttft_s <= demand.ttft_s else f"first token after {ttft_s:,.2f} s, wanted {demand.ttft_s:g} s"
    slices = math.ceil(replicas / deployment.replicas)
    chips = slices * deployment.slice.num_chips
    paper.add(
        "slices",
        f"{replicas:,} replicas, {deployment.replicas} on each {deployment.slice.name} "
        f"of {deployment.slice.num_chips} chips",
        f"{slices:,} slices, {chips:,} chips",
    )
    cost, per_million = _cost(paper, deployment, demand, chips)
    return CapacityPlan(
        deployment.name, deployment.slice.name, tuple(paper.lines), misses, rows, interval_s, ttft_s, replicas, slices,
        chips, cost, per_million,
    )  # fmt: skip


def _rows_in_memory(paper: _Arithmetic, deployment: Deployment, demand: Demand) -> int:
    sizes, held = Sizes.of(deployment), deployment.slice.chip.device_hbm_bytes
    room = int(held * (1 - KEPT_FREE)) - sizes.weight_bytes
    per_row = HeldPages.of(deployment).token_bytes(demand.context)
    rows = max(0, min(int(room // per_row), deployment.settings.slots))
    paper.add(
        "room for keys and values",
        f"{held / GIB:,.2f} GiB x {1 - KEPT_FREE:.0%} - {sizes.weight_bytes / GIB:,.2f} GiB of weights",
        f"{room / GIB:,.2f} GiB a device",
    )
    paper.add(
        "rows by memory",
        f"{room / GIB:,.2f} GiB / ({per_row / demand.context:,.0f} bytes x {demand.context:,.0f} tokens), at most "
        f"{deployment.settings.slots} slots",
        f"{rows:,} rows",
    )
    return rows


def _show_step(
    paper: _Arithmetic, deployment: Deployment, demand: Demand, rows: int, step: StepTime, assumed: Assumptions
) -> None:
    sizes, chip = Sizes.of(deployment), deployment.slice.chip
    weights, live = sizes.read_bytes(rows), rows * sizes.kv_read_bytes(demand.context)
    paper.add(
        "memory of a step",
        f"({weights / 1e9:,.2f} GB weights + {live / 1e9:,.2f} GB keys and values of {rows} rows) / "
        f"({chip.device_bytes_per_s / 1e9:,.0f} GB/s x {assumed.bandwidth_share:.0%})",
        f"{step.memory_s * 1e3:,.1f} ms",
    )
    paper.add(
        "products of a step",
        f"{sizes.flops(rows, demand.context) / 1e12:,.2f} TFLOP",
        f"{step.compute_s * 1e3:,.1f} ms",
    )
    paper.add(
        "links of a step",
        f"{2 * deployment.model.num_layers} sums over {deployment.mesh.tensor} devices",
        f"{step.links_s * 1e3:,.1f} ms",
    )
    paper.add("a step", "the longer of memory and products, and links", f"{step.total_s * 1e3:,.1f} ms")


def _ttft_s(paper: _Arithmetic, deployment: Deployment, demand: Demand, rows: int, assumed: Assumptions) -> float:
    """Without a queue: the step in flight ends, then the prompt's chunks run beside everyone's decode."""
    chunk = deployment.settings.chunk_tokens
    num_chunks = math.ceil(demand.prompt / chunk)
    step_s = decode_step(deployment, rows, demand.context, assumed).total_s
    prefill_s = prefill_seconds(deployment, demand.prompt, assumed)
    total_s = (num_chunks + 1) * step_s + prefill_s
    paper.add(
        "first token",
        f"(1 + {num_chunks} chunks of {chunk}) x {step_s * 1e3:,.1f} ms + {prefill_s * 1e3:,.1f} ms, without a queue",
        f"{total_s * 1e3:,.0f} ms",
    )
    return total_s


def _replicas(paper: _Arithmetic, deployment: Deployment, demand: Demand, rows: int, interval_s: float) -> int:
    """For the tokens, for the answers at once, and spares."""
    per_replica = rows / interval_s
    for_tokens = math.ceil(demand.tokens_per_s / per_replica)
    for_rows = math.ceil(demand.concurrent / rows)
    needed = max(for_tokens, for_rows)
    paper.add("one replica", f"{rows} rows / {interval_s * 1e3:,.1f} ms", f"{per_replica:,.0f} tokens/s")
    paper.add(
        "replicas for the tokens",
        f"{demand.rps:,g} requests/s x {demand.answer} tokens = {demand.tokens_per_s:,.0f}/s, / {per_replica:,.0f}",
        f"{for_tokens:,}",
    )
    paper.add("replicas for the rows", f"{demand.concurrent:,} answers at once / {rows} rows", f"{for_rows:,}")
    total = with_spares(needed)
    paper.add(
        "with spares",
        f"{needed:,} of them are up {AVAILABILITY:.1%} of the time, if each is {REPLICA_AVAILABILITY:.0%}",
        f"{total:,} replicas",
    )
    return total


def with_spares(needed: int, up: float = REPLICA_AVAILABILITY, wanted: float = AVAILABILITY) -> int:
    """The fewest replicas of which at least `needed` are up with probability `wanted`, if each is up independently with
    probability `up`: the tail of a binomial distribution, by logarithms so that thousands do not underflow."""
    total = needed
    while _tail(total, needed, up) < wanted:
        total += 1
    return total


def _tail(total: int, least: int, up: float) -> float:
    def log_term(k: int) -> float:
        ways = math.lgamma(total + 1) - math.lgamma(k + 1) - math.lgamma(total - k + 1)
        return ways + k * math.log(up) + (total - k) * math.log(1 - up)

    return math.fsum(math.exp(log_term(k)) for k in range(least, total + 1))


def _cost(paper: _Arithmetic, deployment: Deployment, demand: Demand, chips: int) -> tuple[float | None, float | None]:
    price = deployment.slice.chip.price_per_hour
    if not price:
        paper.add("cost", f"set price_per_hour of {deployment.slice.chip.name}, or --price", "unknown")
        return None, None
    per_hour = chips * price
    per_million = per_hour / (demand.tokens_per_s * HOUR_S) * 1e6
    paper.add("cost", f"{chips:,} chips x {price:g} an hour", f"{per_hour:,.2f} an hour")
    paper.add(
        "cost of a million tokens",
        f"{per_hour:,.2f} / ({demand.tokens_per_s:,.0f} tokens/s x {HOUR_S} s) x 1,000,000",
        f"{per_million:,.3f}",
    )
    return per_hour, per_million


def _missed(
    paper: _Arithmetic, deployment: Deployment, rows_in_memory: int, alone_s: float, demand: Demand
) -> CapacityPlan:
    why = (
        f"one row alone takes {alone_s * 1e3:,.1f} ms a token, wanted {demand.itl_s * 1e3:g} ms"
        if rows_in_memory
        else "weights leave no room for one sequence"
    )
    return CapacityPlan(deployment.name, deployment.slice.name, tuple(paper.lines), why)
