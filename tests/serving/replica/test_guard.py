"""Who does not know a replica's secret is told so, whatever he asks; probes may ask for its health."""

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from rich.console import Console

from podstream.profile import ProfileFailed, profile
from serving.errors import ReplicaUnavailable
from serving.replica.proto import replica_pb2 as pb
from serving.replica.proto.replica_pb2_grpc import ReplicaStub
from serving.replica.transport import open_channel
from serving.request import Request, SamplingParams, TextPrompt
from serving.secret import Secret
from tests.fakes import FAKE_NAME
from tests.services import running_app, running_client, running_replica, until

SECRET = Secret(b"0123456789abcdef")
ASKED = Request("r", FAKE_NAME, TextPrompt("abc"), SamplingParams(max_tokens=4))


@pytest.fixture
async def replica():
    async with running_replica(secret=SECRET) as replica:
        yield replica


async def test_a_gateway_that_knows_it_is_served(replica):
    async with running_client(replica.address, secret=SECRET) as client:
        events = [event async for event in client.generate(ASKED)]
        assert (await client.fetch_status()).model == FAKE_NAME
        assert await client.tokenize(FAKE_NAME, TextPrompt("ab"))
    assert events


@pytest.mark.parametrize("secret", [None, Secret(b"another one's secret")])
async def test_one_that_does_not_is_told_why(replica, secret, caplog):
    async with running_client(replica.address, ready=False, secret=secret) as client:
        await until(lambda: "refuses this gateway" in client.trouble)
        with pytest.raises(ReplicaUnavailable, match="give it with --secret-file"):
            client.generate(ASKED)
        with pytest.raises(ReplicaUnavailable, match="--secret-file"):
            await client.tokenize(FAKE_NAME, TextPrompt("ab"))
        await asyncio.sleep(0.3)
    said = [record for record in caplog.records if "refuses this gateway" in record.getMessage()]
    assert len(said) == 1, "once, not with every try"
    assert not any(SECRET.value.decode() in record.getMessage() for record in caplog.records)


async def test_ready_says_so(replica):
    async with running_app(replica.address, ready=False) as http:
        for _ in range(200):
            if "--secret-file" in (response := await http.get("/ready")).text:
                break
            await asyncio.sleep(0.02)
    assert (response.status_code, "--secret-file" in response.text) == (503, True)


@pytest.mark.parametrize("name", ["GetStatus", "Drain", "Profile", "Tokenize", "LoadAdapter", "UnloadAdapter"])
async def test_no_call_comes_through(replica, name):
    message = {"GetStatus": pb.StatusRequest, "Drain": pb.DrainRequest, "Profile": pb.ProfileRequest,
               "Tokenize": pb.TokenizeRequest, "LoadAdapter": pb.LoadAdapterRequest,
               "UnloadAdapter": pb.UnloadAdapterRequest}[name]()  # fmt: skip
    async with open_channel(replica.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await getattr(ReplicaStub(channel), name)(message)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert replica.service.status.ready, "nobody has drained it"


async def test_loopback_without_a_secret_serves_but_takes_no_orders():
    """Any user of the machine may come there: he must not stop it for all others, nor have it write files."""
    async with running_replica(address="127.0.0.1:0") as replica, open_channel(replica.address) as channel:
        stub = ReplicaStub(channel)
        for call in (stub.Drain(pb.DrainRequest()), stub.Profile(pb.ProfileRequest(steps=1, name="x", wait_s=0.01))):
            with pytest.raises(
                grpc.aio.AioRpcError, match="needs a secret; start the replica with --secret-file"
            ) as no:
                await call
            assert no.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert (await stub.GetStatus(pb.StatusRequest())).state == "ready"
        assert not replica.engine.traces


async def test_health_is_open(replica):
    health_pb2_grpc.add_HealthServicer_to_server(health_aio.HealthServicer(), replica.server)
    async with open_channel(replica.address) as channel:
        reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert reply.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_profile_needs_it_too(replica, tmp_path):
    ask = {"replica": replica.address, "url": "", "wait_s": 0.05}
    (tmp_path / "secret").write_bytes(SECRET.value)
    with pytest.raises(ProfileFailed, match="--secret-file"):
        await asyncio.to_thread(profile, 1, "x", console=Console(quiet=True), **ask)
    with pytest.raises(ProfileFailed, match="no step ran"):
        await asyncio.to_thread(
            profile, 1, "x", console=Console(quiet=True), secret_file=str(tmp_path / "secret"), **ask
        )
