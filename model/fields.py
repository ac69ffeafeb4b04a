"""Fields: a JSON object of a file, asked field by field for what must stand there.

Whoever reads a file that others wrote asks through this, so that whatever stands there instead is one sentence with the
file's name, the field's and the value.
"""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from model.errors import CheckpointError

Json = Mapping[str, Any]
MAX_COUNT = 2**31 - 1
SHOWN_CHARS = 60


def read_text(path: Path) -> str:
    """Raises CheckpointError when the file cannot be read or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start:,}.") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error


def read_json(path: Path, *, required: bool = True) -> Json:
    """A JSON object of a model folder; empty if it may be missing and is. Raises CheckpointError."""
    if not path.is_file():
        if required:
            raise CheckpointError(f"{path.parent} is not a Hugging Face model folder: it lacks {path.name}.")
        return {}
    try:
        value = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits, or lists thousands deep
        raise CheckpointError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, expected a JSON object.")
    return value


def shown(value: object) -> str:
    """For a message: what a file holds may be long, or no text at all."""
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "..."


class Fields:
    """All that is read here may be null, which is the same as not being there. Each method raises CheckpointError."""

    def __init__(self, fields: Json, where: str) -> None:
        """`where` is the file, and the place in it, for messages."""
        self.where = where
        self._fields = fields

    @classmethod
    def read(cls, path: Path) -> "Fields":
        """Of a file that may be missing."""
        return cls(read_json(path, required=False), str(path))

    def __bool__(self) -> bool:
        return bool(self._fields)

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __contains__(self, name: str) -> bool:
        return name in self._fields

    def get(self, name: str) -> Any:
        """Whatever stands there."""
        return self._fields.get(name)

    def wrong(self, name: str, wanted: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {name} must be {wanted}, got {shown(self.get(name))}.")

    def count(self, name: str, *, least: int = 1, most: int = MAX_COUNT) -> int | None:
        if (value := self.get(name)) is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.wrong(name, "a positive whole number" if least == 1 else f"a whole number from {least}")
        if value > most:
            raise self.wrong(name, f"at most {most:,}")
        return value

    def number(
        self, name: str, *, above: float = -math.inf, least: float = -math.inf, most: float = math.inf
    ) -> float | None:
        if (value := self.get(name)) is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 1e300:
            raise self.wrong(name, "a number")
        if value <= above:
            raise self.wrong(name, "positive" if above == 0 else f"more than {above:g}")
        if not least <= value <= most:
            raise self.wrong(name, f"{least:g} to {most:g}" if most < math.inf else f"{least:g} or more")
        return float(value)

    def flag(self, name: str) -> bool:
        if not isinstance(value := self.get(name), bool | None):
            raise self.wrong(name, "true or false")
        return bool(value)

    def text(self, name: str) -> str | None:
        if (value := self.get(name)) is None:
            return None
        if not isinstance(value, str):
            raise self.wrong(name, "text")
        try:
            value.encode()
        except UnicodeEncodeError as error:  # half of a character, written as an escape
            raise self.wrong(name, "text of whole characters") from error
        return value

    def items(self, name: str) -> list[Any]:
        value = self.get(name)
        if not isinstance(value, list | None):
            raise self.wrong(name, "a list")
        return value or []

    def object(self, name: str) -> "Fields":
        value = self.get(name)
        if not isinstance(value, dict | None):
            raise self.wrong(name, "an object")
        return Fields(value or {}, f"{self.where}: {name}")

    def objects(self, name: str) -> list["Fields"]:
        """The objects of a list."""
        for item in self.items(name):
            if not isinstance(item, dict):
                raise self.wrong(name, "a list of objects")
        return [Fields(item, f"{self.where}: {name}") for item in self.items(name)]

    def token_id(self, name: str) -> int:
        if len(ids := self.token_ids(name)) != 1 or isinstance(self.get(name), list):
            raise self.wrong(name, "a token id")
        return ids[0]

    def token_ids(self, name: str) -> list[int]:
        """One, or a list of them."""
        value = self.get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in ids):
            raise self.wrong(name, "a token id or a list of them")
        if not all(0 <= token_id <= MAX_COUNT for token_id in ids):
            raise self.wrong(name, f"token ids from 0 to {MAX_COUNT:,}")
        return ids
