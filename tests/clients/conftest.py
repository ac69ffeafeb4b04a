"""The same service that the tests of the gateway have."""

from tests.serving.gateway.conftest import http, service, shared, shared_gateway

__all__ = ["http", "service", "shared", "shared_gateway"]
