"""What the replica and an engine say to each other: token ids in, token ids out. Imports no JAX."""

import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from serving.errors import ServiceError
from serving.request import FinishReason, Load, Priority, SamplingParams


class Matcher(Protocol):
    """One answer's place in its grammar."""

    @property
    def native(self) -> Any:
        """What `grammar.MaskWriter` understands."""
        ...

    @property
    def definition(self) -> str:
        """What it was made from, for `GrammarCompiler.restore`."""
        ...

    @property
    def is_stopped(self) -> bool:
        """Nothing can follow: the answer is complete, or an error ended it."""
        ...

    @property
    def error(self) -> str:
        """Why the answer cannot go on; empty while it can."""
        ...

    def accept(self, token_id: int) -> bool:
        """Whether the token was possible here; if not, nothing is from now on."""
        ...

    def copy(self) -> "Matcher":
        """Another one at the same place."""
        ...


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """A low-rank adapter that an engine has in one of its places."""

    name: str
    """By which clients ask for it."""
    path: str
    place: int
    """From 0."""
    number: int
    """Of the loads since the engine started: no two have the same, whatever their names and places."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One prompt as token ids. `sampling.stop` is the replica's business: the engine knows nothing about text."""

    request_id: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    cache_salt: str = ""
    """Requests share cached pages only with requests of the same salt."""
    priority: Priority = Priority.INTERACTIVE
    deadline: float | None = None
    """Monotonic seconds; a request that has not been admitted by then ends with DeadlineExceeded."""
    matcher: Matcher | None = None
    """For an answer that must follow a grammar; the engine's alone from now on."""
    after: str = ""
    """Id of a request with the same prompt that was submitted before: this one waits until that one's prompt lies in
    pages, if it can share them. Ignored when there is none."""
    embed: bool = False
    """Tell the prompt's embedding."""
    adapter: LoadedAdapter | None = None
    """None: the model as it is."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of the model's own probabilities at one place of an answer."""

    logprob: float
    """Of the token that was chosen."""
    top: tuple[tuple[int, float], ...]
    """(token id, log-probability) of the most likely tokens, falling, as many as were asked for."""
    rank: int = 0
    """Of prompt tokens: the place of the token among all, from 1."""


class SequenceOutput(NamedTuple):
    """News of one request from one step. `finish_reason` is set exactly once, in the last output of a request."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    error: ServiceError | None = None
    """Set with FinishReason.ERROR."""
    cached_tokens: int = 0
    """Prompt tokens that were not computed again; told when the prompt is computed and with the end."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per token if the request asked, else none."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """If the request asked: of the prompt's tokens, from its second on; in order, before the first token."""
    drafted_tokens: int = 0
    """With the end: tokens that were guessed while it ran; of what came true, some may lie behind its end."""
    accepted_tokens: int = 0
    embedding: bytes = b""
    """If the request asked, before its end: the prompt's, of length 1, as float32 in little-endian order."""
    prefilled: "Prefilled | None" = None
    """Once, when the prompt is computed."""


class Prefilled(NamedTuple):
    """What led to a request's first token, in seconds."""

    queue_s: float
    """Until it first got a slot."""
    prefill_s: float
    """From then until its prompt was computed."""
    first_step: int
    """The engine's first step with work for it."""


STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True, slots=True)
class StepStats:
    """Counters of one engine since it started, for `/metrics`."""

    num_steps: int = 0
    num_preemptions: int = 0
    num_compiles_after_ready: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefill_tokens: int = 0
    """Tokens computed in prefill: prompts without what was cached, and what preemption made compute again."""
    prefix_cache_queries: int = 0
    """Prompt tokens that were looked up in the prefix cache, once per request."""
    prefix_cache_hits: int = 0
    """Those that were found, on the device or in the host's memory."""
    step_host_s: float = 0.0
    """Seconds that the engine's thread spent in steps, without waiting for the device."""
    step_device_wait_s: float = 0.0
    """Seconds that it waited for the tokens of steps."""
    num_failed_steps: int = 0
    """Steps that raised; the engine started anew."""
    num_drafts: int = 0
    """Times that a sequence's guesses were checked."""
    num_draft_tokens: int = 0
    """Tokens guessed then."""
    num_accepted_tokens: int = 0
    """Those that came true."""
    accepted_at: tuple[int, ...] = ()
    """The same, by their place among the guesses."""
    step_tokens: tuple[int, ...] = ()
    """Steps by the tokens that they computed: up to each of STEP_TOKENS, and more."""
    sum_step_tokens: int = 0
    host_cache_queries: int = 0
    """Tokens of `prefix_cache_queries` that were not on the device, where the host's memory is a second tier."""
    host_cache_hits: int = 0
    """Those that were found there."""
    num_host_pages: int = 0
    """Pages that lie there now."""


@dataclass(frozen=True, slots=True)
class StepNews:
    """What one step tells of requests. Most of them got tokens and nothing else: those come as columns, since an object
    for each would be the dearest part of a step. Iterates over all as `SequenceOutput`."""

    outputs: tuple[SequenceOutput, ...] = ()
    """To be read first: of a request that also stands below they tell what came before its tokens."""
    names: Sequence[str] = ()
    """Request ids of the others."""
    token_ids: Sequence[tuple[int, ...]] = ()
    """What each of those got."""

    def __iter__(self) -> Iterator[SequenceOutput]:
        yield from self.outputs
        yield from map(SequenceOutput, self.names, self.token_ids)

    def __bool__(self) -> bool:
        return bool(self.outputs or self.names)

    def after(self, outputs: Sequence[SequenceOutput]) -> "StepNews":
        """The same, and before it what is not of the step itself, which is nothing in most steps."""
        return replace(self, outputs=(*outputs, *self.outputs)) if outputs else self

    @property
    def has_tokens(self) -> bool:
        return bool(self.names) or any(output.token_ids for output in self.outputs)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Everything that one step has to tell."""

    news: StepNews
    load: Load
    stats: StepStats = field(default_factory=StepStats)


class EngineState(enum.StrEnum):
    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"
    STOPPED = "stopped"


class EngineLoop(Protocol):
    """A thread that owns one engine. Methods may be called from any thread and return at once, but for tracing."""

    @property
    def state(self) -> EngineState: ...

    @property
    def failure(self) -> str:
        """Why it has failed, in one sentence for people; empty while it has not."""
        ...

    @property
    def max_seq_len(self) -> int:
        """Most tokens, prompt and answer together, that one request may have."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def load(self) -> Load: ...

    @property
    def step_s(self) -> float:
        """Seconds since the step that runs now began; 0 if none does."""
        ...

    @property
    def num_steps_begun(self) -> int:
        """Those that have ended and the one that runs."""
        ...

    def start(self, on_step: Callable[[StepOutput], None]) -> None:
        """Start the thread; `on_step` is called on it once per step with news, and must not block."""
        ...

    def submit(self, request: EngineRequest) -> None:
        """Queue a request. It always ends in one SequenceOutput with a finish_reason, also when refused."""
        ...

    def abort(self, request_id: str) -> None:
        """End a request with FinishReason.ABORT within one step; an unknown or ended id is ignored."""
        ...

    @property
    def num_adapters(self) -> int:
        """Places for adapters; 0 where the programs have none."""
        ...

    def load_adapter(self, place: int, path: str, may_write: Callable[[], bool] = lambda: True) -> None:
        """Read an adapter and, if it still may, write it into a place that no request uses. Requests that are submitted
        after it returns see it. Blocks for as long as reading takes; also before `start`.

        Raises ModelNotFound when nothing is there, InvalidRequest for what does not fit or is not supported, by name,
        and EngineFailed.
        """
        ...

    def start_trace(self, folder: str) -> None:
        """Begin a trace of what host and devices do. Blocks for up to a second.

        Raises InvalidRequest when there can be no trace.
        """
        ...

    def stop_trace(self) -> None:
        """Write the trace to its folder. Blocks for seconds. Raises InvalidRequest when it cannot be written."""
        ...

    def stop(self) -> None:
        """Abort what is left and end the thread."""
        ...
