"""Recovers Llama 3's rope scaling from a GGUF file, which keeps the resulting factors instead of the parameters."""

import math

import numpy as np

from model.config import RopeScaling
from model.errors import UnsupportedModel
from model.foreign import Array

# Every published Llama 3.x model uses these; only the factor differs (8 for 3.1, 32 for 3.2).
LOW_FREQ_FACTOR, HIGH_FREQ_FACTOR, ORIGINAL_MAX_POSITION = 1.0, 4.0, 8192
TOLERANCE = 1e-4


def infer_rope_scaling(where: str, factors: Array, head_dim: int, theta: float) -> RopeScaling:
    """`factors` `[head_dim / 2]` divide the rope frequencies, fastest first.

    Raises UnsupportedModel when they are not Llama 3's rule with its published parameters.
    """
    scaling = RopeScaling(
        factor=float(factors.max(initial=1.0)),
        low_freq_factor=LOW_FREQ_FACTOR,
        high_freq_factor=HIGH_FREQ_FACTOR,
        original_max_position=ORIGINAL_MAX_POSITION,
    )
    expected = rope_factors(scaling, head_dim, theta)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=TOLERANCE):
        raise UnsupportedModel(
            f"{where}: rope_freqs.weight does not follow Llama 3's rule, which is the one supported."
        )
    return scaling


def rope_factors(scaling: RopeScaling, head_dim: int, theta: float) -> Array:
    """By how much each of the `[head_dim / 2]` rope frequencies is divided."""
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    turns = scaling.original_max_position / wavelengths
    span = scaling.high_freq_factor - scaling.low_freq_factor
    smooth = np.clip((turns - scaling.low_freq_factor) / span, 0.0, 1.0)
    return (1.0 / ((1.0 - smooth) / scaling.factor + smooth)).astype(np.float32)
