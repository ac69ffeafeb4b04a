"""OpenAI's `logit_bias`: a JSON object from token ids, as strings, to numbers."""

from typing import Any

MAX_DIGITS = 9  # what has more is no token id, and is refused here; the replica knows the vocabulary


def read_logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    """{"50256": -100} -> ((50256, -100.0),). Raises ValueError for anything else."""
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise ValueError("must be an object from token ids to numbers")
    return tuple((_read_token(key), _read_bias(key, bias)) for key, bias in value.items())


def _read_token(key: Any) -> int:
    if not (isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= MAX_DIGITS):
        raise ValueError(f"the keys must be token ids, got {str(key)[:40]!r}")
    return int(key)


def _read_bias(key: str, bias: Any) -> float:
    if isinstance(bias, bool) or not isinstance(bias, int | float):
        raise ValueError(f"the bias of token {key} must be a number")
    return float(bias)
