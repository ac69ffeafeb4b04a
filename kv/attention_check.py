"""What each attention backend cannot serve, told in one sentence before anything is loaded or compiled. Pure."""

from dataclasses import dataclass

import jax.numpy as jnp

from kv import cpu_attention
from kv.cache import stored_dtype
from kv.tpu_limits import LANES, MIB, SMEM_BYTES, granule, table_bytes
from model.config import ModelConfig
from model.errors import PodstreamError


class AttentionError(PodstreamError):
    """The attention backend cannot serve this model with these pages on these devices."""


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """What is asked of a backend."""

    config: ModelConfig
    platform: str
    """What JAX calls the devices of the mesh."""
    num_devices: int
    kv_shards: int
    """Over how many devices KV heads are split."""
    kv_dtype: str
    """One of `serving.config.KV_DTYPES`."""
    page_size: int
    pages_per_slot: int
    num_slots: int

    @property
    def kv_heads(self) -> int:
        """On one device."""
        return self.config.num_kv_heads // self.kv_shards

    @property
    def stored(self) -> jnp.dtype:
        return stored_dtype(self.kv_dtype)


def check_attention(name: str, needs: AttentionNeeds) -> None:
    """Raises AttentionError if the backend of `kv.backends` that has this name cannot do it."""
    checks = {"cpu": _cpu_problem, "tpu": _tpu_problem, "ragged": _ragged_problem, "gpu": _gpu_problem}
    problem = checks[name](needs) if name in checks else None
    if problem is not None:
        raise AttentionError(problem)


def _cpu_problem(needs: AttentionNeeds) -> str | None:
    if needs.platform == "cpu" and needs.num_devices == 1 and needs.kv_dtype in cpu_attention.DTYPES:
        return None
    return (
        f"attention 'cpu' serves one CPU device with pages of {' or '.join(cpu_attention.DTYPES)}, "
        f"got {needs.num_devices} of platform {needs.platform} with pages of {needs.kv_dtype}; use --attention xla."
    )


def _tpu_problem(needs: AttentionNeeds) -> str | None:
    if needs.platform != "tpu":
        return _wrong_platform("tpu", "TPUs", needs)
    least = max(granule(needs.stored, is_scale=False), granule(needs.stored, is_scale=needs.kv_dtype == "int8"))
    if needs.page_size % least:
        return (
            f"attention 'tpu' writes {needs.kv_dtype} pages {least} tokens at a time, and {needs.page_size} is not a "
            f"multiple of that; use --page-size {max(LANES, least)}."
        )
    return _table_problem(needs)


def _ragged_problem(needs: AttentionNeeds) -> str | None:
    if needs.platform != "tpu":
        return _wrong_platform("ragged", "TPUs", needs)
    if needs.kv_dtype == "int8":
        return (
            "attention 'ragged' knows one scale for all int8 pages, and ours have one per token and KV head; "
            "use --attention tpu or --kv-dtype fp8."
        )
    windows = {*needs.config.windows}
    if len(windows) > 1:
        return (
            f"attention 'ragged' is compiled for one window, and layers of this model have {len(windows)} "
            f"({', '.join('none' if w is None else f'{w:,}' for w in sorted(windows, key=lambda w: w or 0))}); "
            "use --attention tpu."
        )
    packed = 4 // needs.stored.itemsize
    rows = 2 * needs.kv_heads
    if rows % packed or not (rows // packed in (1, 2, 4, 8) or rows // packed % 8 == 0):
        return (
            f"attention 'ragged' packs {packed} rows of {needs.kv_dtype} into one word and wants 1, 2, 4, 8 or a "
            f"multiple of 8 of them, and {needs.config.num_kv_heads} KV heads over {needs.kv_shards} devices are "
            f"{rows} rows of keys and values on each; use --attention tpu."
        )
    return _table_problem(needs)


def _gpu_problem(needs: AttentionNeeds) -> str | None:
    if needs.platform != "gpu":
        return _wrong_platform("gpu", "GPUs", needs)
    for what, size in (("pages", needs.page_size), ("heads", needs.config.head_dim)):
        if size < 16 or size & (size - 1):
            return f"attention 'gpu' needs {what} of 16, 32, 64 .. (a power of two), got {size}; use --attention xla."
    return None


def _wrong_platform(name: str, devices: str, needs: AttentionNeeds) -> str:
    return f"attention '{name}' is compiled for {devices}, and the mesh has devices of platform {needs.platform}."


def _table_problem(needs: AttentionNeeds) -> str | None:
    """A TPU's kernels have the page table in scalar memory."""
    S, J = needs.num_slots, needs.pages_per_slot
    size = table_bytes(S, J)
    if size <= SMEM_BYTES:
        return None
    page_size = needs.page_size
    while table_bytes(S, -(-J * needs.page_size // page_size)) > SMEM_BYTES and page_size < J * needs.page_size:
        page_size *= 2
    return (
        f"the page table of {S:,} slots with {J:,} pages each takes {size / MIB:.2f} MiB of a TPU's scalar memory, "
        f"which has {SMEM_BYTES / MIB:.2f} MiB; use --page-size {page_size}, fewer --slots or a lower --max-seq-len."
    )
