"""Rebuilds a `tokenizer.json` from a SentencePiece vocabulary in a GGUF file, as Llama 2, Mistral and Gemma have it.

SentencePiece merges the two neighbours whose union has the best score. The `tokenizers` library merges by the rank of
a pair instead, so the ranks are made from the scores: every way to cut a piece into two pieces is a merge. Pieces that
the authors defined, such as runs of spaces, come before all others.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from model.errors import CheckpointError

UNKNOWN, USER_DEFINED = 2, 4  # types of tokens
SPACE = "▁"  # stands for a space

Json = dict[str, Any]


def sentencepiece_json(path: Path, fields: Mapping[str, Any], tokens: Sequence[str], added: list[Json]) -> Json:
    """`tokens` in the order of their ids; `added` are matched as a whole. Raises CheckpointError for missing scores."""
    scores, types = (fields.get(f"tokenizer.ggml.{name}", []) for name in ("scores", "token_type"))
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise CheckpointError(f"{path} lacks tokenizer.ggml.scores for its {len(tokens):,} tokens.")
    has_prefix = bool(fields.get("tokenizer.ggml.add_space_prefix", True))
    replace: Json = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    back: Json = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    prepend: list[Json] = [{"type": "Prepend", "prepend": SPACE}] if has_prefix else []
    strip: list[Json] = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if has_prefix else []
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, replace]},
        "pre_tokenizer": None, "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": _unknown(fields, tokens, types),
            "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
            "merges": _merges(tokens, scores, types),
        },
    }  # fmt: skip


def _unknown(fields: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> str | None:
    """The token that stands for what has none."""
    token_id = fields.get("tokenizer.ggml.unknown_token_id", types.index(UNKNOWN) if UNKNOWN in types else None)
    return None if token_id is None or not 0 <= token_id < len(tokens) else tokens[token_id]


def _merges(tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """Best score first; of equal ones those that come first in the vocabulary."""
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    by_score = sorted(range(len(tokens)), key=lambda i: (types[i] != USER_DEFINED, -scores[i]))
    return [pair for token_id in by_score for pair in _cuts(tokens[token_id], ids)]


def _cuts(token: str, ids: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    for end in range(1, len(token)):
        left, right = token[:end], token[end:]
        if left in ids and right in ids:
            yield left, right
