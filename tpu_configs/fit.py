"""Whether a model fits, by arithmetic, before anything is compiled; and if it does not, what would."""

from collections.abc import Iterator
from dataclasses import replace

from serving.engine.memory import RESERVE_SHARE
from serving.errors import ConfigError
from tpu_configs.catalog import ad_hoc, slices
from tpu_configs.chip import GIB
from tpu_configs.deployment import Deployment
from tpu_configs.pages import HeldPages
from tpu_configs.sizes import Sizes

TEMPORARY_SHARE = 0.03  # of memory, which steps may take at most


def room_bytes(deployment: Deployment) -> int:
    """What one device has left for pages; negative if weights alone are too much."""
    held = deployment.slice.chip.device_hbm_bytes
    return int(held * (1 - RESERVE_SHARE - TEMPORARY_SHARE)) - Sizes.of(deployment).weight_bytes


def missing_bytes(deployment: Deployment) -> int:
    """By how much one device is too small for the weights and one sequence; 0 or less if it is not."""
    held = HeldPages.of(deployment)
    return held.page_bytes * (held.most(deployment.settings.max_seq_len) + 1) - room_bytes(deployment)


def sequences(deployment: Deployment, context: int) -> int:
    """How many of so many tokens the pages of one replica hold."""
    held = HeldPages.of(deployment)
    return max(room_bytes(deployment), 0) // (held.page_bytes * held.num_held(context))


def check_fit(deployment: Deployment) -> None:
    """Raises ConfigError with the numbers, and what would do."""
    if (missing := missing_bytes(deployment)) <= 0:
        return
    sizes, chip = Sizes.of(deployment), deployment.slice.chip
    raise ConfigError(
        f"{deployment.name} does not fit: of {chip.device_hbm_bytes / GIB:,.2f} GiB on a device of {chip.title} its "
        f"weights take {sizes.weight_bytes / GIB:,.2f} GiB, and {missing / GIB:,.2f} GiB are missing for one sequence "
        f"of {deployment.settings.max_seq_len:,} tokens; {'; '.join(ways_out(deployment)) or 'no slice here would do'}."
    )


def ways_out(deployment: Deployment) -> Iterator[str]:
    """The smallest slice of the same chip, the smallest of any, fewer bits, a shorter context."""
    settings = deployment.settings
    if same := _smallest_slice(deployment, same_chip=True):
        yield f"slice {same} does"
    elif other := _smallest_slice(deployment, same_chip=False):
        yield f"slice {other} does"
    for quantize in ("int8", "int4") if settings.quantize is None else ("int4",) if settings.quantize == "int8" else ():
        changed = replace(deployment, settings=replace(settings, quantize=quantize))
        if missing_bytes(changed) <= 0:
            yield f"{quantize} weights do"
            break
    held = HeldPages.of(deployment)
    longest = held.prefilling.longest(room_bytes(deployment) // held.page_bytes - 1, settings.max_seq_len)
    if longest >= settings.page_size:
        yield f"max_seq_len {longest:,} does"


def _smallest_slice(deployment: Deployment, *, same_chip: bool) -> str | None:
    """Of which as many devices work together as divide the model."""
    settings = deployment.settings
    kept = {"dtype": settings.dtype, "quantize": settings.quantize, "kv_dtype": settings.kv_dtype,
            "slots": settings.slots, "page_size": settings.page_size, "max_seq_len": settings.max_seq_len}  # fmt: skip
    for held in sorted(slices().values(), key=lambda one: one.num_chips):
        if same_chip and held.chip.name != deployment.slice.chip.name:
            continue
        try:
            if missing_bytes(ad_hoc(settings.model, held.name, **kept)) <= 0:
                return held.name
        except ConfigError:  # not on this slice
            continue
    return None
