"""SlotState: what the sampler keeps on the device for each slot between steps, and how it gets there.

Only a sequence that asks for penalties or edits has anything here. It is written when the sequence is admitted, from
the token ids that the host has, also after preemption; whatever the slot's last owner left behind is overwritten.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from serving.engine.edits import MAX_EDITS
from serving.engine.penalties import sparse_counts
from serving.engine.sequence import Sequence

COUNTS = 1024
_HEAD = 2
PACKET = _HEAD + 3 * MAX_EDITS + 2 * COUNTS
NO_TOKEN = 2**31 - 1  # outside every vocabulary, so writing it changes nothing


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SlotState:
    """B includes the scrap slot."""

    counts_BV: jax.Array
    """int32; see `penalties`."""
    edits_B3E: jax.Array
    """int32; see `edits`."""


def empty_slots(num_slots: int, vocab_size: int) -> SlotState:
    """In the host's memory."""
    counts_BV, edits_B3E = np.zeros((num_slots, vocab_size), np.int32), np.zeros((num_slots, 3, MAX_EDITS), np.int32)
    return SlotState(counts_BV, edits_B3E)  # type: ignore[arg-type]


def write_slot(state: SlotState, packet: jax.Array) -> SlotState:
    """Jitted with a donated state: one packet of `slot_packets` written into its slot."""
    slot, is_first, rest = packet[0], packet[1], packet[_HEAD:]
    edits_3E, (ids_C, counts_C) = rest[: 3 * MAX_EDITS].reshape(3, -1), rest[3 * MAX_EDITS :].reshape(2, -1)
    counts_V = jnp.where(is_first, 0, state.counts_BV[slot]).at[ids_C].set(counts_C, mode="drop")
    return SlotState(state.counts_BV.at[slot].set(counts_V), state.edits_B3E.at[slot].set(edits_3E))


def sequence_packets(sequence: Sequence) -> Iterator[NDArray[np.int32]]:
    """What must be written when a sequence enters its slot; nothing for a plain one."""
    counted = sequence.request.sampling.has_penalties
    if counted or sequence.edits_3E.size:
        ids, num_prompt = (sequence.token_ids, sequence.num_prompt) if counted else ([], 0)
        yield from slot_packets(sequence.slot, sequence.edits_3E, ids[:num_prompt], ids[num_prompt:])


def slot_packets(
    slot: int, edits_3E: NDArray[np.int32], prompt: list[int], answer: list[int]
) -> Iterator[NDArray[np.int32]]:
    """int32[PACKET] each, to be written in this order; a sequence without penalties gives no tokens."""
    ids, counts = sparse_counts(prompt, answer)
    for start in range(0, max(1, len(ids)), COUNTS):
        packet: NDArray[np.int32] = np.zeros(PACKET, np.int32)
        packet[:_HEAD] = slot, start == 0
        packet[_HEAD : -2 * COUNTS].reshape(3, -1)[:, : edits_3E.shape[1]] = edits_3E
        ids_C, counts_C = packet[-2 * COUNTS :].reshape(2, -1)
        part = slice(start, start + COUNTS)
        ids_C[:] = NO_TOKEN
        ids_C[: len(ids[part])], counts_C[: len(ids[part])] = ids[part], counts[part]
        yield packet
