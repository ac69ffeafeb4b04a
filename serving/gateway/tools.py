"""`tools`, `tool_choice` and `parallel_tool_calls` as OpenAI has them: what may or must be called, and how often."""

from typing import Annotated, Any, Literal, Self

import orjson
from pydantic import Field, model_validator

from serving.call_schema import NO_ARGUMENTS, call_schema
from serving.errors import InvalidRequest
from serving.gateway.at_most import AtMost
from serving.gateway.speech.speech import SpeechPlan
from serving.gateway.strict import Strict
from serving.replica.status import ReplicaStatus
from serving.request import MAX_CALLS, Grammar, GrammarKind

MAX_TOOLS = 128
NAME = r"^[a-zA-Z0-9_-]{1,64}$"


class Function(Strict):
    name: Annotated[str, Field(pattern=NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """Without effect: arguments of calls follow the schema where a call is forced or the answer has a form, others are
    the model's."""

    def to_template(self) -> dict[str, Any]:
        described = {"name": self.name, "description": self.description or "", "parameters": self.parameters}
        return {"type": "function", "function": described | {"parameters": self.parameters or NO_ARGUMENTS}}


class Tool(Strict):
    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: NamedFunction


class ToolUse(Strict):
    """The part of a chat's body that is about tools."""

    tools: Annotated[list[Tool], AtMost(MAX_TOOLS, "tools")] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _tools_make_sense(self) -> Self:
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise InvalidRequest("tools names a function twice.", param="tools")
        if self.tool_choice == "required" and not names:
            raise InvalidRequest("tool_choice is 'required', but there are no tools.", param="tool_choice")
        if self.named_tool is not None and self.named_tool not in names:
            raise InvalidRequest(
                f"tool_choice names {self.named_tool!r}, which is none of the tools.", param="tool_choice"
            )
        return self

    @property
    def named_tool(self) -> str | None:
        return self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None

    @property
    def offered(self) -> list[Function]:
        """What the model is told of."""
        return [] if self.tool_choice == "none" else [tool.function for tool in self.tools or ()]

    @property
    def is_forced(self) -> bool:
        """The answer will be calls and nothing else."""
        return self.tool_choice == "required" or self.named_tool is not None

    @property
    def max_calls(self) -> int:
        return 0 if not self.offered else 1 if self.parallel_tool_calls is False else MAX_CALLS

    def tool_grammar(self) -> Grammar | None:
        """What a forced call looks like; None if nothing is forced."""
        if self.named_tool is not None:
            (function,) = [function for function in self.offered if function.name == self.named_tool]
            return _grammar(function.parameters or NO_ARGUMENTS)
        return _grammar(self._required_schema()) if self.tool_choice == "required" else None

    def speech_plan(self, status: ReplicaStatus) -> SpeechPlan:
        """How the answer is to be read. Raises InvalidRequest for tools that the model cannot call in a known way."""
        if self.offered and not self.is_forced and status.ready and status.tool_dialect == "none":
            raise InvalidRequest(
                f"how {status.model!r} calls tools is not known here; leave tools out, or force a call by tool_choice.",
                param="tools",
            )
        return SpeechPlan(
            status.tool_dialect,
            frozenset(function.name for function in self.offered),
            1 if self.parallel_tool_calls is False else None,
            must_call=self.tool_choice == "required",
            forced_name=self.named_tool,
            thinks=status.thinks,
        )

    def _required_schema(self) -> dict[str, Any]:
        """A list of calls."""
        call, schemas = call_schema([(f.name, f.parameters or NO_ARGUMENTS) for f in self.offered])
        most = {"maxItems": 1} if self.parallel_tool_calls is False else {}
        return {"type": "array", "minItems": 1, **most, "items": call, "$defs": schemas}


def _grammar(schema: dict[str, Any]) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, orjson.dumps(schema).decode(), param="tools")
