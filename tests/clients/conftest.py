"""The same service that the tests of the gateway have."""

from tests.serving.gateway.conftest import engine, http, replica

__all__ = ["engine", "http", "replica"]
