"""The one thing that a step does in Python for every sequence: append its tokens and make the news of them."""

from collections.abc import Sequence as Items
from functools import partial
from itertools import repeat

from serving.engine.api import SequenceOutput
from serving.engine.sequence import Sequence

# A SequenceOutput from a tuple of all its fields, without the Python frame of its constructor.
_from_fields = partial(tuple.__new__, SequenceOutput)
_AFTER_CACHED = [value for name, value in SequenceOutput._field_defaults.items()
                 if SequenceOutput._fields.index(name) > SequenceOutput._fields.index("cached_tokens")]  # fmt: skip


def append_tokens(sequences: Items[Sequence], tokens_Ir: Items[list[int]]) -> list[SequenceOutput]:
    """As many tokens for each sequence as `tokens_Ir` has rows; no sequence ends with them. All loops but the first run
    in C: half the time."""
    tokens = list(zip(*tokens_Ir, strict=True))
    for sequence, its_tokens in zip(sequences, tokens, strict=True):
        sequence.token_ids.extend(its_tokens)
    names = [sequence.request_id for sequence in sequences]
    cached = [sequence.num_cached for sequence in sequences]
    fields = zip(names, tokens, repeat(None), repeat(None), cached, *map(repeat, _AFTER_CACHED))
    return list(map(_from_fields, fields))
