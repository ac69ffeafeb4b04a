"""What probes ask: is the gateway alive, can a token be made, and the figures."""

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from serving.errors import ReplicaUnavailable
from serving.gateway.call import Services
from serving.gateway.replica_collector import ReplicaCollector
from serving.replica.client import ReplicaClient

SCRAPE_TIMEOUT_S = 1.0


def health_router(services: Services) -> APIRouter:
    """Alive is not ready: a gateway without a replica must not be restarted, nor sent traffic."""
    router = APIRouter()
    collector = ReplicaCollector(services.replica.address)
    services.metrics.registry.register(collector)

    @router.get("/health")
    @router.get("/live")
    @router.get("/v2/health/live", include_in_schema=False)
    async def live() -> dict[str, str]:
        return {"status": "ok"}

    @router.get("/ready")
    @router.get("/readyz", include_in_schema=False)
    @router.get("/v2/health/ready", include_in_schema=False)
    async def ready() -> Response:
        state, detail = describe_readiness(services)
        return JSONResponse({"status": state, "detail": detail}, 200 if state == "ready" else 503)

    @router.get("/metrics")
    async def metrics() -> Response:
        await refresh(collector, services.replica)
        return Response(services.metrics.render(), headers={"content-type": CONTENT_TYPE_LATEST})

    return router


def describe_readiness(services: Services) -> tuple[str, str]:
    """A state, and for people what is missing."""
    replica = services.replica
    if services.admission.draining:
        return "draining", "the gateway is shutting down"
    if not replica.connected:
        return "unavailable", replica.trouble
    return replica.status.state.value, replica.status.detail


async def refresh(collector: ReplicaCollector, replica: ReplicaClient) -> None:
    """Ask the replica for its figures; without an answer the last ones stand, and `replica_up` tells."""
    try:
        status = await replica.fetch_status(SCRAPE_TIMEOUT_S)
    except ReplicaUnavailable:
        status = replica.status
    collector.update(status, up=replica.ready)
