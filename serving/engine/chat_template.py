"""ChatTemplate: renders messages with the Jinja template that came with the model, which is not trusted."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from serving.dialect import mentions_tools
from serving.engine.tool_prompt import describe_tools
from serving.errors import InvalidRequest

# What a template can raise when messages are not what it expects.
RENDER_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


class ChatTemplate:
    """A compiled template, in the dialect that Hugging Face transformers defined. May be used by many threads."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        """`tokens` are special tokens by the names that templates may use: `bos_token`, `pad_token`."""
        self._source = source
        self._tokens = tokens
        self._template: Template | None = None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        add_generation_prompt: bool,
    ) -> str:
        """Raises InvalidRequest with the template's own words when it refuses the messages."""
        if not mentions_tools(self._source):
            messages, tools = describe_tools(messages, tools), ()
        values = {
            **self._tokens,
            "tools": list(tools) or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._render(messages, values)
        except RENDER_ERRORS as error:
            reason = str(error).rstrip(".") or type(error).__name__
            raise InvalidRequest(
                f"the model's chat template refuses the messages: {reason}.", param="messages"
            ) from error

    def _render(self, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any]) -> str:
        """Arguments that are no JSON object, as those of a call that was cut, are shown as the text that they are. A
        template that goes through arguments by name cannot, and is given the text as one argument."""
        try:
            return self._compiled().render({**values, "messages": messages})
        except RENDER_ERRORS:
            named = [_with_named_text(message) for message in messages]
            if named == list(messages):
                raise
            return self._compiled().render({**values, "messages": named})

    def _compiled(self) -> Template:
        """Compiled at the first use, so that a broken template does not keep a model from completing text."""
        if self._template is None:
            self._template = _environment().from_string(self._source)
        return self._template


def _with_named_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    calls = message.get("tool_calls") or ()
    if not any(isinstance(call["function"]["arguments"], str) for call in calls):
        return message
    named = [{**call, "function": _named(call["function"])} for call in calls]
    return {**message, "tool_calls": named}


def _named(function: Mapping[str, Any]) -> Mapping[str, Any]:
    arguments = function["arguments"]
    return {**function, "arguments": {"arguments": arguments}} if isinstance(arguments, str) else function


class GenerationBlocks(Extension):
    """`{% generation %}` marks an assistant's words for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012 - declared so by Jinja

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own would write `<` as an escape, meant for web pages."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
