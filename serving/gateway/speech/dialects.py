"""One reader per dialect: calls are told as calls, everything else as content.

White space next to a call is part of neither. What looks like a call but names no tool of the request is content.
Where the answer ends within a call, the call is told as far as it came, and nothing if not even its name is known: its
marks and brackets are never content.
"""

from collections.abc import Callable

from serving.dialect import ToolDialect
from serving.gateway.speech.gemma import read_gemma
from serving.gateway.speech.json_call import begins_call, read_json_call, tell_arguments
from serving.gateway.speech.json_text import tell_value
from serving.gateway.speech.marks import MIN_MARK, tell_content
from serving.gateway.speech.sayer import Sayer
from serving.gateway.speech.source import WHITESPACE, Reading, Source

Reader = Callable[[Source, Sayer], Reading[None]]

TOOL_CALL, END_TOOL_CALL = "<tool_call>", "</tool_call>"
TOOL_CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
PYTHON_TAG = "<|python_tag|>"
MAX_NAME = 200  # characters that are waited for before something is no name


def read_plain(source: Source, sayer: Sayer) -> Reading[None]:
    yield from source.tell_until((), sayer.content)


def read_hermes(source: Source, sayer: Sayer) -> Reading[None]:
    while (yield from tell_content(source, sayer, (TOOL_CALL,))):
        begun = source.gap + TOOL_CALL
        source.remember()
        if not (yield from read_json_call(source, sayer)):
            _tell_no_call(source, sayer, begun, source.forget())
            continue
        source.forget()
        while (yield from source.skip()) == "{":
            if not (yield from read_json_call(source, sayer)):
                _see_end(source, sayer)
                break
        if (yield from source.take_mark(END_TOOL_CALL)):
            yield from source.skip()
        elif source.ended and END_TOOL_CALL.startswith(source.text):
            source.take(len(source.text))


def read_llama3(source: Source, sayer: Sayer) -> Reading[None]:
    """Calls begin the answer, or it has none."""
    source.remember()
    yield from source.skip()
    tagged = yield from source.take_mark(PYTHON_TAG)
    while (yield from read_json_call(source, sayer)):
        source.forget()
        source.remember()
        tagged = False
        yield from source.skip(WHITESPACE + ";,")
    raw = source.forget()
    rest = raw.strip().removeprefix(PYTHON_TAG).lstrip(WHITESPACE + ";,")
    cut_tag = source.ended and len(source.text) >= MIN_MARK and PYTHON_TAG.startswith(source.text)
    if cut_tag or (source.is_done and (rest or tagged) and begins_call(rest, sayer)):
        sayer.break_off_unnamed()
        return
    sayer.content(raw.lstrip(WHITESPACE + ";,") if sayer.num_calls else raw)
    yield from read_plain(source, sayer)


def read_mistral(source: Source, sayer: Sayer) -> Reading[None]:
    while (yield from tell_content(source, sayer, (TOOL_CALLS,))):
        begun = source.gap + TOOL_CALLS
        source.remember()
        listed = (yield from source.skip()) == "["
        told = yield from (read_list(source, sayer) if listed else _read_named_call(source, sayer))
        raw = source.forget()
        if not told:
            _tell_no_call(source, sayer, begun, raw)
        else:
            yield from source.skip()


def read_list(source: Source, sayer: Sayer) -> Reading[bool]:
    """[{...}, {...}]; False if not even the first is a call."""
    source.take(1)
    told = False
    while (yield from source.skip(WHITESPACE + ",")) == "{":
        if not (yield from read_json_call(source, sayer)):
            if told:
                _see_end(source, sayer)
            break
        told = True
    if told and (yield from source.peek()) == "]":
        source.take(1)
    return told


def _read_named_call(source: Source, sayer: Sayer) -> Reading[bool]:
    """name{...}, or name[ARGS]{...}, or name[CALL_ID]id[ARGS]{...}."""
    while not any(end in source.text for end in "{[") and len(source.text) < MAX_NAME and not source.ended:
        yield
    ends = [at for end in "{[" if (at := source.text.find(end)) >= 0]
    if not ends and source.ended and sayer.is_named(source.text.strip()):
        source.take(len(source.text))
        sayer.break_off_unnamed()
        return True
    if not ends or not sayer.call(source.take(min(ends)).strip()):
        return False
    if (yield from source.take_mark(CALL_ID)):
        yield from source.tell_until((ARGS,), _ignore)
    else:
        yield from source.take_mark(ARGS)
    yield from tell_arguments(source, sayer)
    return True


def read_forced_list(source: Source, sayer: Sayer) -> Reading[None]:
    """What the grammar of a required call makes: a list of calls and nothing else."""
    source.remember()
    told = (yield from source.skip()) == "[" and (yield from read_list(source, sayer))
    raw = source.forget()
    if not told:
        _tell_no_call(source, sayer, "", raw)
        yield from read_plain(source, sayer)


def read_forced_arguments(name: str) -> Reader:
    """What the grammar of a named tool makes: its arguments and nothing else. An answer that ends before them, within
    its thought, calls nothing."""

    def read(source: Source, sayer: Sayer) -> Reading[None]:
        if not (yield from source.peek()):
            return
        sayer.call(name)
        if not (yield from tell_value(source, sayer.arguments)) and source.is_done:
            sayer.break_off()
        yield from source.tell_until((), sayer.arguments)

    return read


def _tell_no_call(source: Source, sayer: Sayer, begun: str, raw: str) -> None:
    """Content, but for what the end of the answer kept from becoming a call."""
    if source.is_done and begins_call(raw.strip().removeprefix("["), sayer):
        sayer.break_off_unnamed()
    else:
        sayer.content(begun + raw)


def _see_end(source: Source, sayer: Sayer) -> None:
    """Of a call among others, which had no name yet."""
    if source.is_done:
        sayer.break_off_unnamed()


def _ignore(text: str) -> None:
    pass


READERS: dict[ToolDialect, Reader] = {
    ToolDialect.NONE: read_plain,
    ToolDialect.HERMES: read_hermes,
    ToolDialect.LLAMA3: read_llama3,
    ToolDialect.MISTRAL: read_mistral,
    ToolDialect.GEMMA: read_gemma,
}
