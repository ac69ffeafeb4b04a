"""Whether one model can draft for another: its guesses are token ids, so both must mean the same by them."""

import json
from typing import Any

from model.card import ModelCard
from serving.errors import ConfigError


def check_draft(draft: ModelCard, target: ModelCard, max_seq_len: int) -> None:
    """Raises ConfigError, which names both models, if `draft` cannot guess for `target` in texts of so many tokens."""
    names = f"{draft.name} cannot draft for {target.name}"
    vocab, wanted = draft.config.vocab_size, target.config.vocab_size
    if vocab != wanted:
        raise ConfigError(
            f"{names}: it has {vocab:,} tokens instead of {wanted:,}; take a smaller model of one family."
        )
    if _tokens(draft) != _tokens(target):
        raise ConfigError(f"{names}: their tokenizers differ; take a smaller model of the same family.")
    if draft.config.max_seq_len < max_seq_len:
        raise ConfigError(
            f"{names}: its context has {draft.config.max_seq_len:,} tokens, a request may have {max_seq_len:,}; "
            "lower --max-seq-len to that."
        )


def _tokens(card: ModelCard) -> tuple[Any, ...]:
    """What says which text an id stands for; other settings of a tokenizer may differ."""
    tokenizer = json.loads(card.text.tokenizer_json)
    return tokenizer.get("model"), tokenizer.get("added_tokens")
