"""create_app: the gateway's HTTP side, put together. Knows no process, no signal and no socket."""

from fastapi import FastAPI

from serving.config import GatewayConfig
from serving.gateway.admission import Admission
from serving.gateway.answers import answers_router
from serving.gateway.call import Services
from serving.gateway.errors import add_error_handlers
from serving.gateway.health import health_router
from serving.gateway.models import models_router
from serving.gateway.request_id import RequestId
from serving.metrics import Metrics
from serving.replica.client import ReplicaClient


def create_app(
    config: GatewayConfig, replica: ReplicaClient, metrics: Metrics, admission: Admission | None = None
) -> FastAPI:
    """`replica` must be started by the caller, on the loop that serves the app."""
    services = Services(replica, admission or Admission(config.max_queued), metrics)
    app = FastAPI(title="podstream", openapi_url=None, redirect_slashes=False)
    app.include_router(answers_router(services, config.max_body_bytes))
    app.include_router(models_router(services))
    app.include_router(health_router(services))
    add_error_handlers(app)
    app.add_middleware(RequestId)
    return app
