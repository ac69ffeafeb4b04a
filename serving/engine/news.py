"""The one thing that a step does in Python for every sequence: append its token and make the news of it."""

from collections.abc import Sequence as Items
from functools import partial
from itertools import repeat

from serving.engine.api import SequenceOutput
from serving.engine.sequence import Sequence

# A SequenceOutput from a tuple of all its fields, without the Python frame of its constructor.
_from_fields = partial(tuple.__new__, SequenceOutput)


def append_tokens(sequences: Items[Sequence], tokens: Items[int]) -> list[SequenceOutput]:
    """One token for each sequence, none of which ends with it. All loops but the first run in C: half the time."""
    for sequence, token in zip(sequences, tokens, strict=True):
        sequence.token_ids.append(token)
    names = [sequence.request_id for sequence in sequences]
    cached = [sequence.num_cached for sequence in sequences]
    fields = zip(names, zip(tokens), repeat(None), repeat(None), cached, repeat(()))
    return list(map(_from_fields, fields))
