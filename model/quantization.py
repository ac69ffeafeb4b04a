"""Quantization: how the weights of a model are stored in fewer bits. Plain data, imports no JAX.

int8        one scale per output channel
int4        groups of 32 consecutive inputs share a scale; `int4:64` and `int4:128` make the groups longer

Norms, biases and routers, whose few numbers decide much, stay as they are. Embeddings and the output head are int8 in
either format: see ARCHITECTURE.md for the figures.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from model import axes
from model.errors import QuantizationError

GROUPS = (32, 64, 128)
DEFAULT_GROUP = 32


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How one array is stored: int8, or int4 in groups."""

    group: int | None = None
    """Consecutive inputs, along the last input axis, that share a scale; None where all inputs of an output do."""

    @property
    def dtype(self) -> str:
        """Type of the stored array; in uint8 two int4 share a byte."""
        return "int8" if self.group is None else "uint8"


@dataclass(frozen=True, slots=True)
class Quantization:
    matrices: WeightFormat

    @classmethod
    def parse(cls, text: str) -> "Quantization":
        """Read `int8`, `int4` or `int4:64`; `str` writes it. Raises QuantizationError."""
        kind, colon, group = text.partition(":")
        if kind == "int8" and not colon:
            return cls(WeightFormat())
        if kind == "int4" and (not colon or group in map(str, GROUPS)):
            return cls(WeightFormat(int(group or DEFAULT_GROUP)))
        known = ", ".join(f"int4:{size}" for size in GROUPS)
        raise QuantizationError(
            f"quantisation {text!r} is not known; known: int8, int4 (int4:{DEFAULT_GROUP}), {known}."
        )

    def __str__(self) -> str:
        group = self.matrices.group
        return "int8" if group is None else f"int4:{group}"

    def format_of(
        self, name: str, shape: Sequence[int], logical_axes: Sequence[str], inputs: Sequence[int]
    ) -> WeightFormat | None:
        """How the array `name` is stored; None where it stays float. `inputs` are the axes that products sum over.

        Raises QuantizationError when the groups do not divide its inputs.
        """
        if not inputs or logical_axes[-1] == axes.EXPERTS:
            return None
        if axes.VOCAB in logical_axes:
            return WeightFormat()
        group = self.matrices.group
        if group is not None and shape[inputs[-1]] % group:
            raise QuantizationError(
                f"int4 groups of {group} do not divide the {shape[inputs[-1]]} inputs of {name}; "
                "choose smaller groups or int8."
            )
        return self.matrices


def choose_quantization(wanted: str | None, saved: str | None) -> Quantization | None:
    """How weights lie on the device: as they were saved, or as wanted where they were saved as floats.

    Raises QuantizationError for an unknown format, and for one that would round numbers a second time.
    """
    format_ = None if wanted is None else Quantization.parse(wanted)
    if saved is None:
        return format_
    kept = Quantization.parse(saved)
    if format_ is not None and format_ != kept:
        raise QuantizationError(
            f"the checkpoint is quantised to {kept} already, rounding it again to {format_} would add to its errors; "
            f"import the model with --quantize {format_}, or serve this one without --quantize."
        )
    return kept
