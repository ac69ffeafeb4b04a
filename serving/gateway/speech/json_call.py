"""A call of a tool as a JSON object: {"name": ..., "arguments": {...}}, in either order, told as it comes."""

from serving.gateway.speech.json_text import parse, read_key, read_value, tell_value
from serving.gateway.speech.sayer import Sayer
from serving.gateway.speech.source import Reading, Source

ARGUMENTS = ("arguments", "parameters")
NAMED, TYPED, EARLY = '"name":"', '{"type":"function",', tuple(f'{{"{key}":' for key in ARGUMENTS)
"""How the object of a call begins, without white space."""


def read_json_call(source: Source, sayer: Sayer) -> Reading[bool]:
    """False if it is no call of a known tool, before anything of it was told.

    What breaks off once the name is known stays a call, as far as it came: parts of it may be told already, and what
    was not said is not made up.
    """
    if (yield from source.skip()) != "{":
        return False
    source.take(1)
    named = told = False
    early: str | None = None
    while (key := (yield from read_key(source))) is not None:
        if key == "name" and not named:
            if not sayer.call(parse((yield from read_value(source)))):
                return False
            named = True
        elif key in ARGUMENTS and named and not told:
            told = True
            yield from tell_arguments(source, sayer)
        elif key in ARGUMENTS and early is None:
            early = yield from read_value(source)
        elif (yield from read_value(source)) is None:
            break
    if not named:
        return False
    closed = (yield from source.peek()) == "}"
    if closed:
        source.take(1)
    if not told and (closed or early is not None or not source.is_done):
        sayer.arguments(as_object(early))
    elif not told:
        sayer.break_off()
    return True


def begins_call(text: str, sayer: Sayer) -> bool:
    """Whether a text that has ended may have become a call of a known tool, had it gone on."""
    said = "".join(text.split())
    if said.startswith(EARLY):
        return parse(text) is None
    before, named, name = said.partition(NAMED)
    if named:
        return before in ("{", TYPED) and sayer.is_named(name)
    return any(whole.startswith(said) for whole in ("{" + NAMED, TYPED + NAMED, *EARLY))


def tell_arguments(source: Source, sayer: Sayer) -> Reading[None]:
    """An object as it comes. Some models write it as a JSON string within the JSON, or nothing for no arguments."""
    if (yield from source.skip()) == "{":
        if not (yield from tell_value(source, sayer.arguments)):
            sayer.break_off()
        return
    text = yield from read_value(source)
    if text is None and source.is_done:
        sayer.break_off()
    else:
        sayer.arguments(as_object(text))


def as_object(text: str | None) -> str:
    value = parse(text)
    if isinstance(value, str):
        return value
    return "{}" if text is None or value is None else text
