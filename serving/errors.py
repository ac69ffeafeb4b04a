"""Errors of requests and replicas. Each class knows its HTTP status, gRPC status and OpenAI error fields.

    PodstreamError (model.errors)
      ConfigError                 a flag or config value is impossible
      RequestError                concerns one request only
        InvalidRequest        400   the request cannot be understood or served as asked
          PromptTooLong       400   prompt plus answer exceed the context
        ModelNotFound         404
        Overloaded            429   no room in the queue; carries retry_after_s
        DeadlineExceeded      504   it waited longer than it was worth
      ReplicaError                the service, not the request, is at fault
        ReplicaUnavailable    503   not ready, gone, or draining
        EngineFailed          500   a step failed; the request may be sent again

On the wire between gateway and replica an error is (code, message); `from_code` rebuilds the class.
"""

from model.errors import PodstreamError


class ConfigError(PodstreamError):
    """A flag or config value is impossible; raised before anything is started."""


class ServiceError(PodstreamError):
    """An error that an HTTP client sees. `code` is the stable machine-readable name."""

    http_status = 500
    grpc_status = "INTERNAL"
    openai_type = "server_error"
    code = "internal_error"
    should_retry: bool | None = None
    """Told to OpenAI's clients, which otherwise go by the status."""

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.retry_after_s = retry_after_s


class RequestError(ServiceError):
    openai_type = "invalid_request_error"


class InvalidRequest(RequestError):
    http_status, grpc_status, code = 400, "INVALID_ARGUMENT", "invalid_value"


class PromptTooLong(InvalidRequest):
    code = "context_length_exceeded"


class ModelNotFound(RequestError):
    http_status, grpc_status, code = 404, "NOT_FOUND", "model_not_found"


class Overloaded(RequestError):
    http_status, grpc_status, code = 429, "RESOURCE_EXHAUSTED", "queue_full"
    openai_type = "rate_limit_error"


class DeadlineExceeded(RequestError):
    http_status, grpc_status, code = 504, "DEADLINE_EXCEEDED", "deadline_exceeded"
    openai_type = "timeout_error"
    should_retry = False


class ReplicaError(ServiceError):
    """The service is at fault; the request may be repeated."""


class ReplicaUnavailable(ReplicaError):
    http_status, grpc_status, code = 503, "UNAVAILABLE", "replica_unavailable"


class EngineFailed(ReplicaError):
    http_status, grpc_status, code = 500, "INTERNAL", "engine_failed"


_BY_CODE: dict[str, type[ServiceError]] = {
    cls.code: cls
    for cls in (InvalidRequest, PromptTooLong, ModelNotFound, Overloaded, DeadlineExceeded,
                ReplicaUnavailable, EngineFailed)
}  # fmt: skip


def from_code(code: str, message: str, param: str | None = None, retry_after_s: int | None = None) -> ServiceError:
    """Rebuild an error that crossed the wire; an unknown code becomes EngineFailed."""
    return _BY_CODE.get(code, EngineFailed)(message, param=param, retry_after_s=retry_after_s)
