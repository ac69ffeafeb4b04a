"""plan_step: decides what the next step does. Pure: it reads slots, queue and pages, changes nothing, has no clock.

Order of service: decode rows first (everyone who is streaming goes on), then prefill chunks of running sequences and
admissions, interactive before batch, first come first served in each band.

The batch band always ends. A batch sequence that has got no token for `patience` steps is promoted: from then on it is
an interactive one that came long ago, and keeps its place until it ends. At most `max_promoted` are, the floor of the
band. So a batch request waits a bounded number of steps: its patience, the promoted before it, and the interactive
requests that came before it; those that come later cannot hold it up.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable
from collections.abc import Sequence as Items

import numpy as np
from numpy.typing import NDArray

from serving.engine.admission import AdmissionDraft
from serving.engine.growth import choose_trips, plan_growth
from serving.engine.plan import Chunk, Limits, PageReader, StepPlan
from serving.engine.sequence import BATCH, INTERACTIVE, Sequence
from serving.engine.sharing import Costs, Sharing, share_step
from serving.engine.slots import SlotTable


def plan_step(
    waiting: Items[Sequence],
    slots: SlotTable,
    pages: PageReader,
    limits: Limits,
    step: int = 0,
    num_promoted: int = 0,
    trip_s: float = math.inf,
    drafts_BD: NDArray[np.int32] | None = None,
    catch_up: tuple[Chunk, ...] = (),
    costs: Costs | None = None,
) -> StepPlan:
    """`waiting` is in the order of rank; `step` counts plans; `num_promoted` sequences are promoted and have not ended;
    one token for all takes about `trip_s` seconds; `drafts_BD` are guesses by slot, negative where there is none, and
    `catch_up` is what a draft model must read before it can make more; both only when nobody waits or prefills. `costs`
    say what batch work may share a step with people's; all of it without them.

    Pages promised never exceed the free ones plus those that the preempted surely give back.
    """
    prefilling = slots.prefilling()
    # Where people do nothing but decode, there is nothing to share with them.
    is_shared = waiting or prefilling or slots.batch_B.any()
    sharing = share_step(waiting, slots, limits, costs, step) if costs is not None and is_shared else None
    held_B = None if sharing is None else sharing.held_B
    if not (waiting or prefilling):  # the steady state: everyone decodes
        num_drafts_B = None if drafts_BD is None else np.count_nonzero(drafts_BD >= 0, axis=1)
        growth = plan_growth(slots, pages, limits, choose_trips(slots, limits, trip_s), num_drafts_B, held_B)
        return StepPlan(
            preempt=growth.preempt,
            grow=growth.grow,
            decode=growth.decode,
            num_trips=growth.num_trips,
            drafts_BD=drafts_BD if growth.with_drafts else None,
            catch_up=tuple(chunk for chunk in catch_up if chunk.sequence not in growth.preempt),
        )
    growth = plan_growth(slots, pages, limits, held_B=held_B, prefilling=prefilling)
    gone = set(map(id, growth.preempt))
    running = [sequence for sequence in prefilling if id(sequence) not in gone]
    draft = AdmissionDraft(slots, pages, limits, growth, None if sharing is None else sharing.batch_tiles)
    draft.go_on(s for s in running if s.band == INTERACTIVE and not _waits_for_floor(s, sharing))
    # Whoever was just preempted for pages would be the first to be admitted again.
    may_enter = not growth.preempt and draft.enter(_entering(waiting, sharing), INTERACTIVE)
    draft.go_on(s for s in running if s.band == BATCH or _waits_for_floor(s, sharing))
    if may_enter and not draft.preempt:  # who was preempted comes before those who wait
        draft.enter(_entering(waiting, sharing), BATCH)
    return StepPlan(
        promote=_choose_promoted(waiting, running, limits.patience, step) if num_promoted < limits.max_promoted else (),
        preempt=(*growth.preempt, *draft.preempt.values()),
        admit=tuple(draft.admit),
        fill=tuple((s, limits.chunk_tokens) for s in running if s.slot in growth.fill and s.slot not in draft.preempt),
        grow=_without(growth.grow, draft.preempt),
        decode=_without(growth.decode, draft.preempt),
        prefill=tuple(draft.prefill),
    )


def _waits_for_floor(sequence: Sequence, sharing: Sharing | None) -> bool:
    """A promoted sequence decodes like an interactive one, but where its prompt would hold them up it has the floor's
    steps, and of these what they leave."""
    return sharing is not None and not (sharing.is_floor and sharing.batch_tiles) and sequence.is_promoted


def _entering(waiting: Items[Sequence], sharing: Sharing | None) -> Iterable[Sequence]:
    return waiting if sharing is None else (s for s in waiting if not _waits_for_floor(s, sharing))


def _choose_promoted(
    waiting: Items[Sequence], prefilling: list[Sequence], patience: int, step: int
) -> tuple[Sequence, ...]:
    """The batch sequence of the best rank among those that get no token, if it has waited long enough."""
    first = bisect_left(waiting, BATCH, key=lambda sequence: sequence.band)
    candidates = [*(s for s in prefilling if s.band == BATCH), *waiting[first : first + 1]]
    return tuple(s for s in candidates if step - s.waiting_since >= patience)[:1]


def _without(slots: NDArray[np.intp], gone: dict[int, Sequence]) -> NDArray[np.intp]:
    return slots[~np.isin(slots, list(gone))] if gone else slots
