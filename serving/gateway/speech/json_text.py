"""JSON as text that is still coming: where a value ends, and what the keys of an object are."""

import re
from collections.abc import Callable

import orjson

from serving.gateway.speech.source import WHITESPACE, Reading, Source

SCALAR_END = re.compile(r"[,\]}\s]")
TURN = re.compile(r'["{}\[\]]')
QUOTE = re.compile(r'["\\]')


def tell_value(source: Source, tell: Callable[[str], None]) -> Reading[bool]:
    """Tell the text of the value that comes next, as it is; False if it breaks off."""
    first = yield from source.skip()
    if first == '"':
        return (yield from _tell_string(source, tell))
    if first not in ("{", "["):
        return (yield from _tell_scalar(source, tell))
    depth = 0
    while True:
        turn = TURN.search(source.text)
        if turn is None:
            tell(source.take(len(source.text)))
            if source.ended:
                return False
            yield
        elif turn[0] == '"':
            tell(source.take(turn.start()))
            if not (yield from _tell_string(source, tell)):
                return False
        else:
            tell(source.take(turn.end()))
            depth += 1 if turn[0] in "{[" else -1
            if depth <= 0:
                return True


def _tell_string(source: Source, tell: Callable[[str], None]) -> Reading[bool]:
    """From its opening quote, which is there, to its closing one."""
    tell(source.take(1))
    while True:
        turn = QUOTE.search(source.text)
        if turn is None:
            tell(source.take(len(source.text)))
        elif turn[0] == '"':
            tell(source.take(turn.end()))
            return True
        elif (yield from source.has(turn.end() + 1)):
            tell(source.take(turn.end() + 1))
            continue
        if source.ended:
            tell(source.take(len(source.text)))
            return False
        yield


def _tell_scalar(source: Source, tell: Callable[[str], None]) -> Reading[bool]:
    """A number or a word ends where something else begins."""
    told = 0
    while True:
        end = SCALAR_END.search(source.text)
        count = len(source.text) if end is None else end.start()
        told += count
        tell(source.take(count))
        if end is not None:
            return told > 0
        if source.ended:
            return False
        yield


def read_value(source: Source) -> Reading[str | None]:
    """The text of the value that comes next, once it is complete; None if it breaks off."""
    parts: list[str] = []
    complete = yield from tell_value(source, parts.append)
    return "".join(parts) if complete else None


def read_key(source: Source) -> Reading[str | None]:
    """The next key of an object with its colon, or None at the object's end or where there is none."""
    if (yield from source.skip(WHITESPACE + ",")) != '"':
        return None
    text = yield from read_value(source)
    if text is None or (yield from source.skip()) != ":":
        return None
    source.take(1)
    key = parse(text)
    return key if isinstance(key, str) else None


def parse(text: str | None) -> object:
    """The value, or None for what is no JSON."""
    try:
        return orjson.loads(text or "")
    except orjson.JSONDecodeError:
        return None
