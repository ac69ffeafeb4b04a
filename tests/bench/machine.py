"""What the machine can do now, and who is using it: a disturbed measurement can be seen beside its figures."""

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import psutil

GEMM_WIDTH = 1_024
READ_BYTES = 1 << 28
REPEATS = 4
GIB = 1 << 30
GONE = (psutil.NoSuchProcess, psutil.AccessDenied)


def probe() -> dict[str, float]:
    """Best of a few, about a second; and the cores that were busy while this program slept for another."""
    busy = psutil.cpu_percent(interval=1.0) / 100 * num_cores()
    return {
        "gemm_gflops": round(max(_gemm_gflops() for _ in range(REPEATS)), 1),
        "read_gb_per_s": round(max(_read_gb_per_s() for _ in range(REPEATS)), 1),
        "busy_cores_before": round(busy, 2),
    }


def num_cores() -> int:
    return len(os.sched_getaffinity(0))


def _gemm_gflops() -> float:
    x_DD = np.ones((GEMM_WIDTH, GEMM_WIDTH), np.float32)
    started = time.perf_counter()
    x_DD @ x_DD
    return 2 * GEMM_WIDTH**3 / (time.perf_counter() - started) / 1e9


def _read_gb_per_s() -> float:
    """All cores read together: one alone does not reach what the memory gives."""
    parts = np.array_split(np.ones(READ_BYTES // 4, np.float32), num_cores())
    with ThreadPoolExecutor(len(parts)) as pool:
        started = time.perf_counter()
        list(pool.map(np.max, parts))
        return READ_BYTES / (time.perf_counter() - started) / 1e9


@dataclass
class Cores:
    """Cores in use on average: by a server's processes, by this program, by everybody else."""

    server: float = 0.0
    ours: float = 0.0
    others: float = 0.0

    def to_json(self) -> dict[str, float]:
        return {f"{name}_cores": round(value, 3) for name, value in vars(self).items()}


@contextmanager
def watch_cores(server: int) -> Iterator[Cores]:
    """Filled in at the end; `server` is the first of the server's processes."""
    cores, before, started = Cores(), _cpu_seconds(server), time.perf_counter()
    yield cores
    wall_s, after = time.perf_counter() - started, _cpu_seconds(server)
    total, cores.server, cores.ours = ((late - early) / wall_s for early, late in zip(before, after, strict=True))
    cores.others = max(0.0, total - cores.server - cores.ours)


def _cpu_seconds(server: int) -> tuple[float, float, float]:
    """Of the whole machine, of the server, of this program."""
    all_times = psutil.cpu_times()
    total = sum(all_times[:9]) - all_times.idle - getattr(all_times, "iowait", 0.0)
    mine = sum(psutil.Process().cpu_times()[:2])
    return total, sum(_of_process(process) for process in tree(server)), mine


def _of_process(process: psutil.Process) -> float:
    """With the children that have ended."""
    try:
        return float(sum(process.cpu_times()[:4]))
    except GONE:
        return 0.0


def tree(root: int) -> list[psutil.Process]:
    """A process and all below it; none when it is gone."""
    try:
        process = psutil.Process(root)
        return [process, *process.children(recursive=True)]
    except GONE:
        return []


def resident_gib(root: int) -> float:
    """Memory of the process tree; what several share counts once (PSS)."""
    return round(sum(_pss(process) for process in tree(root)) / GIB, 2)


def _pss(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except GONE:
        return 0


def stop_tree(process: psutil.Popen, patience_s: float) -> None:
    """Ask the first process to end, then end what is left of those that it started."""
    members = tree(process.pid)
    if process.poll() is None:
        process.terminate()
    _, left = psutil.wait_procs(members, patience_s)
    for member in left:
        try:
            member.kill()
        except GONE:
            continue
    process.wait(patience_s)
