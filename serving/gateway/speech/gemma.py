"""Gemma's calls: <start_function_call>call:name{key:<escape>text<escape>,n:3}<end_function_call>, and newer marks.

Not JSON, so a call is told once it is complete; of one that the answer's end cuts, the name.
"""

import re

import orjson

from serving.gateway.speech.marks import tell_content
from serving.gateway.speech.sayer import Sayer
from serving.gateway.speech.source import Reading, Source

ENDS = {"<start_function_call>": "<end_function_call>", "<|tool_call>": "<tool_call|>"}
QUOTES = ("<escape>", '<|"|>')
CALL = re.compile(r"\s*call:\s*([\w.-]+)\s*(?=\{)")
BEGUN = re.compile(r"\s*(?:c|ca|cal|call|call:\s*(?P<name>[\w.-]*))?\s*")
KEY = re.compile(r"\s*,?\s*([^:{}\[\],<>\s]+)\s*:\s*")
SCALAR = re.compile(r"[^,{}\[\]<>]+")
GAP = re.compile(r"[\s,]*")
MAX_DEPTH = 32


def read_gemma(source: Source, sayer: Sayer) -> Reading[None]:
    while mark := (yield from tell_content(source, sayer, tuple(ENDS))):
        begun, body = source.gap + mark, list[str]()
        source.remember()
        end = yield from source.tell_until((ENDS[mark],), body.append, is_cut_mark=bool)
        raw = source.forget()
        if not _tell_call(sayer, "".join(body), ended=end is not None):
            sayer.content(begun + raw)
        elif end:
            yield from source.skip()


def _tell_call(sayer: Sayer, text: str, *, ended: bool) -> bool:
    """False for what is no call. One without its end mark was cut, unless its arguments are all there."""
    call = CALL.match(text)
    if call is None:
        begun = None if ended else BEGUN.fullmatch(text)
        if begun is None or not sayer.is_named(begun["name"] or ""):
            return False
        sayer.break_off_unnamed()
        return True
    arguments = read_arguments(text[call.end() :])
    if (ended and arguments is None) or not sayer.call(call[1]):
        return False
    if arguments is None:
        sayer.break_off()
    else:
        sayer.arguments(arguments)
    return True


def read_arguments(text: str) -> str | None:
    """As JSON; None for what is not written so."""
    try:
        value, end = _value(text, 0, 0)
    except ValueError:
        return None
    return orjson.dumps(value).decode() if not text[end:].strip() else None


def _value(text: str, at: int, depth: int) -> tuple[object, int]:
    """The value that begins there and where it ends. Raises ValueError."""
    if depth > MAX_DEPTH:
        raise ValueError("nested too deeply")
    for quote in QUOTES:
        if text.startswith(quote, at):
            end = text.index(quote, at + len(quote))
            return text[at + len(quote) : end], end + len(quote)
    if text.startswith("{", at):
        return _object(text, at + 1, depth)
    if text.startswith("[", at):
        return _list(text, at + 1, depth)
    scalar = SCALAR.match(text, at)
    if scalar is None:
        raise ValueError("no value")
    return _scalar(scalar[0].strip()), scalar.end()


def _object(text: str, at: int, depth: int) -> tuple[object, int]:
    fields: dict[str, object] = {}
    while key := KEY.match(text, at):
        fields[key[1]], at = _value(text, key.end(), depth + 1)
    return fields, _closed(text, at, "}")


def _list(text: str, at: int, depth: int) -> tuple[object, int]:
    items: list[object] = []
    while (at := _after_gap(text, at)) < len(text) and text[at] != "]":
        item, at = _value(text, at, depth + 1)
        items.append(item)
    return items, _closed(text, at, "]")


def _closed(text: str, at: int, bracket: str) -> int:
    at = _after_gap(text, at)
    if not text.startswith(bracket, at):
        raise ValueError("not closed")
    return at + 1


def _after_gap(text: str, at: int) -> int:
    gap = GAP.match(text, at)
    return gap.end() if gap else at


def _scalar(word: str) -> object:
    """A bare word is a text."""
    try:
        return orjson.loads(word)
    except orjson.JSONDecodeError:
        return word
