from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ClientBatch(_message.Message):
    __slots__ = ("submits", "cancels")
    SUBMITS_FIELD_NUMBER: _ClassVar[int]
    CANCELS_FIELD_NUMBER: _ClassVar[int]
    submits: _containers.RepeatedCompositeFieldContainer[Submit]
    cancels: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, submits: _Optional[_Iterable[_Union[Submit, _Mapping]]] = ..., cancels: _Optional[_Iterable[int]] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("handle", "request_id", "model", "text", "token_ids", "messages_json", "tools_json", "sampling", "grammar", "priority", "echo", "prompt_only", "embed", "traceparent", "deadline_ms", "cache_salt", "num_choices")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_JSON_FIELD_NUMBER: _ClassVar[int]
    TOOLS_JSON_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    ECHO_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ONLY_FIELD_NUMBER: _ClassVar[int]
    EMBED_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    NUM_CHOICES_FIELD_NUMBER: _ClassVar[int]
    handle: int
    request_id: str
    model: str
    text: str
    token_ids: TokenIds
    messages_json: str
    tools_json: str
    sampling: Sampling
    grammar: Grammar
    priority: str
    echo: bool
    prompt_only: bool
    embed: bool
    traceparent: str
    deadline_ms: int
    cache_salt: str
    num_choices: int
    def __init__(self, handle: _Optional[int] = ..., request_id: _Optional[str] = ..., model: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., messages_json: _Optional[str] = ..., tools_json: _Optional[str] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ..., priority: _Optional[str] = ..., echo: _Optional[bool] = ..., prompt_only: _Optional[bool] = ..., embed: _Optional[bool] = ..., traceparent: _Optional[str] = ..., deadline_ms: _Optional[int] = ..., cache_salt: _Optional[str] = ..., num_choices: _Optional[int] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("kind", "source", "param", "max_calls")
    KIND_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    PARAM_FIELD_NUMBER: _ClassVar[int]
    MAX_CALLS_FIELD_NUMBER: _ClassVar[int]
    kind: str
    source: str
    param: str
    max_calls: int
    def __init__(self, kind: _Optional[str] = ..., source: _Optional[str] = ..., param: _Optional[str] = ..., max_calls: _Optional[int] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "seed", "max_tokens", "stop", "stop_token_ids", "ignore_eos", "min_tokens", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "banned_token_ids", "logprobs", "prompt_logprobs")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    BANNED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    max_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    min_tokens: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.RepeatedCompositeFieldContainer[LogitBias]
    banned_token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: int
    prompt_logprobs: int
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., max_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., min_tokens: _Optional[int] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Iterable[_Union[LogitBias, _Mapping]]] = ..., banned_token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ...) -> None: ...

class LogitBias(_message.Message):
    __slots__ = ("token_id", "bias")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    bias: float
    def __init__(self, token_id: _Optional[int] = ..., bias: _Optional[float] = ...) -> None: ...

class ServerBatch(_message.Message):
    __slots__ = ("accepted", "deltas", "finished", "load", "status")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    accepted: _containers.RepeatedCompositeFieldContainer[Accepted]
    deltas: _containers.RepeatedCompositeFieldContainer[Delta]
    finished: _containers.RepeatedCompositeFieldContainer[Finished]
    load: Load
    status: Status
    def __init__(self, accepted: _Optional[_Iterable[_Union[Accepted, _Mapping]]] = ..., deltas: _Optional[_Iterable[_Union[Delta, _Mapping]]] = ..., finished: _Optional[_Iterable[_Union[Finished, _Mapping]]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., status: _Optional[_Union[Status, _Mapping]] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ("handle", "prompt_tokens", "in_thought")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IN_THOUGHT_FIELD_NUMBER: _ClassVar[int]
    handle: int
    prompt_tokens: int
    in_thought: bool
    def __init__(self, handle: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., in_thought: _Optional[bool] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("handle", "text", "num_tokens", "logprobs", "prompt", "embedding")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    handle: int
    text: str
    num_tokens: int
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    prompt: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    embedding: bytes
    def __init__(self, handle: _Optional[int] = ..., text: _Optional[str] = ..., num_tokens: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., prompt: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., embedding: _Optional[bytes] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token", "logprob", "text_offset", "top", "token_id", "rank", "top_ids")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TEXT_OFFSET_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    logprob: float
    text_offset: int
    top: _containers.RepeatedCompositeFieldContainer[Alternative]
    token_id: int
    rank: int
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token: _Optional[bytes] = ..., logprob: _Optional[float] = ..., text_offset: _Optional[int] = ..., top: _Optional[_Iterable[_Union[Alternative, _Mapping]]] = ..., token_id: _Optional[int] = ..., rank: _Optional[int] = ..., top_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Alternative(_message.Message):
    __slots__ = ("token", "logprob")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    logprob: float
    def __init__(self, token: _Optional[bytes] = ..., logprob: _Optional[float] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("handle", "reason", "prompt_tokens", "completion_tokens", "cached_tokens", "error", "drafted_tokens", "accepted_tokens", "reasoning_tokens", "phases")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REASONING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PHASES_FIELD_NUMBER: _ClassVar[int]
    handle: int
    reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    error: Error
    drafted_tokens: int
    accepted_tokens: int
    reasoning_tokens: int
    phases: Phases
    def __init__(self, handle: _Optional[int] = ..., reason: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., error: _Optional[_Union[Error, _Mapping]] = ..., drafted_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., reasoning_tokens: _Optional[int] = ..., phases: _Optional[_Union[Phases, _Mapping]] = ...) -> None: ...

class Phases(_message.Message):
    __slots__ = ("queue_s", "prefill_s", "decode_s", "first_step", "last_step")
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEP_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_FIELD_NUMBER: _ClassVar[int]
    queue_s: float
    prefill_s: float
    decode_s: float
    first_step: int
    last_step: int
    def __init__(self, queue_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., decode_s: _Optional[float] = ..., first_step: _Optional[int] = ..., last_step: _Optional[int] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("code", "message", "param", "retry_after_s")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PARAM_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    param: str
    retry_after_s: int
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., param: _Optional[str] = ..., retry_after_s: _Optional[int] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("num_running", "num_waiting", "free_slots", "total_slots", "free_pages", "total_pages", "page_size")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    FREE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SLOTS_FIELD_NUMBER: _ClassVar[int]
    FREE_PAGES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_PAGES_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    free_slots: int
    total_slots: int
    free_pages: int
    total_pages: int
    page_size: int
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., free_slots: _Optional[int] = ..., total_slots: _Optional[int] = ..., free_pages: _Optional[int] = ..., total_pages: _Optional[int] = ..., page_size: _Optional[int] = ...) -> None: ...

class Counters(_message.Message):
    __slots__ = ("num_steps", "num_preemptions", "num_compiles_after_ready", "prompt_tokens", "generation_tokens", "prefill_tokens", "prefix_cache_queries", "prefix_cache_hits", "step_host_s", "step_device_wait_s", "num_failed_steps", "num_drafts", "num_draft_tokens", "num_accepted_tokens", "step_tokens", "sum_step_tokens", "accepted_at", "host_cache_queries", "host_cache_hits", "num_host_pages")
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPILES_AFTER_READY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_QUERIES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_HITS_FIELD_NUMBER: _ClassVar[int]
    STEP_HOST_S_FIELD_NUMBER: _ClassVar[int]
    STEP_DEVICE_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    NUM_FAILED_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SUM_STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_AT_FIELD_NUMBER: _ClassVar[int]
    HOST_CACHE_QUERIES_FIELD_NUMBER: _ClassVar[int]
    HOST_CACHE_HITS_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_PAGES_FIELD_NUMBER: _ClassVar[int]
    num_steps: int
    num_preemptions: int
    num_compiles_after_ready: int
    prompt_tokens: int
    generation_tokens: int
    prefill_tokens: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    step_host_s: float
    step_device_wait_s: float
    num_failed_steps: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    step_tokens: _containers.RepeatedScalarFieldContainer[int]
    sum_step_tokens: int
    accepted_at: _containers.RepeatedScalarFieldContainer[int]
    host_cache_queries: int
    host_cache_hits: int
    num_host_pages: int
    def __init__(self, num_steps: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., num_compiles_after_ready: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., generation_tokens: _Optional[int] = ..., prefill_tokens: _Optional[int] = ..., prefix_cache_queries: _Optional[int] = ..., prefix_cache_hits: _Optional[int] = ..., step_host_s: _Optional[float] = ..., step_device_wait_s: _Optional[float] = ..., num_failed_steps: _Optional[int] = ..., num_drafts: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_tokens: _Optional[int] = ..., step_tokens: _Optional[_Iterable[int]] = ..., sum_step_tokens: _Optional[int] = ..., accepted_at: _Optional[_Iterable[int]] = ..., host_cache_queries: _Optional[int] = ..., host_cache_hits: _Optional[int] = ..., num_host_pages: _Optional[int] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("model", "text", "messages_json", "tools_json", "no_bos", "no_generation_prompt")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_JSON_FIELD_NUMBER: _ClassVar[int]
    TOOLS_JSON_FIELD_NUMBER: _ClassVar[int]
    NO_BOS_FIELD_NUMBER: _ClassVar[int]
    NO_GENERATION_PROMPT_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    messages_json: str
    tools_json: str
    no_bos: bool
    no_generation_prompt: bool
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., messages_json: _Optional[str] = ..., tools_json: _Optional[str] = ..., no_bos: _Optional[bool] = ..., no_generation_prompt: _Optional[bool] = ...) -> None: ...

class TokenizeReply(_message.Message):
    __slots__ = ("ids", "texts", "error")
    IDS_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    error: Error
    def __init__(self, ids: _Optional[_Iterable[int]] = ..., texts: _Optional[_Iterable[str]] = ..., error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("model", "ids")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    model: str
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, model: _Optional[str] = ..., ids: _Optional[_Iterable[int]] = ...) -> None: ...

class DetokenizeReply(_message.Message):
    __slots__ = ("text", "error")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    text: str
    error: Error
    def __init__(self, text: _Optional[str] = ..., error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("name", "path")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class AdapterReply(_message.Message):
    __slots__ = ("adapters", "error")
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    error: Error
    def __init__(self, adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ..., error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "path", "num_running", "num_waiting")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    num_running: int
    num_waiting: int
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ProfileRequest(_message.Message):
    __slots__ = ("steps", "name", "wait_s")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    steps: int
    name: str
    wait_s: float
    def __init__(self, steps: _Optional[int] = ..., name: _Optional[str] = ..., wait_s: _Optional[float] = ...) -> None: ...

class ProfileReply(_message.Message):
    __slots__ = ("steps", "folder")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    steps: int
    folder: str
    def __init__(self, steps: _Optional[int] = ..., folder: _Optional[str] = ...) -> None: ...

class Status(_message.Message):
    __slots__ = ("state", "model", "max_seq_len", "load", "counters", "detail", "created_unix_s", "tool_dialect", "thinks", "adapters", "max_adapters", "source")
    STATE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQ_LEN_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    CREATED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    TOOL_DIALECT_FIELD_NUMBER: _ClassVar[int]
    THINKS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    MAX_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    state: str
    model: str
    max_seq_len: int
    load: Load
    counters: Counters
    detail: str
    created_unix_s: int
    tool_dialect: str
    thinks: bool
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    max_adapters: int
    source: str
    def __init__(self, state: _Optional[str] = ..., model: _Optional[str] = ..., max_seq_len: _Optional[int] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., counters: _Optional[_Union[Counters, _Mapping]] = ..., detail: _Optional[str] = ..., created_unix_s: _Optional[int] = ..., tool_dialect: _Optional[str] = ..., thinks: _Optional[bool] = ..., adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ..., max_adapters: _Optional[int] = ..., source: _Optional[str] = ...) -> None: ...
