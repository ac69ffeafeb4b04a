"""For how many KV pages there is room: on the devices, and in the host's memory for those that the devices evict."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace

import jax

from kv.host_pages import MOST_COPIES
from serving.config import EngineConfig
from serving.engine.loaded_model import LoadedModel, Progress
from serving.engine.memory import Needs, host_cache_line, plan_memory
from serving.engine.plan import Limits
from serving.engine.step import StepSpec
from serving.engine.useful_pages import default_pages, useful_pages
from serving.errors import ConfigError
from sharding.hosts import least
from sharding.sizes import num_bytes

logger = logging.getLogger(__name__)


def check_host_cache(config: EngineConfig) -> None:
    """Raises ConfigError where there is no prefix cache, and on several hosts: each would have its own part of a page,
    and all would have to agree."""
    if config.host_cache_bytes and not config.prefix_cache:
        raise ConfigError("--host-cache keeps pages of the prefix cache; leave it out, or --no-prefix-cache.")
    if config.host_cache_bytes and jax.process_count() > 1:
        raise ConfigError("pages are kept in the memory of one host only; leave out --host-cache.")


def num_host_pages(config: EngineConfig, page_bytes: int) -> int:
    """Evicted pages that the host's memory keeps, if any are; `page_bytes` are those of all devices. Raises ConfigError
    where not even one fits."""
    if not config.host_cache_bytes:
        return 0
    if config.host_cache_bytes < page_bytes:
        raise ConfigError(
            f"--host-cache {config.host_cache_bytes:,} holds no page of {page_bytes:,} bytes; give more or none."
        )
    return config.host_cache_bytes // page_bytes


def num_pages(
    config: EngineConfig,
    model: LoadedModel,
    draft: LoadedModel | None,
    adapter_bytes: int,
    spec: StepSpec,
    limits: Limits,
    temporaries: Callable[[], int],
    progress: Progress,
) -> int:
    """KV pages for which there is memory beside the weights and `temporaries`, which take long to find out: what has no
    room even without them is said before."""
    page_bytes = model.page_bytes(config) + (draft.page_bytes(config) if draft else 0)
    num_sets, host_page_bytes = len(spec.windows), num_bytes(model.pages(1, config)) // 2
    if num_host := num_host_pages(config, host_page_bytes):
        _say((host_cache_line(num_host, host_page_bytes, config.page_size, num_sets),), progress)
    wanted = config.num_pages and config.num_pages * num_sets
    useful = useful_pages(spec, limits)
    limit = config.memory_bytes or _device_limit(spec.mesh)
    if limit is None:
        return wanted or default_pages(*useful, page_bytes)
    draft_bytes = draft.num_bytes if draft else 0
    copies = 2 * min(num_host, MOST_COPIES) * model.page_bytes(config)
    needs = Needs(model.num_bytes, 0, page_bytes, *useful, draft_bytes, adapter_bytes, num_sets, copies)
    plan_memory(limit, needs, config.page_size, wanted)
    budget = plan_memory(limit, replace(needs, temporaries=temporaries()), config.page_size, wanted)
    _say(budget.lines(), progress)
    return least(budget.num_pages)


def _say(lines: Iterable[str], progress: Progress) -> None:
    for line in lines:
        progress(line)
        logger.info("%s", line)


def _device_limit(mesh: jax.sharding.Mesh) -> int | None:
    """Bytes of memory that one device lets us use; None where devices share the host's memory."""
    stats = mesh.local_devices[0].memory_stats()
    return stats.get("bytes_limit") if stats else None
