"""How device memory is shared out: weights, the hungriest step's temporaries, and all the rest for KV pages.

`plan_memory` is a pure function of figures that are known before anything is served, so that nothing can run out later:
page arrays are allocated once, and steps only use what their compiled programs declare.
"""

from dataclasses import dataclass

from serving.errors import ConfigError

MIB = 1 << 20
RESERVE_SHARE = 0.03  # of the limit: the runtime's own, and fragmentation


@dataclass(frozen=True, slots=True)
class Needs:
    """What one device must hold, in bytes, and how much of it pages could use."""

    weights: int
    temporaries: int
    """0 while it is not known."""
    page: int
    """One page over all layers, or those of one set (`kv.layer_sets`), this device's share of the KV heads; a draft
    model's page of the same number, too."""
    least_pages: int
    """One full sequence."""
    most_pages: int
    """All slots full."""
    draft_weights: int = 0
    """Of a model that guesses."""
    adapters: int = 0
    """Of adapters."""
    num_sets: int = 1
    """Pages that are needed to hold tokens of all layers."""
    copies: int = 0
    """Of pages on their way to the host's memory and back."""


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """One device's memory in bytes, as it is shared out."""

    limit: int
    weights: int
    temporaries: int
    reserve: int
    pages: int
    num_pages: int
    page_size: int
    draft_weights: int = 0
    adapters: int = 0
    num_sets: int = 1
    copies: int = 0

    @property
    def unused(self) -> int:
        weights = self.weights + self.draft_weights + self.adapters
        return self.limit - weights - self.temporaries - self.copies - self.reserve - self.pages

    def lines(self) -> tuple[str, ...]:
        """A table for people."""
        tokens, sets = self.num_pages // self.num_sets * self.page_size, ""
        if self.num_sets > 1:
            sets = f" for {self.num_sets} sets of layers, and more beyond their windows"
        others = ("draft weights", self.draft_weights, ""), ("adapters", self.adapters, "")
        rows = (
            ("weights", self.weights, ""),
            *(row for row in others if row[1]),
            ("step temporaries", self.temporaries, ""),
            *([("page copies", self.copies, "on their way to the host and back")] if self.copies else []),
            ("reserve", self.reserve, ""),
            ("KV pages", self.pages, f"{self.num_pages:,} pages of {self.page_size}: {tokens:,} tokens{sets}"),
            ("unused", self.unused, ""),
            ("memory per device", self.limit, ""),
        )
        return tuple(_line(*row) for row in rows)


def host_cache_line(num_pages: int, page_bytes: int, page_size: int, num_sets: int) -> str:
    """What stands below the table, of the host's memory: `page_bytes` are those of all devices."""
    note = f"{num_pages:,} pages of {page_size}: {num_pages // num_sets * page_size:,} tokens, of the host's memory"
    return _line("host cache", num_pages * page_bytes, note)


def _line(name: str, size: int, note: str) -> str:
    return f"{name:<18} {size / MIB:>10,.0f} MiB  {note}".rstrip()


def plan_memory(limit: int, needs: Needs, page_size: int, wanted_pages: int | None = None) -> MemoryBudget:
    """Give the pages what is left, or exactly `wanted_pages`. The null page comes on top and is counted in.

    Raises ConfigError with the numbers when it does not fit.
    """
    reserve = int(limit * RESERVE_SHARE)
    weights = needs.weights + needs.draft_weights + needs.adapters
    left = limit - weights - needs.temporaries - needs.copies - reserve
    possible = max(0, left // needs.page - 1)
    least = wanted_pages or needs.least_pages
    if possible < least:
        short = (least - possible) * needs.page
        temporaries = f"{needs.temporaries / MIB:,.0f} MiB temporaries, " if needs.temporaries else ""
        temporaries += f"{needs.copies / MIB:,.0f} MiB page copies, " if needs.copies else ""
        raise ConfigError(
            f"{limit / MIB:,.0f} MiB of device memory do not hold the model: {weights / MIB:,.0f} MiB weights, "
            f"{temporaries}{reserve / MIB:,.0f} MiB reserve, and {least:,} pages lack {short / MIB:,.0f} MiB; "
            "give more --memory, a smaller --max-seq-len or --dtype, or more devices."
        )
    num_pages = wanted_pages or min(possible, needs.most_pages)
    pages = (num_pages + 1) * needs.page
    return MemoryBudget(
        limit,
        needs.weights,
        needs.temporaries,
        reserve,
        pages,
        num_pages,
        page_size,
        needs.draft_weights,
        needs.adapters,
        needs.num_sets,
        needs.copies,
    )
