"""Siblings: sequences that wait until another one has computed the prompt that they have in common.

Several answers to one prompt come as several requests. Once the first one's prompt lies in published pages, or it has
ended, the others go into the queue, at the place of their arrival, and find its pages in the prefix cache. Owned by the
engine's thread.
"""

from serving.engine.sequence import Sequence


class Siblings:
    def __init__(self) -> None:
        self._held: dict[str, list[Sequence]] = {}  # by the id of the first

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))

    @property
    def all(self) -> list[Sequence]:
        return [sequence for held in self._held.values() for sequence in held]

    def hold(self, sequence: Sequence) -> None:
        """Until the request that it names is let go of."""
        self._held.setdefault(sequence.request.after, []).append(sequence)

    def let_go(self, first: Sequence) -> list[Sequence]:
        """Those that waited for this one, in the order of their arrival."""
        return self._held.pop(first.request_id, [])

    def remove(self, sequence: Sequence) -> bool:
        """Take out one that ends; False if it is not here."""
        held = self._held.get(sequence.request.after, [])
        if sequence not in held:
            return False
        held.remove(sequence)
        if not held:
            del self._held[sequence.request.after]
        return True
