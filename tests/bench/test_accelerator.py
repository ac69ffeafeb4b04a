"""The GPU bench counts right, on an engine whose steps take no time, and says when there is no GPU."""

import pytest

from serving.engine.plan import Limits
from tests.bench import accelerator
from tests.engines import PAGE_SIZE, TILE_TOKENS, counting_engine


def test_rates_are_tokens_per_second_of_all_streams():
    engine = counting_engine(Limits(PAGE_SIZE, TILE_TOKENS, 2))
    ticks = iter([0.0, 2.0, 5.0])
    rates = accelerator.measure(engine, 4, 48, 7, clock=lambda: next(ticks))
    assert rates.prefill_tokens_per_s == 4 * 48 / 2.0
    decoded = rates.decode_tokens_per_s * 3.0
    assert 0 < decoded < 4 * 7 and decoded == pytest.approx(round(decoded))
    assert rates.step_ms == pytest.approx(3_000 / decoded * 4)


def test_it_says_that_there_is_no_gpu():
    with pytest.raises(SystemExit, match="No GPU here: JAX has cpu devices only"):
        accelerator.main()
