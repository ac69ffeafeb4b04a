"""Whether the head of a model is its token vectors, or numbers of its own that lie beside them."""

from dataclasses import replace

import numpy as np

from model.convert import check_tensors, read_region
from model.foreign import ForeignModel
from model.keys import HEAD_PATH, Key

EMBED_PATH = ("embed", "embedding")
BLOCK_ROWS = 4096
"""Tokens that are compared at once: 128 MiB of each at a width of 8,192."""


def with_its_head(model: ForeignModel) -> ForeignModel:
    """The model with its embeddings tied only if its tensors are, as in transformers (huggingface/transformers#42612).

    A config that says so may be wrong: fine-tuning has untied many a head. One that equals the token vectors stays
    tied, and where only the head is there it is the token vectors too. Reads numbers only where config and tensors
    disagree. Raises CheckpointError.
    """
    head, embed = (next((key for key in model.keys if key.path == path), None) for path in (HEAD_PATH, EMBED_PATH))
    if not model.config.tie_embeddings or head is None or embed is None or head.source not in model.tensors:
        return model
    if embed.source not in model.tensors and head.theirs == embed.theirs:
        return replace(model, tensors={**model.tensors, embed.source: model.tensors[head.source]})
    # What a run divides the logits of token vectors by does not hold for a head.
    untied = replace(model, config=replace(model.config, tie_embeddings=False, logits_scale=1.0))
    check_tensors(untied)
    if _is_copy(untied, head, embed):
        return model
    note = f"{model.where}: tie_word_embeddings is set, but {head.source} differs from the token vectors and is used"
    return replace(untied, notes=(*model.notes, note))


def _is_copy(model: ForeignModel, head: Key, embed: Key) -> bool:
    rows, width, dtype = model.config.vocab_size, slice(0, model.config.embed_dim), np.dtype(np.float32)
    for first in range(0, rows, BLOCK_ROWS):
        tokens = slice(first, min(first + BLOCK_ROWS, rows))
        of_embed = read_region(model, [embed], (tokens, width), dtype, _nobody)
        of_head = read_region(model, [head], (width, tokens), dtype, _nobody)
        if not np.array_equal(of_embed, of_head.T):
            return False
    return True


def _nobody(num_bytes: int) -> None:
    """Nobody is told how far it is."""
