"""ResponseBody: what POST /v1/responses takes, and the chat that it asks for."""

from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from serving.errors import InvalidRequest
from serving.gateway.at_most import MAX_MESSAGES, AtMost
from serving.gateway.call import Services
from serving.gateway.chats import Chat
from serving.gateway.labels import Labels, ModelName
from serving.gateway.responses.items import LIST, TEXT, TEXT_OR_LIST, InputItem, to_messages
from serving.gateway.strict import Strict
from serving.gateway.tools import MAX_TOOLS

CHAT_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text",
    "reasoning_effort": "reasoning",
}


class FunctionTool(Strict):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def to_chat(self) -> dict[str, Any]:
        return {"type": "function", "function": self.model_dump(exclude={"type"}, exclude_none=True)}


class NamedTool(Strict):
    type: Literal["function"]
    name: str


class TextFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    def to_chat(self) -> dict[str, Any]:
        if self.type != "json_schema":
            return {"type": self.type}
        inner = {"name": self.name or "answer", "schema": self.json_schema, "strict": self.strict}
        return {"type": self.type, "json_schema": inner}


class TextOptions(Strict):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(Strict):
    """How long a model thinks cannot be steered here, and what it thinks is told whole."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


class StreamOptions(Strict):
    include_obfuscation: bool | None = None


class ResponseBody(Labels):
    model: ModelName
    input: Annotated[
        Annotated[str, Tag(TEXT)]
        | Annotated[list[InputItem], Field(min_length=1), AtMost(MAX_MESSAGES, "items"), Tag(LIST)],
        TEXT_OR_LIST,
    ]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    """True by default, as OpenAI has it."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: Annotated[list[FunctionTool], AtMost(MAX_TOOLS, "tools")] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    truncation: Literal["disabled"] | None = None
    include: Annotated[list[Literal["reasoning.encrypted_content"]], AtMost(8, "things to include")] | None = None
    """Thoughts are told in plain words, so that nothing is lost without their encrypted form."""
    background: Literal[False] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=0)] | None = None
    server_tools: Annotated[list[str], AtMost(MAX_TOOLS, "tools")] | None = None
    ignore_eos: bool | None = None
    """Load generators want answers of a length that they choose."""
    priority: Literal["interactive", "batch"] | None = None
    deadline_ms: Annotated[int, Field(ge=1, lt=2**31)] | None = None

    @property
    def ignored(self) -> tuple[str, ...]:
        """Fields without effect that might have had one elsewhere."""
        effort = self.reasoning and self.reasoning.effort not in (None, "none")
        return (*(("reasoning.effort",) if effort else ()), *(("include",) if self.include else ()))

    def new_messages(self) -> list[dict[str, Any]]:
        return to_messages(self.input)

    def to_chat(self, conversation: list[dict[str, Any]], services: Services) -> Chat:
        """`conversation` is what came before the input and the input. Raises InvalidRequest."""
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        named = self.tool_choice
        fields = {
            "model": self.model,
            "messages": [*system, *conversation],
            "max_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "tools": [tool.to_chat() for tool in self.tools or ()],
            "tool_choice": {"type": "function", "function": {"name": named.name}}
            if isinstance(named, NamedTool)
            else named,
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": self.text.format.to_chat() if self.text and self.text.format else None,
            "reasoning_effort": self.reasoning and self.reasoning.effort,
            "server_tools": self.server_tools,
            "ignore_eos": self.ignore_eos,
            "priority": self.priority,
            "deadline_ms": self.deadline_ms,
        }
        try:
            return Chat.read(services, fields)
        except InvalidRequest as error:
            error.param = CHAT_NAMES.get(error.param or "", error.param)
            raise
