"""Whether what this machine keeps is as it was left, by a sum that is kept with it."""

from collections.abc import Callable
from pathlib import Path


def why_not_as_left(sum_file: Path, sum_of: Callable[[], str]) -> str:
    """What is wrong, as the end of a sentence; empty where nothing is. `sum_of` may raise OSError."""
    try:
        return "" if sum_file.read_text() == sum_of() else "damaged"
    except (OSError, UnicodeDecodeError) as error:
        return f"not to be trusted ({error})"
