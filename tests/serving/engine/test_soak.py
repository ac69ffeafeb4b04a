"""More demand than pages all the time, for a while; `python -m tests.bench.soak` does it for an hour."""

from tests.bench.soak import Soak


def test_an_engine_that_is_always_full_keeps_its_books_and_does_not_grow():
    report = Soak().run(1_500)
    assert report.submitted == report.refused + report.ended.total()
    assert min(report.ended[reason] for reason in ("length", "stop", "abort", "error")) > 0
    assert report.preemptions and report.cached_tokens and report.full_steps
    assert report.mean_pages_used > 0.85
    assert report.objects_late < 1.5 * report.objects_early
