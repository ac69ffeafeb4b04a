"""The root of all errors that are meant for people, and those of checkpoints.

    PodstreamError                  one sentence: the thing, the numbers, the way out
      CheckpointError               a checkpoint is missing, cut, corrupt or does not match its config
      UnsupportedModel              an architecture or tensor type that no reader here knows
      QuantizationError             weights cannot be stored in the asked format
      SourceUnavailable             a model cannot be fetched (no network, wrong digest, no such repository)

`serving.errors` continues the tree for requests and replicas.
"""


class PodstreamError(Exception):
    """Shown to a person without a traceback: `str(error)` is one sentence that needs no context."""


class CheckpointError(PodstreamError):
    """A checkpoint is missing, incomplete, corrupt, or does not fit its own config."""


class UnsupportedModel(PodstreamError):
    """The architecture, tensor type or feature is not implemented; the message names it."""


class QuantizationError(PodstreamError):
    """The format is unknown, or the weights do not fit it; the message says which do."""


class SourceUnavailable(PodstreamError):
    """The model could not be fetched; the message says from where and what to do."""
