"""GgufHeader: the metadata and the table of contents of a GGUF file, with no tensor read.

The `gguf` package's own reader makes several array views per string, which takes seconds for a vocabulary, and walks
past the end of a cut file. This one reads the same layout front to back and knows at every step how many bytes are
left, so that a cut or corrupt file is one clear error.
"""

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from gguf import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType

from model.errors import CheckpointError, UnsupportedModel

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMS = 4

_SCALARS = {
    GGUFValueType.UINT8: "B", GGUFValueType.INT8: "b", GGUFValueType.UINT16: "H", GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I", GGUFValueType.INT32: "i", GGUFValueType.FLOAT32: "f", GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q", GGUFValueType.INT64: "q", GGUFValueType.FLOAT64: "d",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgufTensor:
    path: Path
    """The file that holds it."""
    name: str
    quant: GGMLQuantizationType
    shape: tuple[int, ...]
    """Slowest dimension first, as in NumPy; the file has it the other way round."""
    offset: int
    """Bytes from the start of the file."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    fields: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @classmethod
    def read(cls, path: Path) -> "GgufHeader":
        """Raises CheckpointError for a missing, foreign, cut or corrupt file, UnsupportedModel for unknown versions."""
        if not path.is_file():
            raise CheckpointError(f"{path} is not a file.")
        with path.open("rb") as file:
            return _Cursor(path, file).header()


class _Cursor:
    """Reads values front to back; every length is checked against what is left of the file before it is believed."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file = file
        self._size = path.stat().st_size
        self._at = "the header"

    def header(self) -> GgufHeader:
        if (magic := self._bytes(4)) != MAGIC:
            raise CheckpointError(f"{self._path} is not a GGUF file: it starts with {magic!r}, not {MAGIC!r}.")
        if (version := self._number("I")) not in VERSIONS:
            raise UnsupportedModel(
                f"{self._path} has GGUF version {version}, little-endian versions {VERSIONS} are read."
            )
        num_tensors, num_fields = self._number("Q"), self._number("Q")
        fields = dict(self._field() for _ in range(self._count(num_fields, 12)))
        self._at = "the table of tensors"
        entries = [self._entry() for _ in range(self._count(num_tensors, 24))]
        start = self._aligned(self._file.tell(), fields.get("general.alignment", GGUF_DEFAULT_ALIGNMENT))
        return GgufHeader(fields, {entry[0]: self._tensor(*entry, start) for entry in entries})

    def _field(self) -> tuple[str, Any]:
        key = self._string()
        self._at = f"the value of {key}"
        return key, self._value(self._kind())

    def _kind(self) -> GGUFValueType:
        number = self._number("I")
        try:
            return GGUFValueType(number)
        except ValueError as error:
            raise self._corrupt(f"{number} is no value type") from error

    def _value(self, kind: GGUFValueType) -> Any:
        if kind == GGUFValueType.STRING:
            return self._string()
        if kind == GGUFValueType.ARRAY:
            return self._array(self._kind(), self._number("Q"))
        return self._numbers(_SCALARS[kind], 1)[0]

    def _array(self, kind: GGUFValueType, length: int) -> list[Any]:
        if kind in _SCALARS:
            return list(self._numbers(_SCALARS[kind], length))
        if kind == GGUFValueType.STRING:
            return [self._string() for _ in range(self._count(length, 8))]
        raise self._corrupt("an array holds arrays")

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dims = self._string(), self._number("I")
        if num_dims > MAX_DIMS:
            raise self._corrupt(f"tensor {name} has {num_dims} dimensions")
        return name, self._numbers("Q", num_dims)[::-1], self._number("I"), self._number("Q")

    def _tensor(self, name: str, shape: tuple[int, ...], number: int, offset: int, start: int) -> GgufTensor:
        try:
            quant = GGMLQuantizationType(number)
        except ValueError as error:
            raise UnsupportedModel(f"{self._path}: tensor {name} has the unknown type {number}.") from error
        tensor = GgufTensor(self._path, name, quant, shape, start + offset, self._num_bytes(name, shape, quant))
        if tensor.offset + tensor.num_bytes > self._size:
            raise CheckpointError(
                f"{self._path} is cut: tensor {name} ends at byte {tensor.offset + tensor.num_bytes:,}, "
                f"the file has {self._size:,}; fetch it again."
            )
        return tensor

    def _num_bytes(self, name: str, shape: tuple[int, ...], quant: GGMLQuantizationType) -> int:
        block, block_bytes = GGML_QUANT_SIZES[quant]
        if not shape or shape[-1] % block:
            raise self._corrupt(f"tensor {name} of shape {list(shape)} is not made of {quant.name} blocks of {block}")
        return math.prod(shape) // block * block_bytes

    def _aligned(self, offset: int, alignment: Any) -> int:
        if not isinstance(alignment, int) or alignment < 1:
            raise self._corrupt(f"general.alignment is {alignment!r}")
        return -(-offset // alignment) * alignment

    def _string(self) -> str:
        raw = self._bytes(self._number("Q"))
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self._corrupt("a string is not UTF-8") from error

    def _number(self, code: str) -> int:
        return int(self._numbers(code, 1)[0])

    def _numbers(self, code: str, count: int) -> tuple[Any, ...]:
        return struct.unpack(f"<{count}{code}", self._bytes(count * struct.calcsize(code)))

    def _count(self, count: int, min_bytes: int) -> int:
        """`count` things of at least `min_bytes` each must fit; a corrupt count would loop for ever."""
        self._need(count * min_bytes)
        return count

    def _bytes(self, count: int) -> bytes:
        self._need(count)
        return self._file.read(count)

    def _need(self, count: int) -> None:
        left = self._size - self._file.tell()
        if count > left:
            raise self._corrupt(f"{count:,} more bytes are needed, {left:,} of {self._size:,} are left")

    def _corrupt(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self._path} is cut or corrupt in {self._at}: {why}; fetch it again.")
