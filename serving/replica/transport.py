"""The gRPC settings that both ends must agree on. Imports no JAX."""

from typing import Any

import grpc

MAX_MESSAGE_BYTES = 64 << 20
KEEPALIVE_MS = 8_000  # a peer that is frozen or unplugged is noticed within KEEPALIVE_MS + KEEPALIVE_TIMEOUT_MS
KEEPALIVE_TIMEOUT_MS = 4_000

_COMMON: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),  # 60 s without it, whatever keepalive_timeout_ms says
    ("grpc.keepalive_permit_without_calls", 1),
]
SERVER_OPTIONS: list[tuple[str, Any]] = [
    *_COMMON,
    ("grpc.so_reuseport", 0),  # else two replicas on one port would share its requests silently
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
]
CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    *_COMMON,
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.enable_http_proxy", 0),
]


def open_channel(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
