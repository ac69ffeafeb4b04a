"""tell_content: content up to a call's mark, where the end of the answer may cut the mark itself."""

from collections.abc import Sequence

from serving.gateway.speech.sayer import Sayer
from serving.gateway.speech.source import Reading, Source

MIN_MARK = 4
"""A `<` at the end of an answer may be anything, `<too` is a mark that was cut. Behind a call any beginning is one."""


def tell_content(source: Source, sayer: Sayer, marks: Sequence[str]) -> Reading[str | None]:
    """The mark that was found, or None at the end."""

    def is_cut_mark(beginning: str) -> bool:
        if len(beginning) < MIN_MARK and not sayer.num_calls:
            return False
        sayer.break_off_unnamed()
        return True

    return (yield from source.tell_until(marks, sayer.content, is_cut_mark=is_cut_mark))
