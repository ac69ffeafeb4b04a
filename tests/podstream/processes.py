"""Starts real processes, and ends exactly those."""

import asyncio
import os
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
FAKE_REPLICA = [sys.executable, str(ROOT / "tests" / "podstream" / "fake_replica.py")]
ENV = {**os.environ, "PYTHONPATH": str(ROOT)}


def replica_argv(address, *fake_options, drain_s=5):
    return [*FAKE_REPLICA, *fake_options, "--", "replica", "nowhere", "--listen", address, "--drain-s", str(drain_s)]


def gateway_argv(address, port, *options):
    return [sys.executable, "-m", "podstream", "gateway", "--replica", address, "--port", str(port), *options]


@asynccontextmanager
async def running(argv, **options):
    """A process that is killed in the end if it still runs."""
    usual = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE, "env": ENV, "cwd": ROOT}
    process = await asyncio.create_subprocess_exec(*argv, **{**usual, **options})
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def end_of(process, number=signal.SIGTERM, timeout_s=10):
    """Send a signal; returns the exit code and what it wrote to standard error."""
    process.send_signal(number)
    _, errors = await asyncio.wait_for(process.communicate(), timeout_s)
    return process.returncode, errors.decode()


def is_alive(pid):
    """A zombie that nobody has waited for yet is not alive."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
