"""Rebuilds a `tokenizer.json` from the vocabulary, merges and pre-tokenizer name that a GGUF file carries.

GGUF does not store how text is cut before byte-pair merging, only the name of a rule. The rules are data here; a name
that is not listed is refused, since a wrong cut gives a model wrong tokens without any error.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.card import TextAssets
from model.errors import CheckpointError, UnsupportedModel
from model.foreign import load_tokenizer
from model.gguf_sentencepiece import sentencepiece_json

BYTE_LEVEL, SENTENCEPIECE = "gpt2", "llama"
CONTROL, USER_DEFINED = 3, 4
NAMED = {
    "bos": "bos", "eos": "eos", "unk": "unknown", "sep": "seperator", "pad": "padding", "cls": "cls", "mask": "mask",
}  # fmt: skip
"""Roles of special tokens: what templates call them, and GGUF, which has always spelt one so."""

Json = dict[str, Any]


def _byte_level(*, use_regex: bool) -> Json:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(regex: str) -> Json:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def _words_regex(digits: str) -> str:
    """The word rule that Llama 3 and Qwen 2 share; they differ in how many digits stay together."""
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits +
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rule:
    """How text is cut before merging, and what else goes with the family that uses this rule."""

    pre_tokenizers: tuple[Json, ...]
    normalizer: str | None = None
    ignore_merges: bool = False
    """A whole word that is in the vocabulary is one token, even when merges would not reach it."""
    add_bos: bool = False
    """Where the file is silent."""


_GPT2 = Rule((_byte_level(use_regex=True),))
RULES: Mapping[str, Rule] = {
    "gpt-2": _GPT2,
    "default": _GPT2,
    "smollm": Rule(({"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True))),
    "llama-bpe": Rule(
        (_split(_words_regex(r"\p{N}{1,3}")), _byte_level(use_regex=False)), ignore_merges=True, add_bos=True
    ),
    "qwen2": Rule((_split(_words_regex(r"\p{N}")), _byte_level(use_regex=False)), normalizer="NFC"),
}


def read_text_assets(path: Path, fields: Mapping[str, Any]) -> TextAssets:
    """The tokenizer, chat template and BOS rule in the metadata `fields` of the GGUF file `path`.

    Raises UnsupportedModel for a tokenizer of another kind or with an unknown pre-tokenizer, CheckpointError for
    missing or contradicting fields.
    """
    kind = fields.get("tokenizer.ggml.model")
    if kind not in (BYTE_LEVEL, SENTENCEPIECE):
        raise UnsupportedModel(
            f"{path}: tokenizer model {kind!r} is not supported; supported: {BYTE_LEVEL} (byte-level BPE), "
            f"{SENTENCEPIECE} (SentencePiece BPE)."
        )
    tokens = _strings(path, fields, "tokens")
    added = _added_tokens(path, fields, tokens)
    if kind == SENTENCEPIECE:
        adds_bos, tokenizer = True, sentencepiece_json(path, fields, tokens, added)
    else:
        rule = _rule(path, fields)
        adds_bos, tokenizer = rule.add_bos, _tokenizer(rule, tokens, _strings(path, fields, "merges"), added)
    text = json.dumps(tokenizer, ensure_ascii=False)
    load_tokenizer(str(path), text)
    named = {f"{ours}_token": _token(path, fields, tokens, theirs) for ours, theirs in NAMED.items()}
    return TextAssets(
        tokenizer_json=text,
        chat_template=fields.get("tokenizer.chat_template"),
        tool_template=fields.get("tokenizer.chat_template.tool_use"),
        bos_token=named["bos_token"],
        eos_token=named["eos_token"],
        named_tokens={name: token for name, token in named.items() if token is not None},
        add_bos=bool(fields.get("tokenizer.ggml.add_bos_token", adds_bos)),
    )


def _rule(path: Path, fields: Mapping[str, Any]) -> Rule:
    name = str(fields.get("tokenizer.ggml.pre"))
    if name not in RULES:
        raise UnsupportedModel(f"{path}: pre-tokenizer {name!r} is not supported; supported: {', '.join(RULES)}.")
    return RULES[name]


def _strings(path: Path, fields: Mapping[str, Any], name: str) -> Sequence[str]:
    values = fields.get(f"tokenizer.ggml.{name}")
    if not isinstance(values, list) or not values or not isinstance(values[0], str):
        raise CheckpointError(f"{path} lacks tokenizer.ggml.{name}.")
    return values


def _added_tokens(path: Path, fields: Mapping[str, Any], tokens: Sequence[str]) -> list[Json]:
    types = fields.get("tokenizer.ggml.token_type", [])
    if len(types) != len(tokens):
        raise CheckpointError(f"{path}: {len(tokens):,} tokens but {len(types):,} token types.")
    return [
        {"id": token_id, "content": tokens[token_id], "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": kind == CONTROL}
        for token_id, kind in enumerate(types) if kind in (CONTROL, USER_DEFINED)
    ]  # fmt: skip


def _tokenizer(rule: Rule, tokens: Sequence[str], merges: Sequence[str], added: list[Json]) -> Json:
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": {"type": rule.normalizer} if rule.normalizer else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(rule.pre_tokenizers)},
        "post_processor": None,
        "decoder": _byte_level(use_regex=True),
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "ignore_merges": rule.ignore_merges,
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in merges],
        },
    }  # fmt: skip


def _token(path: Path, fields: Mapping[str, Any], tokens: Sequence[str], name: str) -> str | None:
    token_id: int | None = fields.get(f"tokenizer.ggml.{name}_token_id")
    if token_id is None:
        return None
    if not 0 <= token_id < len(tokens):
        raise CheckpointError(f"{path}: {name}_token_id {token_id} is outside of the {len(tokens):,} tokens.")
    return tokens[token_id]
