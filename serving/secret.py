"""What replica, gateways and the hosts of a slice share, so that nobody else is obeyed. Imports no JAX."""

import hmac
from pathlib import Path

from serving.errors import ConfigError

MIN_BYTES = 16
AUTHORIZATION = "authorization"


class Secret:
    """Never shown: what it is made of appears in no message and no representation."""

    def __init__(self, value: bytes) -> None:
        self.value = value

    @classmethod
    def read(cls, path: str | None) -> "Secret | None":
        """None for no file. Blanks around are left out. Raises ConfigError for one that cannot be read,
        can be guessed, or cannot be the value of a gRPC header."""
        if path is None:
            return None
        try:
            value = Path(path).read_bytes().strip()
        except OSError as error:
            raise ConfigError(f"--secret-file {path} cannot be read ({error.strerror}).") from error
        if len(value) < MIN_BYTES or not all(0x20 <= byte < 0x7F for byte in value):
            raise ConfigError(
                f"--secret-file {path} must hold one line of {MIN_BYTES} or more ASCII characters, has {len(value)}; "
                "`openssl rand -hex 32` makes a good one."
            )
        return cls(value)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Of a gRPC call that knows it."""
        return ((AUTHORIZATION, f"Bearer {self.value.decode()}"),)

    def is_known_to(self, metadata: tuple[tuple[str, str | bytes], ...]) -> bool:
        """Compared in a time that tells nothing."""
        said = next((value for key, value in metadata if key == AUTHORIZATION), "")
        said = said.encode() if isinstance(said, str) else said
        return hmac.compare_digest(said, b"Bearer " + self.value)
