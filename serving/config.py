"""ServeConfig: every figure that an operator may choose, one frozen tree, checked across fields before anything starts.

`podstream serve` holds the whole tree; the gateway and the replica each get their part as command-line flags
(`podstream/flags.py`). None means "work it out from the model and the memory", and is resolved into a new value.
"""

import math
from dataclasses import dataclass, fields, replace
from typing import Any

from model.quantization import Quantization
from serving.dialect import ToolDialect
from serving.errors import ConfigError

MIB = 1 << 20
MAX_BODY_BYTES = 32 * MIB  # a body travels to the replica in one gRPC message of at most twice this
UNIX_PREFIX = "unix:"
DTYPES = ("float32", "bfloat16")
KV_DTYPES = (*DTYPES, "int8", "fp8")
LOG_FORMATS = ("text", "json")
POOLINGS = ("mean", "last")
ATTENTIONS = ("xla", "cpu", "tpu", "ragged", "gpu")
NGRAM, DRAFT = "ngram:", "draft:"
MAX_DRAFTS = 15  # a tile of 16 queries


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One model on one slice: what `build_engine` needs."""

    checkpoint: str
    """Path or URL of a checkpoint, as `sharding.stored_model` reads it."""
    name: str | None = None
    """Name under which clients ask for the model; None takes the checkpoint's own."""
    mesh: str = "tensor=1"
    """As `sharding.spec.MeshSpec` reads it, or `auto`."""
    dtype: str | None = None
    """Type of the weights' float numbers on the device, one of `DTYPES`; None keeps the checkpoint's."""
    num_slots: int = 64
    """Requests that decode at once."""
    page_size: int = 16
    """Tokens in a KV page."""
    num_pages: int | None = None
    """Each for all layers, in one page or one of each set of layers; None takes what memory allows."""
    memory_bytes: int | None = None
    """What one device may use in all; None takes what the device says it has."""
    max_seq_len: int | None = None
    """Most tokens of one request, prompt and answer together; None takes the model's."""
    chunk_tokens: int = 256
    """Most prompt tokens that one step computes beside everyone's decode."""
    max_waiting: int = 1024
    """Requests that may wait for a slot; one more is refused at once."""
    overlap: bool = True
    """Dispatch the next step before the last one is read."""
    prefix_cache: bool = True
    """Keep the pages of finished requests, so that equal beginnings of prompts are computed once."""
    compile_cache: str | None = None
    """Folder or URL that keeps compiled programs for the next start."""
    crash_folder: str | None = None
    """Folder for what the last steps planned, written when one fails; None takes one for temporary files."""
    decode_steps: int = 8
    """Most tokens that one device call gives each stream when nobody waits; how many, its measured time decides."""
    quantize: str | None = None
    """How weights lie on the device, as `model.quantization` reads it; None keeps the checkpoint's way."""
    kv_dtype: str | None = None
    """Type of cached keys and values, one of `KV_DTYPES`; None takes that of the weights' floats."""
    attention: str | None = None
    """Form of paged attention, one of `ATTENTIONS`; None takes the fastest for the devices. See `kv.backends`."""
    speculate: str | None = None
    """`ngram:D` guesses up to D next tokens of a sequence from its own text, `draft:PATH:D` with the model of another
    checkpoint; they are checked in one call."""
    tool_dialect: str | None = None
    """How the model writes calls of tools, a `serving.dialect.ToolDialect`; None tells by its chat template."""
    reasoning: bool | None = None
    """Whether answers may begin with thoughts in <think>; None tells by the chat template."""
    model_files: str | None = None
    """Folder with config.json and tokenizer of a checkpoint that a training run left; None looks beside it."""
    keys: str | None = None
    """File that says where the tensors of such a checkpoint go (`model.key_table`); None looks beside it."""
    embeddings: str | None = None
    """How prompts become embeddings, one of `POOLINGS`; None serves none, and nobody pays for them."""
    loras: tuple[str, ...] = ()
    """Low-rank adapters from the start, each NAME=PATH of what PEFT has saved; a path may be a URL."""
    max_loras: int | None = None
    """Adapters that there is room for, to be loaded and unloaded while serving; None fixes `loras`."""
    max_lora_rank: int = 16
    """Highest rank of an adapter; all of them take the room of this one."""

    @property
    def num_adapters(self) -> int:
        """Adapters that there is room for; with 0 programs have nothing of them."""
        return len(self.loras) if self.max_loras is None else self.max_loras

    @property
    def lora_paths(self) -> dict[str, str]:
        """`loras` by name, in order."""
        return {name: path for name, _, path in (lora.partition("=") for lora in self.loras)}

    @property
    def max_drafts(self) -> int:
        """Tokens that may be guessed at once; 0 without speculation."""
        return 0 if self.speculate is None else int(self.speculate.rpartition(":")[2])

    @property
    def draft(self) -> "EngineConfig | None":
        """What `build_engine` needs for the model that guesses: all the same but its checkpoint, whose weights are
        taken as they lie. None where no model guesses."""
        if self.speculate is None or not self.speculate.startswith(DRAFT):
            return None
        path = self.speculate.removeprefix(DRAFT).rpartition(":")[0]
        return replace(
            self, checkpoint=path, speculate=None, quantize=None, model_files=None, keys=None, loras=(), max_loras=None
        )

    def __post_init__(self) -> None:
        _check_choice("dtype", self.dtype, DTYPES)
        _check_choice("kv dtype", self.kv_dtype, KV_DTYPES)
        _check_choice("attention", self.attention, ATTENTIONS)
        _check_choice("tool dialect", self.tool_dialect, tuple(ToolDialect))
        _check_choice("embeddings", self.embeddings, POOLINGS)
        if self.quantize is not None:
            Quantization.parse(self.quantize)
        _check_speculate(self.speculate)
        self._check_loras()
        _check_positive(self, "num_slots", "page_size", "num_pages", "memory_bytes", "max_seq_len", "chunk_tokens",
                        "max_waiting", "decode_steps", "max_loras", "max_lora_rank")  # fmt: skip
        if self.num_pages and self.max_seq_len and self.num_pages * self.page_size < self.max_seq_len:
            raise ConfigError(
                f"{self.num_pages} pages of {self.page_size} tokens hold {self.num_pages * self.page_size:,} tokens, "
                f"one request may need {self.max_seq_len:,}; raise --pages or lower --max-seq-len."
            )

    def _check_loras(self) -> None:
        for lora in self.loras:
            name, _, path = lora.partition("=")
            if not (name and path):
                raise ConfigError(f"--lora reads like NAME=PATH, got {lora!r}.")
        if len(self.lora_paths) < len(self.loras):
            raise ConfigError(f"--lora gives a name twice: {', '.join(self.loras)}.")
        if len(self.loras) > self.num_adapters:
            raise ConfigError(f"{len(self.loras)} adapters are more than --max-loras {self.max_loras}.")


@dataclass(frozen=True, slots=True)
class ReplicaConfig:
    """The gRPC service around one engine."""

    address: str = "127.0.0.1:9000"
    """`host:port`, or `unix:/path`."""
    drain_s: float = 30.0
    """How long running answers may go on after SIGTERM."""
    log_format: str = "text"
    """One of `LOG_FORMATS`."""
    otlp_traces: str | None = None
    """URL of an OpenTelemetry collector; None traces nothing."""
    coordinator: str | None = None
    """`host:port` at which the hosts of one slice find host 0; JAX takes the port above it. None: one host alone."""
    num_processes: int = 1
    """Hosts of the slice, with a process each."""
    process_id: int = 0
    """Number of this host. Host 0 owns gRPC."""
    join_s: float = 300.0
    """How long hosts wait for each other while they start."""

    def __post_init__(self) -> None:
        _check_address(self.address)
        _check_seconds(self, "drain_s")
        _check_seconds(self, "join_s")
        _check_choice("log format", self.log_format, LOG_FORMATS)
        _check_positive(self, "num_processes")
        if not 0 <= self.process_id < self.num_processes:
            raise ConfigError(
                f"--process-id must be from 0 to {self.num_processes - 1}, for {self.num_processes} processes, "
                f"got {self.process_id}."
            )
        if (self.coordinator is None) != (self.num_processes == 1):
            raise ConfigError("--coordinator and --num-processes (2 or more) belong together.")
        if self.coordinator is not None:
            _check_coordinator(self.coordinator)

    @property
    def coordinator_address(self) -> tuple[str, int]:
        """Host and port; only where there are several hosts."""
        host, _, port = (self.coordinator or "").rpartition(":")
        return host.strip("[]"), int(port)


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """The HTTP front."""

    host: str = "127.0.0.1"
    port: int = 8000
    replica: str = "127.0.0.1:9000"
    """Address of the replica."""
    max_body_bytes: int = 8 * MIB
    max_queued: int = 1024
    """Answers in flight, waiting ones included; one more gets 429 at once."""
    drain_s: float = 30.0
    tools_file: str | None = None
    """TOML file of the tools that the gateway runs; see `serving.gateway.server_tools.config`."""
    log_format: str = "text"
    otlp_traces: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65_535:
            raise ConfigError(f"--port must be from 0 (any free one) to 65535, got {self.port}.")
        _check_address(self.replica)
        _check_positive(self, "max_body_bytes", "max_queued")
        _check_seconds(self, "drain_s")
        _check_choice("log format", self.log_format, LOG_FORMATS)
        if self.max_body_bytes > MAX_BODY_BYTES:
            raise ConfigError(f"--max-body-bytes may be at most {MAX_BODY_BYTES:,}, got {self.max_body_bytes:,}.")


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Everything that `podstream serve` starts."""

    engine: EngineConfig
    replica: ReplicaConfig
    gateway: GatewayConfig

    def __post_init__(self) -> None:
        if self.gateway.replica != self.replica.address:
            raise ConfigError(
                f"the gateway would look for a replica at {self.gateway.replica}, "
                f"but the replica listens at {self.replica.address}."
            )


def _check_positive(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be 1 or more, got {value}.")


def _check_choice(what: str, value: str | None, known: tuple[str, ...]) -> None:
    if value is not None and value not in known:
        raise ConfigError(f"{what} {value!r} is not known; known: {', '.join(known)}.")


def _check_speculate(text: str | None) -> None:
    if text is None:
        return
    how, _, drafts = text.rpartition(":")
    is_known = f"{how}:" == NGRAM or (how.startswith(DRAFT) and how != DRAFT)
    if not (is_known and drafts.isascii() and drafts.isdigit() and 1 <= int(drafts[:9]) <= MAX_DRAFTS):
        raise ConfigError(
            f"--speculate reads like {NGRAM}4 or {DRAFT}PATH:4, with 1 to {MAX_DRAFTS} guessed tokens, got {text!r}."
        )


def _check_seconds(config: Any, name: str) -> None:
    value = getattr(config, name)
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"{name} must be 0 or more seconds, got {value}.")


def _check_address(address: str) -> None:
    if address.startswith(UNIX_PREFIX):
        return
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or int(port) > 65_535:
        raise ConfigError(f"a replica's address reads like 127.0.0.1:9000 or unix:/path, got {address!r}.")


def _check_coordinator(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65_535:
        raise ConfigError(f"--coordinator reads like 10.0.0.1:8476, with a port up to 65534, got {address!r}.")


def changed_fields(config: Any) -> dict[str, Any]:
    """The fields of one section that differ from their default, in order: what must be passed on as flags."""
    return {f.name: getattr(config, f.name) for f in fields(config) if getattr(config, f.name) != f.default}
