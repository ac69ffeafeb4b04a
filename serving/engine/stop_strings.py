"""StopStrings: cuts an answer before the first stop string, and never shows a part of one."""

from collections.abc import Sequence


class StopStrings:
    """State of one answer. What is shown does not depend on how the text is split into pushes.

    Of several stop strings the one that is complete first wins, and of those the longest. Text that could be the
    beginning of one is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """The text that may be shown now, and whether a stop string was met; then nothing may be pushed any more."""
        if not self._stops or not text:
            return text, False
        text = self._held + text
        self._held = ""
        if (cut := self._find(text)) is not None:
            return text[:cut], True
        keep = len(text) - max(_overlap(text, stop) for stop in self._stops)
        self._held = text[keep:]
        return text[:keep], False

    def finish(self) -> str:
        """What was held back for a stop string that did not come."""
        rest, self._held = self._held, ""
        return rest

    def _find(self, text: str) -> int | None:
        """Where to cut; only what was held and what is new is searched, so the work per token does not grow."""
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        return min(found)[1] if found else None


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` starts with, short of all of it."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start = text.find(stop[0], start + 1)
    return 0
