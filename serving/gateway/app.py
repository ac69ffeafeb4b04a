"""create_app: the gateway's HTTP side, put together. Knows no process, no signal and no socket."""

from fastapi import FastAPI

from serving import tracing
from serving.config import GatewayConfig
from serving.gateway.access import AccessRules
from serving.gateway.adapters import LoadBody, UnloadBody, adapters_router
from serving.gateway.admission.admission import Admission
from serving.gateway.answers import answers_router
from serving.gateway.body_budget import LARGEST_AT_ONCE, BodyBudget, BoundBodies
from serving.gateway.call import Services
from serving.gateway.chat.body import ShortBody
from serving.gateway.chat.router import chat_router
from serving.gateway.door import Cors, Door
from serving.gateway.embeddings import EmbeddingsBody, embeddings_router
from serving.gateway.errors import add_error_handlers
from serving.gateway.health import health_router
from serving.gateway.http_metrics import HttpMetrics
from serving.gateway.methods import HeadAsGet
from serving.gateway.models import models_router
from serving.gateway.openapi import add_openapi
from serving.gateway.request_id import RequestId
from serving.gateway.responses.body import ResponseBody
from serving.gateway.responses.router import responses_router
from serving.gateway.responses.store import ResponseStore
from serving.gateway.schema import ChatBody, CompletionBody
from serving.gateway.server_tools.caller import ToolCaller
from serving.gateway.server_tools.config import NO_TOOLS, ServerTools
from serving.gateway.tokens import DetokenizeBody, TokenizeBody, tokens_router
from serving.gateway.traces import TraceRequests
from serving.metrics import Metrics
from serving.replica.client import ReplicaClient

BODIES = (
    ChatBody, CompletionBody, ResponseBody, ShortBody, EmbeddingsBody, TokenizeBody, DetokenizeBody, LoadBody,
    UnloadBody,
)  # fmt: skip


def create_app(
    config: GatewayConfig,
    replica: ReplicaClient,
    metrics: Metrics,
    admission: Admission | None = None,
    tools: ServerTools = NO_TOOLS,
) -> FastAPI:
    """`replica` must be started by the caller, on the loop that serves the app, and `app.state.tool_caller` closed."""
    tool_caller = ToolCaller(metrics.registry)
    services = Services(replica, admission or Admission(config.max_queued), metrics, tools, tool_caller)
    rules = AccessRules.of(config)
    app = FastAPI(title="podstream", docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.tool_caller = tool_caller
    app.state.body_budget = BodyBudget(LARGEST_AT_ONCE * config.max_body_bytes)
    app.include_router(answers_router(services, config.max_body_bytes))
    app.include_router(responses_router(services, config.max_body_bytes, ResponseStore()))
    app.include_router(chat_router(services, config.max_body_bytes))
    app.include_router(embeddings_router(services, config.max_body_bytes))
    app.include_router(models_router(services))
    app.include_router(adapters_router(services, config.max_body_bytes))
    app.include_router(tokens_router(services, config.max_body_bytes))
    app.include_router(health_router(services))
    add_openapi(app, BODIES)
    add_error_handlers(app)
    app.add_middleware(BoundBodies, budget=app.state.body_budget)
    if tracing.is_on():
        app.add_middleware(TraceRequests)
    app.add_middleware(HeadAsGet)
    app.add_middleware(Door, rules=rules)
    app.add_middleware(Cors, rules=rules)
    app.add_middleware(RequestId)
    app.add_middleware(HttpMetrics, registry=metrics.registry)
    return app
