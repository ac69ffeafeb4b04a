"""A replica: the gRPC service around one engine, and the client that gateways hold."""
