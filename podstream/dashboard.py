"""The dashboard of `podstream top`: figures as bars, numbers and a curve. Pure; what is not known is a dash."""

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from podstream.figures import Figures

BAR_WIDTH = 32
CURVE = "▁▂▃▄▅▆▇█"
UNKNOWN = "-"


def dashboard(now: Figures, rates: tuple[float, ...]) -> RenderableType:
    """`rates` are generated tokens per second, oldest first."""
    return Group(_fill(now), Text(), _speed(now, rates), Text(), _step(now))


def _fill(now: Figures) -> Table:
    """How full it is."""
    table = _table()
    state = {True: "[green]ready", False: "[red]not ready", None: UNKNOWN}[now.up]
    table.add_row("replica", state, "")
    table.add_row("slots", _bar(now.slots_used, now.slots_total), _of(now.slots_used, now.slots_total))
    size = f", {now.page_size} tokens each" if now.page_size else ""
    table.add_row("pages", _bar(now.pages_used, now.pages_total), _of(now.pages_used, now.pages_total) + size)
    table.add_row("waiting", _number(now.waiting), f"{_number(now.preempted)} preempted so far")
    return table


def _speed(now: Figures, rates: tuple[float, ...]) -> Table:
    """What clients get."""
    table = _table()
    table.add_row("tokens/s", f"[bold]{_number(now.generated_per_s)}", f"[cyan]{_curve(rates)}")
    hits = UNKNOWN if now.cache_hit_share is None else f"{now.cache_hit_share:.0%} from cache"
    table.add_row("prompts", f"{_number(now.prompt_per_s)} tokens/s", hits)
    table.add_row("prefill", f"{_number(now.prefilled_per_s)} tokens/s", f"{_number(now.finished_per_s)} answers/s")
    table.add_row("ttft", f"p50 {_time(now.ttft_p50_s)}", f"p95 {_time(now.ttft_p95_s)}")
    table.add_row("itl", f"p50 {_time(now.itl_p50_s)}", f"p95 {_time(now.itl_p95_s)}")
    return table


def _step(now: Figures) -> Table:
    """Where a step's time goes."""
    table = _table()
    share = now.host_share
    table.add_row("steps/s", _number(now.steps_per_s), "")
    host = UNKNOWN if share is None else f"{share:.1%} of a step"
    table.add_row("host", _time(now.host_s), host)
    table.add_row("device", _time(now.device_wait_s), "waited for, per step")
    return table


def _table() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", width=9)
    table.add_column(width=BAR_WIDTH)
    table.add_column()
    return table


def _bar(used: float | None, total: float | None) -> RenderableType:
    return ProgressBar(total=total, completed=used or 0, width=BAR_WIDTH) if total else UNKNOWN


def _of(used: float | None, total: float | None) -> str:
    return f"{_number(used)} of {_number(total)}"


def _number(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return UNKNOWN
    return (
        f"{seconds:.2f} s"
        if seconds >= 1
        else f"{seconds * 1e3:.1f} ms"
        if seconds >= 1e-3
        else f"{seconds * 1e6:.0f} µs"
    )


def _curve(values: tuple[float, ...]) -> str:
    """Heights relative to the highest."""
    highest = max(values, default=0.0) or 1.0
    return "".join(CURVE[round(value / highest * (len(CURVE) - 1))] for value in values)
