"""The one thing that a step does in Python for every sequence: append its tokens."""

from collections.abc import Sequence as Items

from serving.engine.sequence import Sequence


def append_tokens(sequences: Items[Sequence], tokens_Ir: Items[list[int]]) -> list[tuple[int, ...]]:
    """As many tokens for each sequence as `tokens_Ir` has rows; no sequence ends with them. Returns those of each."""
    tokens = list(zip(*tokens_Ir, strict=True))
    if len(tokens_Ir) == 1:
        for sequence, token in zip(sequences, tokens_Ir[0], strict=True):
            sequence.token_ids.append(token)
    else:
        for sequence, its_tokens in zip(sequences, tokens, strict=True):
            sequence.token_ids.extend(its_tokens)
    return tokens
