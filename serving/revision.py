"""What this process runs: a digest of podstream's own sources. Imports no JAX."""

from functools import cache
from hashlib import sha256
from pathlib import Path

PACKAGES = ("model", "sharding", "kv", "serving")


@cache
def revision() -> str:
    """Equal for equal sources of the packages that make programs and run them."""
    root = Path(__file__).parents[1]
    files = sorted(path for name in PACKAGES for path in (root / name).rglob("*.py"))
    return digest(*(f"{path.relative_to(root)}\0{path.read_text()}" for path in files))


def digest(*texts: str) -> str:
    return sha256("\0".join(texts).encode()).hexdigest()[:32]
