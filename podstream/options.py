"""The flags of `podstream serve`, `replica` and `gateway`: declared once, for typer and for child processes."""

import re
from typing import Annotated

import typer

from serving.config import EngineConfig, GatewayConfig, ReplicaConfig, changed_fields

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_bytes(text: str) -> int:
    """`8GiB`, `500MB` or a plain number as bytes; `i` means powers of 1024."""
    if not (match := _SIZE.fullmatch(text.strip())):
        raise typer.BadParameter(f"{text!r} is not a size; write it like 8GiB or 500MB.")
    unit = (match[2] or "").lower()
    return int(float(match[1]) * (1024 if unit.endswith("i") else 1000) ** _POWERS[unit[:1]])


Host = Annotated[str, typer.Option("--host", help="Address to listen on; 0.0.0.0 for all.")]
Port = Annotated[int, typer.Option("--port", help="Port to listen on; 0 for any free one.")]
Name = Annotated[str | None, typer.Option("--as", metavar="NAME", help="Name by which clients ask for the model.")]
Mesh = Annotated[
    str, typer.Option("--mesh", help="Devices by axis (data, stage, expert, tensor), e.g. expert=2,tensor=4; or auto.")
]
Dtype = Annotated[str | None, typer.Option("--dtype", help="bfloat16 or float32; default: as the checkpoint.")]
Quantize = Annotated[
    str | None,
    typer.Option("--quantize", help="int8 or int4 weights (also int4:64, int4:128); default: as the checkpoint."),
]
KvDtype = Annotated[
    str | None,
    typer.Option("--kv-dtype", help="Cached keys and values as float32, bfloat16, int8 or fp8; default: as --dtype."),
]
Attention = Annotated[
    str | None,
    typer.Option(
        "--attention",
        help="Form of paged attention: xla, cpu, tpu, ragged (jax's for TPUs) or gpu; default: by the devices.",
    ),
]
Slots = Annotated[int, typer.Option("--slots", help="Requests that decode at once.")]
PageSize = Annotated[int, typer.Option("--page-size", help="Tokens in a KV page.")]
Pages = Annotated[int | None, typer.Option("--pages", help="KV pages; default: what memory allows.")]
Memory = Annotated[
    int | None,
    typer.Option(
        "--memory", metavar="SIZE", parser=parse_bytes, help="Memory of one device to use in all, such as 8GiB."
    ),
]
MaxSeqLen = Annotated[int | None, typer.Option("--max-seq-len", help="Most tokens of prompt and answer together.")]
ChunkTokens = Annotated[int, typer.Option("--chunk-tokens", help="Most prompt tokens that one step computes.")]
MaxWaiting = Annotated[int, typer.Option("--max-waiting", help="Requests that may wait for a slot.")]
Overlap = Annotated[bool, typer.Option("--overlap/--no-overlap", help="Dispatch a step before the last one is read.")]
PrefixCache = Annotated[
    bool, typer.Option("--prefix-cache/--no-prefix-cache", help="Compute equal beginnings of prompts once.")
]
CompileCache = Annotated[
    str | None, typer.Option("--compile-cache", help="Folder or URL that keeps compiled programs for the next start.")
]
CrashFolder = Annotated[
    str | None, typer.Option("--crash-folder", help="Folder for what the last steps planned, should one fail.")
]
DecodeSteps = Annotated[
    int, typer.Option("--decode-steps", help="Most tokens that one device call gives each stream; 1 for one by one.")
]
Speculate = Annotated[
    str | None,
    typer.Option(
        "--speculate",
        metavar="HOW:D",
        help="Guess up to D next tokens from a text's own repetitions (ngram:4), or with a smaller model of the same "
        "tokenizer (draft:PATH:4).",
    ),
]
ToolDialectName = Annotated[
    str | None,
    typer.Option(
        "--tool-dialect",
        help="How the model calls tools: hermes, llama3, mistral, gemma or none; default: by its chat template.",
    ),
]
Reasoning = Annotated[
    bool | None,
    typer.Option("--reasoning/--no-reasoning", help="Split <think> from answers; default: by the chat template."),
]
ModelFiles = Annotated[
    str | None,
    typer.Option(
        "--model-files",
        metavar="FOLDER",
        help="Folder with config.json and tokenizer of a training checkpoint; default: beside it.",
    ),
]
Keys = Annotated[
    str | None,
    typer.Option(
        "--keys",
        metavar="FILE",
        help="TOML file that says where a training checkpoint's tensors go; default: podstream.toml beside it.",
    ),
]
Embeddings = Annotated[
    str | None,
    typer.Option(
        "--embeddings",
        help="Serve /v1/embeddings as the mean of a prompt's hidden states, or its last one: mean, last.",
    ),
]
Loras = Annotated[
    list[str] | None,
    typer.Option("--lora", metavar="NAME=PATH", help="A low-rank adapter that PEFT saved, and its name; repeatable."),
]
MaxLoras = Annotated[
    int | None,
    typer.Option("--max-loras", help="Adapters to have room for, loaded and unloaded while serving."),
]
MaxLoraRank = Annotated[int, typer.Option("--max-lora-rank", help="Highest rank of an adapter.")]
MaxQueued = Annotated[int, typer.Option("--max-queued", help="Answers in flight; one more gets 429.")]
MaxBodyBytes = Annotated[int, typer.Option("--max-body-bytes", help="Largest request body.")]
DrainS = Annotated[float, typer.Option("--drain-s", help="Seconds that running answers get after SIGTERM.")]
LogFormat = Annotated[
    str, typer.Option("--log-format", help="text for people; json for machines: every event, with its request's id.")
]
OtlpTraces = Annotated[
    str | None,
    typer.Option("--otlp-traces", metavar="URL", help="Send traces to an OpenTelemetry collector, by OTLP over HTTP."),
]
ToolsFile = Annotated[
    str | None, typer.Option("--tools-file", help="TOML file of tools that the gateway runs when the model calls them.")
]
Listen = Annotated[str, typer.Option("--listen", help="host:port or unix:/path to serve gRPC on.")]
Coordinator = Annotated[
    str | None,
    typer.Option(
        "--coordinator",
        metavar="HOST:PORT",
        help="Where the hosts of one slice find host 0; JAX takes the port above. Default: as a LeaderWorkerSet says.",
    ),
]
NumProcesses = Annotated[int, typer.Option("--num-processes", help="Hosts of the slice, one process each.")]
ProcessId = Annotated[int, typer.Option("--process-id", help="Number of this host; host 0 serves gRPC.")]
JoinS = Annotated[float, typer.Option("--join-s", help="Seconds that hosts wait for each other while they start.")]
CpuHosts = Annotated[
    int,
    typer.Option(
        "--num-processes",
        min=1,
        help="Processes that share the mesh on this machine's CPU, as the hosts of a slice do.",
    ),
]
ReplicaAddress = Annotated[str, typer.Option("--replica", help="host:port or unix:/path of the replica.")]
FollowParent = Annotated[bool, typer.Option("--follow-parent", help="Stop when standard input ends.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
ListenFd = Annotated[int | None, typer.Option("--fd", help="Inherited listening socket, instead of host and port.")]

_ENGINE_FLAGS = {
    "name": "--as",
    "mesh": "--mesh",
    "dtype": "--dtype",
    "num_slots": "--slots",
    "page_size": "--page-size",
    "num_pages": "--pages",
    "memory_bytes": "--memory",
    "max_seq_len": "--max-seq-len",
    "chunk_tokens": "--chunk-tokens",
    "max_waiting": "--max-waiting",
    "overlap": "--overlap",
    "prefix_cache": "--prefix-cache",
    "compile_cache": "--compile-cache",
    "crash_folder": "--crash-folder",
    "decode_steps": "--decode-steps",
    "quantize": "--quantize",
    "kv_dtype": "--kv-dtype",
    "attention": "--attention",
    "speculate": "--speculate",
    "tool_dialect": "--tool-dialect",
    "reasoning": "--reasoning",
    "model_files": "--model-files",
    "keys": "--keys",
    "embeddings": "--embeddings",
    "loras": "--lora",
    "max_loras": "--max-loras",
    "max_lora_rank": "--max-lora-rank",
}
_REPLICA_FLAGS = {
    "address": "--listen",
    "drain_s": "--drain-s",
    "log_format": "--log-format",
    "otlp_traces": "--otlp-traces",
    "coordinator": "--coordinator",
    "num_processes": "--num-processes",
    "process_id": "--process-id",
    "join_s": "--join-s",
}
_GATEWAY_FLAGS = {
    "host": "--host",
    "port": "--port",
    "replica": "--replica",
    "max_body_bytes": "--max-body-bytes",
    "max_queued": "--max-queued",
    "drain_s": "--drain-s",
    "tools_file": "--tools-file",
    "log_format": "--log-format",
    "otlp_traces": "--otlp-traces",
}


def replica_arguments(engine: EngineConfig, replica: ReplicaConfig) -> list[str]:
    """`podstream replica` arguments that read back as the same configs."""
    return ["replica", engine.checkpoint, *_flags(engine, _ENGINE_FLAGS), *_flags(replica, _REPLICA_FLAGS)]


def gateway_arguments(gateway: GatewayConfig) -> list[str]:
    """`podstream gateway` arguments that read back as the same config."""
    return ["gateway", *_flags(gateway, _GATEWAY_FLAGS)]


def _flags(config: EngineConfig | ReplicaConfig | GatewayConfig, names: dict[str, str]) -> list[str]:
    written: list[str] = []
    for field, value in changed_fields(config).items():
        if field == "checkpoint":
            continue
        flag = names[field]
        values = value if isinstance(value, tuple) else (value,)
        for each in values:
            written += [_switch(flag, each)] if isinstance(each, bool) else [flag, str(each)]
    return written


def _switch(flag: str, on: bool) -> str:
    return flag if on else flag.replace("--", "--no-", 1)
