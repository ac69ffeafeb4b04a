"""Dialects: how a model writes calls of tools and its thoughts, as far as its chat template tells. Imports no JAX."""

import enum

THINK, THOUGHT = "<think>", "</think>"


class ToolDialect(enum.StrEnum):
    """How a model calls a function."""

    NONE = "none"
    """Not known here: a request with tools is refused, unless it forces a call."""
    HERMES = "hermes"
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>; also Qwen."""
    LLAMA3 = "llama3"
    """The whole answer is {"name": ..., "parameters": {...}}."""
    MISTRAL = "mistral"
    """[TOOL_CALLS][{"name": ..., "arguments": {...}}], or newer [TOOL_CALLS]name{...}."""
    GEMMA = "gemma"
    """<start_function_call>call:name{key:<escape>text<escape>}<end_function_call>, and the same with newer marks."""


MARKS = {
    ToolDialect.NONE: (),
    ToolDialect.HERMES: ("<tool_call>", "</tool_call>"),
    ToolDialect.LLAMA3: ("<|python_tag|>",),
    ToolDialect.MISTRAL: ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    ToolDialect.GEMMA: (
        "<start_function_call>", "<end_function_call>", "<escape>",
        "<|tool_call>", "<tool_call|>", '<|"|>',
    ),
}  # fmt: skip
"""They may be special tokens of the vocabulary, which have no text unless it is asked for."""


def choose_tool_dialect(template: str | None) -> ToolDialect:
    """By what a chat template writes. One that knows no tools can have them described in Hermes' way."""
    if template is None:
        return ToolDialect.NONE
    if not mentions_tools(template):
        return ToolDialect.HERMES
    if "<start_function_call>" in template or "<|tool_call>" in template:
        return ToolDialect.GEMMA
    if "[TOOL_CALLS]" in template:
        return ToolDialect.MISTRAL
    if "<tool_call>" in template:
        return ToolDialect.NONE if "<function=" in template else ToolDialect.HERMES
    if '"parameters": ' in template or "<|python_tag|>" in template:
        return ToolDialect.LLAMA3
    return ToolDialect.NONE


def mentions_tools(template: str) -> bool:
    return "tools" in template


def thinks(template: str | None) -> bool:
    """Whether answers may begin with thoughts between <think> and </think>."""
    return template is not None and THOUGHT in template


def begins_in_thought(prompt: str) -> bool:
    """Some templates open the thought themselves, so that the answer begins within it."""
    return prompt.rstrip().endswith(THINK)
