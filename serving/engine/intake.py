"""Intake: requests become sequences, or are refused because they can never fit."""

from collections.abc import Callable, Iterable

from kv.page_keys import PageKeys
from serving.engine.api import EngineRequest
from serving.engine.edits import build_edits
from serving.engine.sequence import Sequence
from serving.errors import PromptTooLong
from serving.request import SEED_BITS


class Intake:
    """Numbers requests in the order of their arrival."""

    def __init__(
        self, eos_token_ids: Iterable[int], max_seq_len: int, page_size: int, draw_seed: Callable[[int], int]
    ) -> None:
        """`draw_seed(bits)` gives a random seed to a request that names none."""
        self.max_seq_len = max_seq_len
        self._eos = frozenset(eos_token_ids)
        self._page_size = page_size
        self._draw_seed = draw_seed
        self._num_arrivals = 0

    def make(self, request: EngineRequest, step: int) -> Sequence:
        """A sequence that waits since `step`. Raises PromptTooLong, and InvalidRequest for too many edits."""
        room = self.max_seq_len - len(request.token_ids)
        if room < 1:
            raise PromptTooLong(
                f"the prompt has {len(request.token_ids):,} tokens, but prompt and answer may have "
                f"{self.max_seq_len:,} together."
            )
        self._num_arrivals += 1
        params = request.sampling
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos)
        return Sequence(
            request,
            max_tokens=min(params.max_tokens or room, room),
            seed=self._draw_seed(SEED_BITS) if params.seed is None else params.seed,
            keys=PageKeys(self._page_size, request.cache_salt, request.adapter.number if request.adapter else 0),
            stop_ids=stop_ids,
            edits_3E=build_edits(params, stop_ids, len(request.token_ids)),
            arrival=self._num_arrivals,
            waiting_since=step,
        )
