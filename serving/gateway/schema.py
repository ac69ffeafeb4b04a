"""OpenAI's request bodies as this gateway serves them, and their way to a Request.

Strict: a wrong type, an unknown field or a field that cannot be honoured is refused by name, never dropped in silence.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from serving.errors import InvalidRequest
from serving.gateway import neutral
from serving.gateway.answer_format import AnswerFormat
from serving.gateway.at_most import MAX_MESSAGES, AtMost
from serving.gateway.labels import Labels, ModelName
from serving.gateway.logit_bias import read_logit_bias
from serving.gateway.message import Message
from serving.gateway.parse import parse_body
from serving.gateway.speech.speech import SpeechPlan
from serving.gateway.strict import Strict
from serving.gateway.tools import MAX_TOOLS, ToolUse
from serving.replica.status import ReplicaStatus
from serving.request import (
    MAX_BANNED_TOKENS,
    MAX_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_SALT_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    MODEL_DEFAULTED,
    ChatPrompt,
    Grammar,
    Priority,
    Prompt,
    Request,
    SamplingParams,
    TextPrompt,
    TokenPrompt,
)

COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions
COMPLETION_MAX_LOGPROBS = 5  # OpenAI's limit there; for chats it is MAX_LOGPROBS
INT31 = 2**31
INT63 = 2**63

STRING: dict[str, Any] = {"type": "string"}
STOP_SCHEMA = {"anyOf": [STRING, {"type": "array", "items": STRING, "maxItems": 16}, {"type": "null"}]}
LOGIT_BIAS_SCHEMA = {"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}}
PROMPT_SCHEMA = {"anyOf": [STRING, {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}]}

Count = Annotated[int, Field(lt=INT31)]
TokenId = Annotated[int, Field(ge=0, lt=INT31)]


def _read_stop(value: Any) -> Any:
    return [] if value is None else [value] if isinstance(value, str) else value


def _read_prompt(value: Any) -> Prompt:
    """A string, token ids, or a list of exactly one of those."""
    if isinstance(value, list) and len(value) == 1 and not isinstance(value[0], int):
        value = value[0]
    if isinstance(value, str):
        return TextPrompt(value)
    if isinstance(value, list) and set(map(type, value)) <= {int}:
        return read_token_ids(value)
    raise ValueError("must be one string or one list of token ids; several prompts are not supported yet")


def read_token_ids(value: list[int]) -> TokenPrompt:
    """Raises ValueError."""
    if value and not -INT63 <= min(value) <= max(value) < INT63:
        raise ValueError("holds a token id that does not fit in 64 bits")
    return TokenPrompt(tuple(value))


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None
    """Each chunk says what was used so far; only with `include_usage`."""

    @model_validator(mode="after")
    def _goes_with_usage(self) -> Self:
        if self.continuous_usage_stats and not self.include_usage:
            raise ValueError("continuous_usage_stats needs include_usage")
        return self


class _Generate(AnswerFormat, Labels, arbitrary_types_allowed=True):
    """What both endpoints share."""

    model: ModelName
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=-1, lt=INT31)] | None = None
    min_p: float | None = None
    seed: Annotated[int, Field(ge=-INT63, lt=INT63)] | None = None
    stop: Annotated[
        list[str], AtMost(MAX_STOP_STRINGS, "stop strings"), BeforeValidator(_read_stop), WithJsonSchema(STOP_SCHEMA)
    ] = []  # noqa: RUF012 - a field
    stop_token_ids: Annotated[list[TokenId], AtMost(MAX_STOP_TOKENS, "stop token ids")] | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[
        tuple[tuple[int, float], ...],
        BeforeValidator(read_logit_bias),
        AtMost(MAX_LOGIT_BIAS, "tokens in logit_bias"),
        WithJsonSchema(LOGIT_BIAS_SCHEMA),
    ] = ()
    banned_token_ids: Annotated[list[TokenId], AtMost(MAX_BANNED_TOKENS, "banned token ids")] | None = None
    priority: Literal["interactive", "batch"] | None = None
    deadline_ms: Annotated[int, Field(ge=1, lt=INT31)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _prompt_logprobs_need_a_whole_answer(self) -> Self:
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest("prompt_logprobs may not be given with stream=true.", param="prompt_logprobs")
        return self

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> Self:
        if self.stream_options is not None and any(self.stream_options.model_dump().values()) and not self.stream:
            raise InvalidRequest("stream_options may only be given with stream=true.", param="stream_options")
        return self

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def wants_logprobs(self) -> bool:
        return self._num_logprobs() is not None

    def _num_logprobs(self) -> int | None:
        """Rivals per token; None for no log-probabilities."""
        raise NotImplementedError

    def _num_prompt_logprobs(self) -> int | None:
        return self.prompt_logprobs

    def _request(self, request_id: str, prompt: Prompt, max_tokens: int | None) -> Request:
        unset = frozenset(name for name in MODEL_DEFAULTED if getattr(self, name) is None)
        return Request(
            request_id,
            self.model,
            prompt,
            self._sampling(unset, max_tokens),
            unset,
            self.grammar(),
            Priority(self.priority or Priority.INTERACTIVE),
            num_choices=self.n or 1,
            deadline_ms=self.deadline_ms,
            cache_salt=self.cache_salt or "",
        )

    def _sampling(self, unset: frozenset[str], max_tokens: int | None) -> SamplingParams:
        chosen = {name: getattr(self, name) for name in MODEL_DEFAULTED - unset}
        if chosen.get("top_k") == -1:  # another server's way to say off
            chosen["top_k"] = 0
        return SamplingParams(
            **chosen,
            seed=self.seed,
            max_tokens=max_tokens,
            stop=tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            min_tokens=self.min_tokens or 0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=self.logit_bias,
            banned_token_ids=tuple(self.banned_token_ids or ()),
            logprobs=self._num_logprobs(),
            prompt_logprobs=self._num_prompt_logprobs(),
        )


class ChatBody(ToolUse, _Generate):
    """POST /v1/chat/completions. Without a limit the answer may fill the context."""

    messages: Annotated[list[Message], Field(min_length=1), AtMost(MAX_MESSAGES, "messages")]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """How long a model thinks cannot be steered: a hint that is ignored, and the answer says so."""
    server_tools: Annotated[list[str], AtMost(MAX_TOOLS, "tools")] | None = None
    """Of the tools that the server runs, those that the model may call; None for all."""

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs may only be given with logprobs=true.", param="top_logprobs")
        return self

    @property
    def ignored(self) -> tuple[str, ...]:
        """Fields without effect that might have had one elsewhere."""
        return ("reasoning_effort",) if self.reasoning_effort not in (None, "none") else ()

    def speech_plan(self, status: ReplicaStatus) -> SpeechPlan:
        if self.reasoning_effort == "none" and status.ready and status.thinks:
            raise InvalidRequest(
                f"{status.model!r} may think before it answers, which cannot be switched off here; "
                "leave reasoning_effort out.",
                param="reasoning_effort",
            )
        return super().speech_plan(status)

    def _num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def to_request(self, request_id: str) -> Request:
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        messages = tuple(message.to_template() for message in self.messages)
        prompt = ChatPrompt(messages, tuple(function.to_template() for function in self.offered))
        return self._request(request_id, prompt, limit)

    def grammar(self) -> Grammar | None:
        """A form is that of what the answer says where it calls no tool."""
        form = super().grammar()
        if self.is_forced:
            return self.tool_grammar()
        return form and replace(form, max_calls=self.max_calls)


class CompletionBody(_Generate):
    """POST /v1/completions."""

    prompt: Annotated[TextPrompt | TokenPrompt, BeforeValidator(_read_prompt), WithJsonSchema(PROMPT_SCHEMA)]
    logprobs: Annotated[int, Field(ge=0, le=COMPLETION_MAX_LOGPROBS)] | None = None
    echo: bool | None = None

    def _num_logprobs(self) -> int | None:
        return self.logprobs

    def _num_prompt_logprobs(self) -> int | None:
        wanted = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((count for count in wanted if count is not None), default=None)

    def to_request(self, request_id: str) -> Request:
        """No token at all may be asked for, to learn about the prompt."""
        limit = COMPLETION_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        prompt_only = limit == 0 and (bool(self.echo) or self.prompt_logprobs is not None)
        request = self._request(request_id, self.prompt, 1 if prompt_only else limit)
        return replace(request, echo=bool(self.echo), prompt_only=prompt_only)


def parse_chat(fields: Mapping[str, Any]) -> ChatBody:
    return parse_body(ChatBody, neutral.drop_neutral(fields, neutral.CHAT))


def parse_completion(fields: Mapping[str, Any]) -> CompletionBody:
    return parse_body(CompletionBody, neutral.drop_neutral(fields, neutral.COMPLETION))
