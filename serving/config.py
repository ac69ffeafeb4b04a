"""ServeConfig: every figure that an operator may choose, one frozen tree, checked across fields before anything starts.

A field is declared here and nowhere else, with its flag: commands take it, and `podstream serve`, which holds the whole
tree, passes it on to the processes that it starts (`podstream.options`). None means "work it out from the model and the
memory", and is resolved into a new value.
"""

import ipaddress
import math
import re
from dataclasses import dataclass, replace
from typing import Annotated, Any

from model.quantization import Quantization
from serving.dialect import ToolDialect
from serving.errors import ConfigError
from serving.flags import SIZE, Flag, flags_of

MIB = 1 << 20
MAX_BODY_BYTES = 32 * MIB  # a body travels to the replica in one gRPC message of at most twice this
UNIX_PREFIX = "unix:"
DTYPES = ("float32", "bfloat16")
KV_DTYPES = (*DTYPES, "int8", "fp8")
LOG_FORMATS = ("text", "json")
POOLINGS = ("mean", "last")
ATTENTIONS = ("xla", "cpu", "tpu", "ragged", "gpu")
NGRAM, DRAFT = "ngram:", "draft:"
ANY = "*"
MAX_DRAFTS = 15  # a tile of 16 queries


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One model on one slice: what `build_engine` needs."""

    checkpoint: str
    """Path or URL of a checkpoint, as `sharding.stored_model` reads it."""
    name: Annotated[str | None, Flag("--as", "Name by which clients ask for the model.", "NAME")] = None
    """None takes the checkpoint's own."""
    mesh: Annotated[
        str, Flag("--mesh", "Devices by axis (data, stage, expert, tensor), e.g. expert=2,tensor=4; or auto.")
    ] = "tensor=1"
    """As `sharding.spec.MeshSpec` reads it, or `auto`."""
    dtype: Annotated[str | None, Flag("--dtype", "bfloat16 or float32; default: as the checkpoint.")] = None
    """Type of the weights' float numbers on the device, one of `DTYPES`; None keeps the checkpoint's."""
    quantize: Annotated[
        str | None, Flag("--quantize", "int8 or int4 weights (also int4:64, int4:128); default: as the checkpoint.")
    ] = None
    """How weights lie on the device, as `model.quantization` reads it; None keeps the checkpoint's way."""
    kv_dtype: Annotated[
        str | None,
        Flag("--kv-dtype", "Cached keys and values as float32, bfloat16, int8 or fp8; default: as --dtype."),
    ] = None
    """One of `KV_DTYPES`; None takes the type of the weights' floats."""
    attention: Annotated[
        str | None,
        Flag(
            "--attention",
            "Form of paged attention: xla, cpu, tpu, ragged (jax's for TPUs) or gpu; default: by the devices.",
        ),
    ] = None
    """One of `ATTENTIONS`; None takes the fastest for the devices. See `kv.backends`."""
    num_slots: Annotated[int, Flag("--slots", "Requests that decode at once.")] = 64
    page_size: Annotated[int, Flag("--page-size", "Tokens in a KV page.")] = 16
    num_pages: Annotated[int | None, Flag("--pages", "KV pages; default: what memory allows.")] = None
    """Each for all layers, in one page or one of each set of layers."""
    memory_bytes: Annotated[int | None, Flag("--memory", "Memory of one device to use in all, such as 8GiB.", SIZE)] = (
        None
    )
    """None takes what the device says it has."""
    max_seq_len: Annotated[int | None, Flag("--max-seq-len", "Most tokens of prompt and answer together.")] = None
    """Of one request; None takes the model's."""
    chunk_tokens: Annotated[int, Flag("--chunk-tokens", "Most prompt tokens that one step computes.")] = 256
    """Beside everyone's decode."""
    max_waiting: Annotated[int, Flag("--max-waiting", "Requests that may wait for a slot.")] = 1024
    """One more is refused at once."""
    overlap: Annotated[bool, Flag("--overlap", "Dispatch a step before the last one is read.")] = True
    prefix_cache: Annotated[bool, Flag("--prefix-cache", "Compute equal beginnings of prompts once.")] = True
    """Keeps the pages of finished requests."""
    host_cache_bytes: Annotated[
        int | None,
        Flag("--host-cache", "Host memory for pages that the prefix cache has no room for, such as 8GiB.", SIZE),
    ] = None
    """Their copies, beside what the engine needs itself; None or 0 keeps none."""
    compile_cache: Annotated[
        str | None, Flag("--compile-cache", "Folder or URL that keeps compiled programs for the next start.")
    ] = None
    crash_folder: Annotated[
        str | None, Flag("--crash-folder", "Folder for what the last steps planned, should one fail.")
    ] = None
    """None takes one for temporary files."""
    decode_steps: Annotated[
        int, Flag("--decode-steps", "Most tokens that one device call gives each stream; 1 for one by one.")
    ] = 8
    """When nobody waits; how many, its measured time decides."""
    speculate: Annotated[
        str | None,
        Flag(
            "--speculate",
            "Guess up to D next tokens from a text's own repetitions (ngram:4), or with a smaller model of the same "
            "tokenizer (draft:PATH:4).",
            "HOW:D",
        ),
    ] = None
    """They are checked in one call."""
    tool_dialect: Annotated[
        str | None,
        Flag(
            "--tool-dialect",
            "How the model calls tools: hermes, llama3, mistral, gemma or none; default: by its chat template.",
        ),
    ] = None
    """A `serving.dialect.ToolDialect`."""
    reasoning: Annotated[
        bool | None, Flag("--reasoning", "Split <think> from answers; default: by the chat template.")
    ] = None
    model_files: Annotated[
        str | None,
        Flag(
            "--model-files", "Folder with config.json and tokenizer of a training checkpoint; default: beside it.",
            "FOLDER",
        ),
    ] = None  # fmt: skip
    keys: Annotated[
        str | None,
        Flag(
            "--keys",
            "TOML file that says where a training checkpoint's tensors go; default: podstream.toml beside it.",
            "FILE",
        ),
    ] = None
    """See `model.key_table`."""
    embeddings: Annotated[
        str | None,
        Flag(
            "--embeddings",
            "Serve /v1/embeddings as the mean of a prompt's hidden states, or its last one: mean, last.",
        ),
    ] = None
    """One of `POOLINGS`; None serves none, and nobody pays for them."""
    loras: Annotated[
        tuple[str, ...], Flag("--lora", "A low-rank adapter that PEFT saved, and its name; repeatable.", "NAME=PATH")
    ] = ()
    """From the start; a path may be a URL."""
    max_loras: Annotated[
        int | None, Flag("--max-loras", "Adapters to have room for, loaded and unloaded while serving.")
    ] = None
    """None fixes `loras`."""
    max_lora_rank: Annotated[int, Flag("--max-lora-rank", "Highest rank of an adapter.")] = 16
    """All of them take the room of this one."""
    profile_folder: Annotated[
        str | None,
        Flag("--profile-dir", "Folder or URL below which `podstream profile` may have traces written.", "DIR"),
    ] = None
    """None: nothing is written for who asks over the network."""
    control_tokens: Annotated[
        bool, Flag("--control-tokens", "Take text like <|im_end|> in messages for the token that it spells.")
    ] = False
    """Otherwise it stays text: see `serving.engine.control_tokens`."""

    stuck_s: Annotated[
        float,
        Flag(
            "--stuck-s",
            "A step that takes longer is stuck: requests fail, and if it does not end, the replica is started again. "
            "Never less than five times the longest step before.",
        ),
    ] = 10.0

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
        _check_seconds(self, "stuck_s")
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


DrainS = Annotated[float, Flag("--drain-s", "Seconds that running answers get after SIGTERM.")]
SecretFile = Annotated[
    str | None, Flag("--secret-file", "A secret that replica, gateways and hosts share; nobody else is obeyed.", "FILE")
]
LogFormat = Annotated[
    str, Flag("--log-format", "text for people; json for machines: every event, with its request's id.")
]
OtlpTraces = Annotated[
    str | None, Flag("--otlp-traces", "Send traces to an OpenTelemetry collector, by OTLP over HTTP.", "URL")
]


@dataclass(frozen=True, slots=True)
class ReplicaConfig:
    """The gRPC service around one engine."""

    address: Annotated[str, Flag("--listen", "host:port or unix:/path to serve gRPC on.")] = "127.0.0.1:9000"
    drain_s: DrainS = 30.0
    log_format: LogFormat = "text"
    otlp_traces: OtlpTraces = None
    coordinator: Annotated[
        str | None,
        Flag(
            "--coordinator",
            "Where the hosts of one slice find host 0; JAX takes the port above. Default: as a LeaderWorkerSet says.",
            "HOST:PORT",
        ),
    ] = None
    """None: one host alone."""
    num_processes: Annotated[int, Flag("--num-processes", "Hosts of the slice, one process each.")] = 1
    process_id: Annotated[int, Flag("--process-id", "Number of this host; host 0 serves gRPC.")] = 0
    join_s: Annotated[float, Flag("--join-s", "Seconds that hosts wait for each other while they start.")] = 300.0
    secret_file: SecretFile = None
    """Needed as soon as somebody beyond this machine can reach the replica or its hosts."""

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
        self._check_secret()

    def _check_secret(self) -> None:
        for flag, address in (("--listen", self.address), ("--coordinator", self.coordinator)):
            if self.secret_file is None and address is not None and not _stays_here(address):
                raise ConfigError(
                    f"{flag} {address} can be reached from other machines: give replica, gateways and hosts the same "
                    "secret with --secret-file FILE."
                )

    @property
    def coordinator_address(self) -> tuple[str, int]:
        """Host and port; only where there are several hosts."""
        host, _, port = (self.coordinator or "").rpartition(":")
        return host.strip("[]"), int(port)


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """The HTTP front."""

    host: Annotated[str, Flag("--host", "Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1"
    port: Annotated[int, Flag("--port", "Port to listen on; 0 for any free one.")] = 8000
    replica: Annotated[str, Flag("--replica", "host:port or unix:/path of the replica.")] = "127.0.0.1:9000"
    max_body_bytes: Annotated[int, Flag("--max-body-bytes", "Largest request body.")] = 8 * MIB
    max_queued: Annotated[
        int, Flag("--max-queued", "Answers in flight; one more gets 429, and a place when it comes back as told.")
    ] = 1024
    """Waiting ones included."""
    drain_s: DrainS = 30.0
    tools_file: Annotated[
        str | None, Flag("--tools-file", "TOML file of tools that the gateway runs when the model calls them.")
    ] = None
    """See `serving.gateway.server_tools.config`."""
    log_format: LogFormat = "text"
    otlp_traces: OtlpTraces = None
    allow_hosts: Annotated[
        tuple[str, ...],
        Flag("--allow-host", "A name that clients ask for, beside loopback's; repeatable, * for any.", "NAME"),
    ] = ()
    """None named: any, where `host` is not loopback. See `serving.gateway.access`."""
    allow_origins: Annotated[
        tuple[str, ...],
        Flag("--allow-origin", "A web page's origin that may ask (CORS); repeatable, * for any.", "ORIGIN"),
    ] = ()
    """Beside them, where `host` is loopback, those of loopback."""
    secret_file: SecretFile = None

    def __post_init__(self) -> None:
        for host in self.allow_hosts:
            if not re.fullmatch(r"\*|\[[0-9A-Fa-f:.]+\]|[^\s:/@\[\]*]+", host):
                raise ConfigError(f"--allow-host reads like chat.example.com, without scheme and port, got {host!r}.")
        for origin in self.allow_origins:
            if not re.fullmatch(r"\*|null|[A-Za-z][\w.+-]*://[^\s/]*", origin):
                raise ConfigError(
                    f"--allow-origin reads like https://chat.example.com, without a path, got {origin!r}."
                )
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


def is_loopback(host: str) -> bool:
    """A name or an address of this machine that no other machine reaches."""
    name = host.lower().rstrip(".").strip("[]")
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")


def _check_positive(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ConfigError(f"{flags_of(config)[name].name} must be 1 or more, got {value}.")


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
        raise ConfigError(f"{flags_of(config)[name].name} must be 0 or more seconds, got {value}.")


def _stays_here(address: str) -> bool:
    """No other machine reaches it."""
    return address.startswith(UNIX_PREFIX) or is_loopback(address.rpartition(":")[0])


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
