"""Log-probabilities as OpenAI writes them: one shape for chats, one for completions."""

from collections.abc import Iterable
from typing import Any

from serving.replica.events import TokenLogprob

LEAST = -9999.0
"""OpenAI's stand-in for what is too unlikely to be a number in JSON."""


def chat_logprobs(entries: Iterable[TokenLogprob]) -> dict[str, Any]:
    content = [
        _chat_token(entry.token, entry.logprob) | {"top_logprobs": [_chat_token(*other) for other in entry.top]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(entries: Iterable[TokenLogprob]) -> dict[str, Any]:
    """`top_logprobs` holds the chosen token too, also where it is not among the most likely."""
    listed = list(entries)
    return {
        "tokens": [token_text(entry.token) for entry in listed],
        "token_logprobs": [_number(entry.logprob) for entry in listed],
        "top_logprobs": [_top(entry) for entry in listed],
        "text_offset": [entry.text_offset for entry in listed],
    }


def prompt_logprobs(entries: Iterable[TokenLogprob]) -> list[dict[str, Any] | None]:
    """As vLLM writes those of a prompt: by token id, the prompt's own token first; null for the first token."""
    return [None if entry.logprob is None else _by_id(entry) for entry in entries]


def _by_id(entry: TokenLogprob) -> dict[str, Any]:
    shown = {str(entry.token_id): _ranked(entry.token, entry.logprob, entry.rank)}
    for rank, (token_id, (token, logprob)) in enumerate(zip(entry.top_ids, entry.top, strict=True), start=1):
        shown.setdefault(str(token_id), _ranked(token, logprob, rank))
    return shown


def _ranked(token: bytes, logprob: float | None, rank: int) -> dict[str, Any]:
    return {"logprob": _number(logprob), "rank": rank, "decoded_token": token_text(token)}


def token_text(token: bytes) -> str:
    """A token that is no whole text is written `bytes:\\xe2\\x82`, so that no two tokens look the same."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _chat_token(token: bytes, logprob: float | None) -> dict[str, Any]:
    return {"token": token_text(token), "logprob": _number(logprob), "bytes": list(token)}


def _top(entry: TokenLogprob) -> dict[str, float | None] | None:
    if entry.logprob is None:
        return None
    others = {token_text(token): _number(logprob) for token, logprob in entry.top}
    return others | {token_text(entry.token): _number(entry.logprob)}


def _number(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LEAST)
