"""commit_tokens: hands out what a step that has been read gave to whom, and ends those who are done."""

import logging
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from serving.engine.api import SequenceOutput, StepNews, TokenLogprobs
from serving.engine.batch import NOT_FINITE
from serving.engine.counts import EngineCounts
from serving.engine.in_flight import InFlight
from serving.engine.news import append_tokens
from serving.engine.roster import Roster
from serving.engine.sequence import NO_SLOT, Sequence
from serving.engine.speculation import Speculation
from serving.errors import EngineFailed, InvalidRequest
from serving.request import FinishReason

logger = logging.getLogger(__name__)


def commit_tokens(
    step: InFlight, tokens_RI: NDArray[np.int32], roster: Roster, counts: EngineCounts, speculation: Speculation | None
) -> StepNews:
    """`tokens_RI` are the step's, as the device gave them. Plain rows get theirs at once, the others a look each.

    `speculation` has made the guesses, if the engine makes any at all, and may have held rows back for them.
    """
    outputs = _commit_chunks(step, tokens_RI, roster)
    tokens_rI = tokens_RI[step.row_r]
    if step.num_drafts_r is not None and speculation is not None:
        _learn(step.num_drafts_r, step.sequences, tokens_rI, counts, speculation)
    odd_r, logprobs = step.is_odd(tokens_rI, roster.slots), step.read_logprobs()
    plain_r = ~odd_r
    plain = list(compress(step.sequences, plain_r.tolist()))
    appended = append_tokens(plain, tokens_rI[plain_r].T.tolist())
    odd = zip(compress(step.sequences, odd_r.tolist()), tokens_rI[odd_r].tolist(), strict=True)
    # Who has ended while this step was in flight has tokens too many.
    ended = [
        _commit_odd(sequence, tokens, logprobs.get(sequence.request_id, ()), roster)
        for sequence, tokens in odd
        if sequence.finish_reason is None
    ]
    counts.generation_tokens += len(plain) * step.num_trips + sum(len(output.token_ids) for output in ended)
    if speculation is not None:
        _let_go_on(step, roster)
    return StepNews((*outputs, *ended), [sequence.request_id for sequence in plain], appended)


def _commit_chunks(step: InFlight, tokens_RI: NDArray[np.int32], roster: Roster) -> list[SequenceOutput]:
    """Publish what prefill has written. Returns what it tells of prompts, and the ends of those who met NaN."""
    outputs = []
    told = {} if step.prompts is None else step.prompts.read()
    embedded = {} if step.pooling is None else step.pooling.commit()
    for row, sequence, num_written in step.prefilled:
        if tokens_RI[row, 0] != NOT_FINITE:
            roster.pages.publish(sequence, num_written)
            roster.pages.trim(sequence, num_written)
            if (news := told.get(sequence.request_id)) and sequence.finish_reason is None:
                sequence.num_prompt_told += len(news)
                outputs.append(SequenceOutput(sequence.request_id, prompt_logprobs=news))
            if (vector := embedded.get(sequence.request_id)) and sequence.finish_reason is None:
                outputs.append(SequenceOutput(sequence.request_id, embedding=vector))
            if num_written >= sequence.num_prompt:
                if (prefilled := sequence.history.prefilled()) and sequence.finish_reason is None:
                    outputs.append(
                        SequenceOutput(sequence.request_id, cached_tokens=sequence.num_cached, prefilled=prefilled)
                    )
                roster.release_siblings(sequence)
        elif sequence.finish_reason is None:
            outputs.append(_finish_broken(sequence, (), roster))
    return outputs


def _commit_odd(
    sequence: Sequence, tokens: list[int], logprobs: tuple[TokenLogprobs, ...], roster: Roster
) -> SequenceOutput:
    taken, reason = sequence.take(token for token in tokens if token >= 0)
    if reason is None and NOT_FINITE in tokens:
        return _finish_broken(sequence, taken, roster)
    sequence.num_pending = 0  # read now, if it was preempted
    matcher = sequence.request.matcher
    if matcher is not None:
        if sequence.slot != NO_SLOT:
            roster.slots.unread_B[sequence.slot] = False  # the row can be dispatched again
        if not matcher.accept(*taken):
            error = InvalidRequest(f"the answer cannot go on as its grammar wants: {matcher.error}.")
            return roster.finish(sequence, FinishReason.ERROR, error=error)
        reason = FinishReason.STOP if matcher.is_stopped else reason
    if reason is not None:
        return roster.finish(sequence, reason, taken, logprobs=logprobs)
    return SequenceOutput(sequence.request_id, taken, logprobs=logprobs)


def _finish_broken(sequence: Sequence, tokens: tuple[int, ...], roster: Roster) -> SequenceOutput:
    """Only its own tokens led there, since the pages that others read are finite."""
    error = EngineFailed(
        f"the model gave no finite logits for this request, which has {len(sequence.token_ids):,} tokens so far; "
        "its weights are damaged, or too small a number type overflows."
    )
    logger.error("request %s: %s", sequence.request_id, error)
    return roster.finish(sequence, FinishReason.ERROR, tokens, error)


def _learn(
    num_drafts_r: NDArray[np.int64],
    sequences: tuple[Sequence, ...],
    tokens_rI: NDArray[np.int32],
    counts: EngineCounts,
    speculation: Speculation,
) -> None:
    """How many guesses were right: all tokens that a row got but the last."""
    num_given_r = np.count_nonzero(tokens_rI >= 0, axis=1)
    for row in np.flatnonzero((num_drafts_r > 0) & (num_given_r > 0)).tolist():
        num_drafted, num_accepted = int(num_drafts_r[row]), int(num_given_r[row]) - 1
        sequences[row].guesses.learn(num_drafted, num_accepted)
        speculation.learn(num_drafted, num_accepted)
        counts.count_drafts(num_drafted, num_accepted)


def _let_go_on(step: InFlight, roster: Roster) -> None:
    """Rows that were held back until this step was read, from where they really are."""
    slots = roster.slots
    if step.num_drafts_r is not None:
        for sequence in compress(step.sequences, (step.num_drafts_r > 0).tolist()):
            if sequence.slot != NO_SLOT:
                slots.num_tokens_B[sequence.slot] = len(sequence.token_ids)
                sequence.num_drafted = len(sequence.token_ids) - 1  # a draft model reads its guesses, too
    mine_r = slots.owner_B[step.slot_r] == step.owner_r
    slots.unread_B[step.slot_r[mine_r & slots.speculates_B[step.slot_r]]] = False
