"""Request and its parts: what one client asks, after validation. Plain data, imports no JAX."""

import enum
import math
from dataclasses import dataclass, fields
from typing import Any

from serving.errors import InvalidRequest, PromptTooLong

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKENS = 1_000
SEED_BITS = 63
MAX_LOGIT_BIAS = 300
MAX_BANNED_TOKENS = 128
MAX_LOGPROBS = 20
MAX_CHOICES = 16
MAX_SALT_CHARS = 256
MAX_PROMPT_NUMBERS = 500_000
"""Log-probabilities that one prompt may be asked for; they are some ten bytes each on their way."""
MODEL_DEFAULTED = frozenset({"temperature", "top_k", "top_p", "min_p", "repetition_penalty"})
"""Where a request is silent about these, the model's authors have a say."""


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Priority(enum.StrEnum):
    """Who goes first."""

    INTERACTIVE = "interactive"
    """Someone waits for the answer."""
    BATCH = "batch"
    """Gets what the others leave, and makes way for them; always ends."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop. The defaults are OpenAI's."""

    temperature: float = 1.0
    """0 means greedy."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one."""
    seed: int | None = None
    """Same seed, same prompt, same answer, alone or in any batch. None draws one."""
    max_tokens: int | None = None
    """None: as many as the context holds."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    """Until the answer has so many tokens, those that would end it are banned and stop strings do not count."""
    repetition_penalty: float = 1.0
    """Above 1 makes tokens of prompt and answer less likely."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that the answer holds."""
    frequency_penalty: float = 0.0
    """The same, times how often it holds them."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit), each id once."""
    banned_token_ids: tuple[int, ...] = ()
    """Never chosen."""
    logprobs: int | None = None
    """Also tell each token's log-probability, and so many of the most likely tokens with theirs."""
    prompt_logprobs: int | None = None
    """The same of the prompt's tokens."""

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def __post_init__(self) -> None:
        _check_range("temperature", self.temperature, 0.0, 2.0)
        _check_range("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.0, 10.0, low_open=True)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_bias(self.logit_bias)
        _check_count("banned_token_ids", "banned token ids", len(self.banned_token_ids), MAX_BANNED_TOKENS)
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and not 0 <= count <= MAX_LOGPROBS:
                raise InvalidRequest(f"{name} must be 0 to {MAX_LOGPROBS}, got {count}.", param=name)
        if self.min_tokens < 0 or (self.max_tokens is not None and self.min_tokens > self.max_tokens):
            limit = "0 or more" if self.min_tokens < 0 else f"at most max_tokens, {self.max_tokens:,}"
            raise InvalidRequest(f"min_tokens must be {limit}, got {self.min_tokens:,}.", param="min_tokens")
        if self.top_k < 0:
            raise InvalidRequest(f"top_k must be 0 (off) or more, got {self.top_k}.", param="top_k")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InvalidRequest(f"max_tokens must be 1 or more, got {self.max_tokens}.", param="max_tokens")
        if self.seed is not None and not -(2**SEED_BITS) <= self.seed < 2**SEED_BITS:
            raise InvalidRequest(f"seed must fit in 64 bits, got {self.seed}.", param="seed")
        _check_count("stop", "stop strings", len(self.stop), MAX_STOP_STRINGS)
        _check_count("stop_token_ids", "stop token ids", len(self.stop_token_ids), MAX_STOP_TOKENS)
        for text in self.stop:
            if not 0 < len(text) <= MAX_STOP_CHARS:
                raise InvalidRequest(f"a stop string must have 1 to {MAX_STOP_CHARS} characters.", param="stop")


def choice_seed(seed: int | None, choice: int) -> int | None:
    """The seed of one of several answers: seed + choice, around the ends of 64 bits. Without one each draws its own."""
    return None if seed is None else (seed + choice + 2**SEED_BITS) % 2 ** (SEED_BITS + 1) - 2**SEED_BITS


class GrammarKind(enum.StrEnum):
    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"
    """A Lark grammar as llguidance reads it, or a GBNF one."""
    CHOICE = "choice"


GRAMMAR_PARAMS = {
    GrammarKind.JSON_OBJECT: "response_format",
    GrammarKind.JSON_SCHEMA: "response_format",
    GrammarKind.REGEX: "guided_regex",
    GrammarKind.LARK: "guided_grammar",
    GrammarKind.CHOICE: "guided_choice",
}
"""The field of a request that is at fault."""
MAX_GRAMMAR_BYTES = 64 << 10
MAX_CALLS = 16
"""Of tools in one answer that a grammar rules."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the text of an answer must look like. Whether it makes sense is found out where the vocabulary is known."""

    kind: GrammarKind
    source: str = ""
    """JSON schema, regex or grammar; of a choice, the JSON list of texts; nothing for any JSON object."""
    param: str = ""
    """The field that asked for it, to name when it is at fault; "" for the usual one of its kind."""
    max_calls: int = 0
    """So many calls of the prompt's tools may be the answer instead."""

    @property
    def field(self) -> str:
        return self.param or GRAMMAR_PARAMS[self.kind]

    def __post_init__(self) -> None:
        size = len(self.source.encode())
        if size > MAX_GRAMMAR_BYTES:
            raise InvalidRequest(f"a {self.kind} may have {MAX_GRAMMAR_BYTES:,} bytes, got {size:,}.", param=self.field)
        if not 0 <= self.max_calls <= MAX_CALLS:
            raise InvalidRequest(
                f"at most {MAX_CALLS} calls beside a {self.kind}, got {self.max_calls}.", param="tools"
            )


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages as the chat template sees them: JSON objects with at least `role` and `content`."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    """What the model may call, as OpenAI describes functions."""


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class Request:
    request_id: str
    model: str
    prompt: Prompt
    sampling: SamplingParams
    unset: frozenset[str] = frozenset()
    """Sampling fields (of MODEL_DEFAULTED) that the client left out: the model's recommendation fills them."""
    grammar: Grammar | None = None
    """None: any text."""
    priority: Priority = Priority.INTERACTIVE
    num_choices: int = 1
    """Answers to the one prompt. Answer i with a seed is what a request with `choice_seed(seed, i)` would get."""

    deadline_ms: int | None = None
    """From now on: an answer that has not begun by then is not wanted."""
    cache_salt: str = ""
    """Cached pages are shared with requests of the same salt only."""
    echo: bool = False
    """The answer begins with the prompt."""
    prompt_only: bool = False
    """Nothing is wanted but what there is to say about the prompt."""
    embed: bool = False
    """Wanted is the prompt's embedding."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_choices <= MAX_CHOICES:
            raise InvalidRequest(f"n must be 1 to {MAX_CHOICES}, got {self.num_choices}.", param="n")
        if self.deadline_ms is not None and self.deadline_ms < 1:
            raise InvalidRequest(f"deadline_ms must be 1 or more, got {self.deadline_ms}.", param="deadline_ms")
        _check_count("cache_salt", "characters in cache_salt", len(self.cache_salt), MAX_SALT_CHARS)


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request, written once, when it ends."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    drafted_tokens: int = 0
    """Guessed by speculative decoding."""
    accepted_tokens: int = 0
    """Of those, came true."""
    reasoning_tokens: int = 0
    """Of the answer's, spent on thoughts."""

    def __add__(self, other: "Usage") -> "Usage":
        """Of two requests for one answer."""
        return Usage(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(Usage)))


@dataclass(frozen=True, slots=True)
class Phases:
    """Where the time of one request went, in seconds."""

    queue_s: float = 0.0
    """Until it first got a slot."""
    prefill_s: float = 0.0
    """From then until its prompt was computed."""
    decode_s: float = 0.0
    """From then until its end."""
    first_step: int = 0
    """Of the engine's steps, the first with work for it."""
    last_step: int = 0

    @property
    def inference_s(self) -> float:
        return self.prefill_s + self.decode_s


@dataclass(frozen=True, slots=True)
class Load:
    """How full one engine is; rides on every step's message."""

    num_running: int = 0
    num_waiting: int = 0
    free_slots: int = 0
    total_slots: int = 0
    free_pages: int = 0
    total_pages: int = 0
    page_size: int = 0


def check_prompt_length(num_tokens: int, max_seq_len: int, param: str) -> None:
    """Raises PromptTooLong for one that leaves no room for an answer."""
    if num_tokens >= max_seq_len:
        counted = "1 token" if num_tokens == 1 else f"{num_tokens:,} tokens"
        raise PromptTooLong(f"prompt has {counted}, the context holds {max_seq_len:,} with the answer.", param=param)


def _check_range(name: str, value: float, low: float, high: float, *, low_open: bool = False) -> None:
    inside = math.isfinite(value) and (low < value if low_open else low <= value) and value <= high
    if not inside:
        bracket = "more than" if low_open else "at least"
        raise InvalidRequest(f"{name} must be {bracket} {low:g} and at most {high:g}, got {value:g}.", param=name)


def _check_count(name: str, what: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidRequest(f"at most {most} {what}, got {count:,}.", param=name)


def _check_bias(logit_bias: tuple[tuple[int, float], ...]) -> None:
    _check_count("logit_bias", "tokens in logit_bias", len(logit_bias), MAX_LOGIT_BIAS)
    if len(dict(logit_bias)) < len(logit_bias):
        raise InvalidRequest("logit_bias names a token twice.", param="logit_bias")
    for _, bias in logit_bias:
        _check_range("logit_bias", bias, -100.0, 100.0)
