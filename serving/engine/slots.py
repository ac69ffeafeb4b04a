"""SlotTable: who runs in which slot, one column per figure.

A step touches every running sequence. With columns a decode step is planned, built and dispatched by a few numpy calls
for all slots at once; Python looks at single sequences only where one enters, leaves, prefills or ends. The engine's
thread writes; the planner reads.
"""

from itertools import compress

import numpy as np
from numpy.typing import NDArray

from serving.engine.sequence import BATCH, NO_SLOT, Sequence, rank

STOPS = 4  # stop ids per slot that are compared for all slots at once; EOS and few more
NO_TOKEN = -1


class SlotTable:
    """Arrays are indexed by slot; in a free slot they are zero."""

    def __init__(self, num_slots: int) -> None:
        self.sequences: NDArray[np.object_] = np.full(num_slots, None)
        """`Sequence` or None."""
        self.num_tokens_B: NDArray[np.int32] = np.zeros(num_slots, np.int32)
        """Tokens of the sequence, those that are still on the device included."""
        self.max_len_B: NDArray[np.int32] = np.zeros(num_slots, np.int32)
        """Tokens with which it is complete: then there is nothing more to schedule, only to read."""
        self.decodes_B: NDArray[np.bool_] = np.zeros(num_slots, np.bool_)
        """Whether the newest token lies in the device's `last_token[slot]`, so that the next step is a decode row."""
        self.batch_B: NDArray[np.bool_] = np.zeros(num_slots, np.bool_)
        """Whether it is in the batch band."""
        self.patient_B: NDArray[np.bool_] = np.zeros(num_slots, np.bool_)
        """Whether it asked for that band; it stays so when it is promoted."""
        self.decoded_at_B: NDArray[np.int64] = np.zeros(num_slots, np.int64)
        """The plan in which it decoded last; 0 before."""
        self.stop_KB: NDArray[np.int32] = np.full((STOPS, num_slots), NO_TOKEN, np.int32)
        """Tokens that end the sequence."""
        self.logprobs_B: NDArray[np.bool_] = np.zeros(num_slots, np.bool_)
        """Whether log-probabilities of its tokens are wanted."""
        self.grammar_B: NDArray[np.bool_] = np.zeros(num_slots, np.bool_)
        """Whether it follows a grammar: what may come next depends on its newest token."""
        self.speculates_B: NDArray[np.bool_] = np.zeros(num_slots, np.bool_)
        """Whether its next tokens may be guessed: what is asked for needs no look at what came just before."""
        self.unread_B: NDArray[np.bool_] = np.zeros(num_slots, np.bool_)
        """Of those two, whether tokens are still on their way that the host must know first: the row skips a step, and
        the others do not wait for it."""
        self.watched_B: NDArray[np.bool_] = np.zeros(num_slots, np.bool_)
        """Whether each of its tokens needs a look: log-probabilities, a grammar, more stop ids than columns."""
        self.owner_B: NDArray[np.int64] = np.zeros(num_slots, np.int64)
        """Counts the sequences that left the slot: what a step in flight knows of the slot may be of a former owner."""
        self.batch_prompt_at = 0
        """The plan in which a prompt of the batch band was computed last; 0 before."""
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_running(self) -> int:
        return len(self.sequences) - len(self._free)

    @property
    def unfinished_B(self) -> NDArray[np.bool_]:
        """Slots with something to schedule."""
        return self.num_tokens_B < self.max_len_B

    def num_due(self, slots: NDArray[np.intp], num_trips: int) -> NDArray[np.int32] | int:
        """Tokens that a call of so many trips gives each of these decoding slots, unless it stops before."""
        if num_trips == 1:
            return 1
        return np.minimum(num_trips, self.max_len_B[slots] - self.num_tokens_B[slots])

    def num_pending(self, slot: int) -> int:
        """Tokens of an occupied slot that the host has not read yet."""
        sequence = self.sequences[slot]
        assert sequence is not None, "a free slot has no tokens"
        return int(self.num_tokens_B[slot]) - len(sequence.token_ids)

    def decoding(self, held_B: NDArray[np.bool_] | None = None) -> NDArray[np.intp]:
        """Slots that can decode a token, without those that are held back."""
        ready_B = self.decodes_B & self.unfinished_B & ~self.unread_B
        return np.flatnonzero(ready_B if held_B is None else ready_B & ~held_B)

    def prefilling(self) -> list[Sequence]:
        """Sequences with tokens to prefill, best rank first."""
        return self.ranked(self.unfinished_B & ~self.decodes_B)

    def ranked(self, chosen_B: NDArray[np.bool_]) -> list[Sequence]:
        """The sequences of the chosen slots, best rank first."""
        if not chosen_B.any():
            return []
        return sorted((s for s in compress(self.sequences, chosen_B.tolist()) if s is not None), key=rank)

    def at(self, slots: NDArray[np.intp]) -> list[Sequence]:
        """The sequences of occupied slots, in the order given."""
        at: list[Sequence] = self.sequences[slots].tolist()
        return at

    def enter(self, sequence: Sequence) -> None:
        """Give a waiting sequence a slot; it prefills first."""
        slot = sequence.slot = self._free.pop()
        self.sequences[slot] = sequence
        self.num_tokens_B[slot] = len(sequence.token_ids)
        self.max_len_B[slot] = sequence.max_len
        self.batch_B[slot] = sequence.band == BATCH
        self.patient_B[slot] = sequence.is_patient
        self.decoded_at_B[slot] = 0
        self.logprobs_B[slot] = sequence.request.sampling.logprobs is not None
        self.grammar_B[slot] = sequence.request.matcher is not None
        self.speculates_B[slot] = not (
            sequence.request.sampling.has_penalties or self.logprobs_B[slot] or self.grammar_B[slot]
        )
        many_stops = len(sequence.stop_ids) > STOPS
        self.watched_B[slot] = self.logprobs_B[slot] or self.grammar_B[slot] or many_stops
        self.stop_KB[:, slot] = stop_columns(sequence)

    def leave(self, sequence: Sequence) -> None:
        slot = sequence.slot
        self._free.append(slot)
        self.sequences[slot] = None
        self.num_tokens_B[slot] = self.max_len_B[slot] = 0
        self.decodes_B[slot] = self.batch_B[slot] = self.patient_B[slot] = self.logprobs_B[slot] = False
        self.grammar_B[slot] = self.unread_B[slot] = self.watched_B[slot] = self.speculates_B[slot] = False
        self.owner_B[slot] += 1
        sequence.slot = NO_SLOT

    def check_integrity(self, max_trips: int = 1) -> None:
        """Assert that slots and sequences name each other and that the columns agree with what the host has read, when
        a call gives a row at most `max_trips` tokens."""
        occupied = [slot for slot, sequence in enumerate(self.sequences) if sequence is not None]
        assert sorted([*occupied, *self._free]) == list(range(len(self.sequences))), "slots do not add up"
        reads_B = (self.grammar_B | self.speculates_B) & self.decodes_B
        assert not (self.unread_B & ~reads_B).any(), "a row waits for no token"
        assert not (self.max_len_B[self._free].any() or self.decodes_B[self._free].any()), "a free slot has work"
        for slot, sequence in enumerate(self.sequences):
            if sequence is not None:
                num_pending = int(self.num_tokens_B[slot]) - len(sequence.token_ids)
                assert sequence.slot == slot and sequence.num_pending == 0 and sequence.finish_reason is None
                assert 0 <= num_pending <= 2 * max_trips * int(self.decodes_B[slot]), (
                    f"{num_pending} tokens are on their way"
                )
                assert (self.max_len_B[slot], self.batch_B[slot]) == (sequence.max_len, sequence.band == BATCH)


def stop_columns(sequence: Sequence) -> list[int]:
    """A column of `stop_KB`; a sequence with more stop ids than columns is watched."""
    return [*sequence.stop_ids, *[NO_TOKEN] * STOPS][:STOPS]
