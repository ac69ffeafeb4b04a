"""What an engine counts."""

from serving.engine.counts import EngineCounts
from serving.engine.step_clock import StepClock


def test_right_guesses_are_counted_by_their_place():
    counts = EngineCounts()
    for drafted, accepted in [(2, 2), (4, 1), (3, 0), (4, 4)]:
        counts.count_drafts(drafted, accepted)
    stats = counts.stats(StepClock())
    assert stats.accepted_at == (3, 2, 1, 1)
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (4, 13, 7)
