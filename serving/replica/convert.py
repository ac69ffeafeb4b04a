"""Protocol buffers <-> plain data: the only place where both are seen. Imports no JAX."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import orjson

from serving.dialect import ToolDialect
from serving.engine.api import StepStats
from serving.errors import EngineFailed, InvalidRequest, ServiceError, from_code
from serving.replica.events import Delta, Ending, Finished, TokenLogprob
from serving.replica.proto import replica_pb2 as pb
from serving.replica.status import ReplicaState, ReplicaStatus, ServedAdapter
from serving.request import (
    MODEL_DEFAULTED,
    ChatPrompt,
    FinishReason,
    Grammar,
    GrammarKind,
    Load,
    Phases,
    Priority,
    Prompt,
    Request,
    SamplingParams,
    TextPrompt,
    TokenPrompt,
    Usage,
)

SAMPLING_DEFAULTS = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
LOAD_FIELDS = [field.name for field in dataclasses.fields(Load)]


def submit_to_pb(handle: int, request: Request) -> pb.Submit:
    submit = pb.Submit(
        handle=handle,
        request_id=request.request_id,
        model=request.model,
        sampling=_sampling_to_pb(request.sampling, request.unset),
        priority=request.priority.value,
        num_choices=request.num_choices,
        deadline_ms=request.deadline_ms,
        cache_salt=request.cache_salt,
        echo=request.echo,
        prompt_only=request.prompt_only,
        embed=request.embed,
    )
    _prompt_to_pb(request.prompt, submit)
    if request.grammar is not None:
        submit.grammar.CopyFrom(_grammar_to_pb(request.grammar))
    return submit


def request_from_pb(submit: pb.Submit) -> Request:
    """Raises InvalidRequest when a value is out of range."""
    return Request(
        request_id=submit.request_id,
        model=submit.model,
        prompt=_prompt_from_pb(submit),
        sampling=_sampling_from_pb(submit.sampling),
        unset=frozenset(name for name in MODEL_DEFAULTED if not submit.sampling.HasField(name)),
        grammar=_grammar_from_pb(submit.grammar) if submit.HasField("grammar") else None,
        priority=_priority_from_pb(submit.priority),
        num_choices=submit.num_choices or 1,
        deadline_ms=submit.deadline_ms if submit.HasField("deadline_ms") else None,
        cache_salt=submit.cache_salt,
        echo=submit.echo,
        prompt_only=submit.prompt_only,
        embed=submit.embed,
    )


def load_to_pb(load: Load) -> pb.Load:
    return pb.Load(**_shallow_dict(load))


def load_from_pb(load: pb.Load) -> Load:
    return Load(**{name: getattr(load, name) for name in LOAD_FIELDS})


def status_to_pb(status: ReplicaStatus) -> pb.Status:
    return pb.Status(
        state=status.state.value,
        model=status.model,
        max_seq_len=status.max_seq_len,
        load=load_to_pb(status.load),
        counters=pb.Counters(**_shallow_dict(status.stats)),
        detail=status.detail,
        created_unix_s=status.created_unix_s,
        tool_dialect=status.tool_dialect.value,
        thinks=status.thinks,
        adapters=adapters_to_pb(status.adapters),
        max_adapters=status.max_adapters,
        source=status.source,
    )


def status_from_pb(status: pb.Status) -> ReplicaStatus:
    return ReplicaStatus(
        state=ReplicaState(status.state),
        model=status.model,
        max_seq_len=status.max_seq_len,
        created_unix_s=status.created_unix_s,
        detail=status.detail,
        tool_dialect=ToolDialect(status.tool_dialect or ToolDialect.NONE),
        thinks=status.thinks,
        load=load_from_pb(status.load),
        stats=_stats_from_pb(status.counters),
        adapters=adapters_from_pb(status.adapters),
        max_adapters=status.max_adapters,
        source=status.source,
    )


def adapters_to_pb(adapters: Iterable[ServedAdapter]) -> list[pb.Adapter]:
    return [pb.Adapter(**_shallow_dict(adapter)) for adapter in adapters]


def adapters_from_pb(adapters: Iterable[pb.Adapter]) -> tuple[ServedAdapter, ...]:
    return tuple(ServedAdapter(each.name, each.path, each.num_running, each.num_waiting) for each in adapters)


def _stats_from_pb(counters: pb.Counters) -> StepStats:
    values = {field.name: getattr(counters, field.name) for field in dataclasses.fields(StepStats)}
    lists = {name: tuple(getattr(counters, name)) for name in ("step_tokens", "accepted_at")}
    return StepStats(**{**values, **lists})


def delta_to_pb(
    handle: int,
    text: str,
    num_tokens: int,
    logprobs: Iterable[TokenLogprob],
    prompt: Iterable[TokenLogprob] = (),
    embedding: bytes = b"",
) -> pb.Delta:
    return pb.Delta(
        handle=handle,
        text=text,
        num_tokens=num_tokens,
        logprobs=map(_logprob_to_pb, logprobs),
        prompt=map(_logprob_to_pb, prompt),
        embedding=embedding,
    )


def delta_from_pb(delta: pb.Delta, choice: int = 0) -> Delta:
    logprobs, prompt = (tuple(map(_logprob_from_pb, entries)) for entries in (delta.logprobs, delta.prompt))
    return Delta(delta.text, delta.num_tokens, logprobs, choice, prompt, delta.embedding)


def finished_to_pb(handle: int, ending: Ending) -> pb.Finished:
    finished = pb.Finished(handle=handle, reason=ending.reason.value, **_shallow_dict(ending.usage))
    if ending.phases is not None:
        finished.phases.CopyFrom(pb.Phases(**_shallow_dict(ending.phases)))
    if ending.reason is FinishReason.ERROR:
        finished.error.CopyFrom(error_to_pb(ending.error or EngineFailed("the engine gave no reason.")))
    return finished


def end_from_pb(finished: pb.Finished) -> Finished | ServiceError:
    """A regular end, or the error that took its place."""
    if finished.reason == FinishReason.ERROR:
        return error_from_pb(finished.error)
    usage = Usage(**{field.name: getattr(finished, field.name) for field in dataclasses.fields(Usage)})
    return Finished(FinishReason(finished.reason), usage, phases=_phases_from_pb(finished))


def _phases_from_pb(finished: pb.Finished) -> Phases | None:
    if not finished.HasField("phases"):
        return None
    return Phases(**{field.name: getattr(finished.phases, field.name) for field in dataclasses.fields(Phases)})


def tokenize_to_pb(model: str, prompt: TextPrompt | ChatPrompt) -> pb.TokenizeRequest:
    match prompt:
        case TextPrompt(text):
            return pb.TokenizeRequest(model=model, text=text)
        case ChatPrompt(messages, tools):
            messages_json, tools_json = (orjson.dumps(items).decode() for items in (messages, tools))
            return pb.TokenizeRequest(model=model, messages_json=messages_json, tools_json=tools_json)


def tokenize_from_pb(request: pb.TokenizeRequest) -> TextPrompt | ChatPrompt:
    if request.WhichOneof("prompt") == "text":
        return TextPrompt(request.text)
    tools = _list_from_json("tools", request.tools_json or "[]")
    return ChatPrompt(_list_from_json("messages", request.messages_json), tools)


def _prompt_to_pb(prompt: Prompt, submit: pb.Submit) -> None:
    match prompt:
        case TextPrompt(text):
            submit.text = text
        case TokenPrompt(token_ids):
            submit.token_ids.ids.extend(token_ids)
            submit.token_ids.SetInParent()  # an empty list is a prompt too, for the replica to refuse
        case ChatPrompt(messages, tools):
            submit.messages_json = orjson.dumps(messages).decode()
            submit.tools_json = orjson.dumps(tools).decode() if tools else ""


def _prompt_from_pb(submit: pb.Submit) -> Prompt:
    match submit.WhichOneof("prompt"):
        case "text":
            return TextPrompt(submit.text)
        case "token_ids":
            return TokenPrompt(tuple(submit.token_ids.ids))
        case "messages_json":
            tools = _list_from_json("tools", submit.tools_json) if submit.tools_json else ()
            return ChatPrompt(_list_from_json("messages", submit.messages_json), tools)
        case _:
            raise InvalidRequest("the request has no prompt.", param="prompt")


def _list_from_json(name: str, text: str) -> tuple[dict[str, Any], ...]:
    try:
        return tuple(orjson.loads(text))
    except (orjson.JSONDecodeError, TypeError) as error:
        raise InvalidRequest(f"the {name} are not a JSON list: {error}.", param=name) from error


def _priority_from_pb(name: str) -> Priority:
    try:
        return Priority(name or Priority.INTERACTIVE)
    except ValueError as error:
        raise InvalidRequest(f"priority must be interactive or batch, got {name!r}.", param="priority") from error


def _grammar_to_pb(grammar: Grammar) -> pb.Grammar:
    return pb.Grammar(kind=grammar.kind.value, source=grammar.source, param=grammar.param, max_calls=grammar.max_calls)


def _grammar_from_pb(grammar: pb.Grammar) -> Grammar:
    try:
        kind = GrammarKind(grammar.kind)
    except ValueError as error:
        raise InvalidRequest(f"{grammar.kind!r} is no kind of grammar; one of {', '.join(GrammarKind)} is.") from error
    return Grammar(kind, grammar.source, grammar.param, grammar.max_calls)


def _sampling_to_pb(sampling: SamplingParams, unset: frozenset[str]) -> pb.Sampling:
    """Without what is as nobody asked: most of it, and setting a field takes longer than comparing it."""
    values = {
        name: value
        for name, value in _shallow_dict(sampling).items()
        if name not in unset and (name in MODEL_DEFAULTED or value != SAMPLING_DEFAULTS[name])
    }
    if sampling.logit_bias:
        values["logit_bias"] = [pb.LogitBias(token_id=token_id, bias=bias) for token_id, bias in sampling.logit_bias]
    return pb.Sampling(**values)


def _sampling_from_pb(sampling: pb.Sampling) -> SamplingParams:
    values: dict[str, Any] = {name: getattr(sampling, name) for name in MODEL_DEFAULTED if sampling.HasField(name)}
    return SamplingParams(
        **values,
        seed=sampling.seed if sampling.HasField("seed") else None,
        max_tokens=sampling.max_tokens if sampling.HasField("max_tokens") else None,
        stop=tuple(sampling.stop),
        stop_token_ids=tuple(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        min_tokens=sampling.min_tokens,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=tuple((entry.token_id, entry.bias) for entry in sampling.logit_bias),
        banned_token_ids=tuple(sampling.banned_token_ids),
        logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
        prompt_logprobs=sampling.prompt_logprobs if sampling.HasField("prompt_logprobs") else None,
    )


def _logprob_to_pb(entry: TokenLogprob) -> pb.TokenLogprob:
    top = [pb.Alternative(token=token, logprob=logprob) for token, logprob in entry.top]
    return pb.TokenLogprob(
        token=entry.token,
        logprob=entry.logprob,
        text_offset=entry.text_offset,
        top=top,
        token_id=entry.token_id,
        rank=entry.rank,
        top_ids=entry.top_ids,
    )


def _logprob_from_pb(entry: pb.TokenLogprob) -> TokenLogprob:
    top = tuple((other.token, other.logprob) for other in entry.top)
    logprob = entry.logprob if entry.HasField("logprob") else None
    return TokenLogprob(entry.token, logprob, entry.text_offset, top, entry.token_id, entry.rank, tuple(entry.top_ids))


def error_to_pb(error: ServiceError) -> pb.Error:
    return pb.Error(
        code=error.code, message=str(error), param=error.param or "", retry_after_s=error.retry_after_s or 0
    )


def error_from_pb(error: pb.Error) -> ServiceError:
    return from_code(error.code, error.message, error.param or None, error.retry_after_s or None)


def _shallow_dict(value: Any) -> dict[str, Any]:
    return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
