"""How many pages an engine can use, and what its layers keep of them."""

from collections.abc import Iterator

from kv.layer_sets import Reach, are_alike
from model.config import ModelConfig
from serving.engine.plan import Limits
from serving.engine.step import StepSpec

KV_BYTES = 1 << 30  # page pool where no memory limit is known


def useful_pages(spec: StepSpec, limits: Limits) -> tuple[int, int]:
    """Pages of one full sequence, and of all slots full."""
    reach = Reach(spec.windows, limits.page_size, limits.tokens_ahead)
    one = reach.num_held(spec.pages_per_slot * limits.page_size)
    return one, one * spec.num_slots


def sets_notes(model: ModelConfig, spec: StepSpec, num_stages: int) -> Iterator[str]:
    """What people should know of how long pages are kept, where layers differ in that."""
    if spec.sets is not None:
        own = ", ".join("everything" if window is None else f"{window:,}" for window in spec.windows)
        yield f"layers lie in sets of {spec.sets.size * num_stages} that keep pages of their own; windows: {own}"
    elif not are_alike(model.windows, num_stages):
        yield (
            f"mesh stage={num_stages}: windows of one stage's layers are not those of another's, so pages are kept for "
            "as long as any layer looks at them"
        )


def default_pages(least: int, most: int, page_bytes: int) -> int:
    """Where nothing says how much memory there is: what is useful, at most `KV_BYTES`, at least one full sequence."""
    return max(least, min(most, KV_BYTES // page_bytes))
