"""Source: text that comes in pieces, for readers that do not want to know.

A reader is a generator that yields whenever it needs more. It sees only what the text is, never where it was cut: that
is why a stream and a whole answer are read alike.
"""

from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]

WHITESPACE = " \n\r\t"


def no_cut_mark(beginning: str) -> bool:
    return False


class Source:
    def __init__(self) -> None:
        self.text = ""
        """Not read yet."""
        self.ended = False
        self.gap = ""
        """The white space before the mark that was found last."""
        self._raw: list[str] | None = None

    def add(self, text: str) -> None:
        self.text += text

    def take(self, count: int) -> str:
        taken, self.text = self.text[:count], self.text[count:]
        if self._raw is not None:
            self._raw.append(taken)
        return taken

    def remember(self) -> None:
        """Keep what is taken from here on, for `forget`."""
        self._raw = []

    def forget(self) -> str:
        """What was taken since `remember`."""
        raw, self._raw = "".join(self._raw or ()), None
        return raw

    def has(self, count: int) -> Reading[bool]:
        """Whether so many characters come."""
        while len(self.text) < count and not self.ended:
            yield
        return len(self.text) >= count

    def peek(self) -> Reading[str]:
        """The next character, "" at the end."""
        yield from self.has(1)
        return self.text[:1]

    def skip(self, letters: str = WHITESPACE) -> Reading[str]:
        """Take all of these; returns the character that follows, "" at the end."""
        while True:
            rest = self.text.lstrip(letters)
            self.take(len(self.text) - len(rest))
            if rest or self.ended:
                return rest[:1]
            yield

    def take_mark(self, mark: str) -> Reading[bool]:
        """Take the mark if it comes next."""
        while len(self.text) < len(mark) and mark.startswith(self.text) and not self.ended:
            yield
        if not self.text.startswith(mark):
            return False
        self.take(len(mark))
        return True

    @property
    def is_done(self) -> bool:
        """All has come and was read."""
        return self.ended and not self.text

    def tell_until(
        self, marks: Sequence[str], tell: Callable[[str], None], *, is_cut_mark: Callable[[str], bool] = no_cut_mark
    ) -> Reading[str | None]:
        """Tell the text up to the first of the marks, which is taken and returned; None if none comes.

        White space before a mark is no part of the text. Held back is only what may become a mark, or such space. The
        end may cut a mark: `is_cut_mark` says whether its beginning is taken for one, and not told.
        """
        while True:
            at, mark = first_mark(self.text, marks)
            is_last = self.ended and mark is None
            if is_last and at < len(self.text) and is_cut_mark(self.text[at:]):
                tell(self.take(len(self.text[:at].rstrip(WHITESPACE))))
                self.take(len(self.text))
                return None
            safe = len(self.text) if is_last else len(self.text[:at].rstrip(WHITESPACE))
            if safe:
                tell(self.take(safe))
            if mark is not None:
                self.gap = self.take(at - safe)
                self.take(len(mark))
                return mark
            if self.ended:
                return None
            yield


def first_mark(text: str, marks: Sequence[str]) -> tuple[int, str | None]:
    """Where the first mark begins and which it is; without one, where the beginning of one may stand at the end."""
    found = [(at, mark) for mark in marks if (at := text.find(mark)) >= 0]
    held = min((begun(text, mark) for mark in marks), default=len(text))
    if found and min(found)[0] <= held:
        return min(found)
    return held, None


def begun(text: str, mark: str) -> int:
    """The first place from which on the text is a proper beginning of the mark; its length if there is none."""
    for at in range(max(0, len(text) - len(mark) + 1), len(text)):
        if mark.startswith(text[at:]):
            return at
    return len(text)
