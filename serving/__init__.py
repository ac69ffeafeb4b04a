"""Requests in, tokens out: the engine, the gRPC replica around it, and the HTTP gateway in front."""
