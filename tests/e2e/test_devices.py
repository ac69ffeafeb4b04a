"""The real model split over devices says what it says on one."""

import pytest

from tests.e2e.conftest import QUICKLY, serving
from tests.e2e.test_first_light import FRANCE, STORY, streamed

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

FEW = ("--slots", "1", "--chunk-tokens", "32", "--max-seq-len", "512")  # two programs: sharded ones compile slowly


def test_four_devices_give_the_tokens_of_one(server, demo_model, compile_cache):
    with serving(demo_model, compile_cache, *FEW, "--mesh", "data=1,tensor=4", XLA_FLAGS=QUICKLY) as sharded:
        for messages in (FRANCE, STORY):
            assert streamed(sharded, messages, max_tokens=24) == streamed(server, messages, max_tokens=24)
