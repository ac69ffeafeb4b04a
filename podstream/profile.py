"""`podstream profile`: asks a running replica for an XProf trace of its next steps."""

import grpc
import httpx
from rich.console import Console

from model.errors import PodstreamError
from podstream.scrape import Scrape
from serving.replica.proto import replica_pb2 as pb
from serving.replica.proto.replica_pb2_grpc import ReplicaStub
from serving.replica.transport import CHANNEL_OPTIONS
from serving.secret import Secret

SCRAPE_TIMEOUT_S = 3.0
WRITE_S = 120.0  # to write the files, once the steps have run


class ProfileFailed(PodstreamError):
    """There is no trace; the message says why."""


def profile(
    steps: int,
    name: str,
    *,
    replica: str | None,
    url: str,
    wait_s: float,
    console: Console,
    secret_file: str | None = None,
) -> None:
    """Trace the replica at the address `replica`, else the one behind the gateway at `url`. It writes the trace itself,
    below its `--profile-dir`.

    Raises ProfileFailed, and ConfigError for a secret that cannot be read.
    """
    secret = Secret.read(secret_file)
    address = replica or find_replica(url)
    console.print(f"waiting for {steps} steps of the replica at {address}", highlight=False, markup=False)
    reply = _ask(address, pb.ProfileRequest(steps=steps, name=name, wait_s=wait_s), secret)
    if not reply.steps:
        raise ProfileFailed(
            f"no step ran in {wait_s:g} s, so the trace in {reply.folder} is empty; send requests meanwhile."
        )
    console.print(
        f"{reply.steps} steps are in {reply.folder}; look at them with xprof or TensorBoard.",
        highlight=False,
        markup=False,
    )


def find_replica(url: str) -> str:
    """The address of the replica behind a gateway, which tells it on `/metrics`. Raises ProfileFailed."""
    base = url.rstrip("/").removesuffix("/v1")
    try:
        response = httpx.get(f"{base}/metrics", timeout=SCRAPE_TIMEOUT_S)
        addresses = Scrape.read(response.raise_for_status().text, 0.0).replicas
    except httpx.TransportError as error:
        raise ProfileFailed(
            f"nothing answers at {base} ({error}); start it with `podstream serve`, or give --url or --replica."
        ) from error
    except (httpx.HTTPStatusError, ValueError) as error:
        raise ProfileFailed(f"{base}/metrics does not tell of a replica; give --url or --replica.") from error
    if len(addresses) != 1:
        raise ProfileFailed(f"{base} tells of {len(addresses)} replicas; name one with --replica.")
    return addresses[0]


def _ask(address: str, request: pb.ProfileRequest, secret: Secret | None) -> pb.ProfileReply:
    metadata = () if secret is None else secret.metadata
    with grpc.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        try:
            reply: pb.ProfileReply = _stub(channel).Profile(
                request, timeout=request.wait_s + WRITE_S, metadata=metadata
            )
        except grpc.RpcError as error:
            raise _failure(address, error) from error
    return reply


def _failure(address: str, error: grpc.RpcError) -> ProfileFailed:
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.UNAVAILABLE and not details.startswith("the replica is "):
        return ProfileFailed(f"no replica answers at {address}; give the address that `podstream replica` listens at.")
    return ProfileFailed(details or f"the replica at {address} gave no reason.")


def _stub(channel: grpc.Channel) -> ReplicaStub:
    return ReplicaStub(channel)  # type: ignore[no-untyped-call]
