"""Whether a model fits, before anything is compiled, and what would do if it does not."""

import pytest

from serving.errors import ConfigError
from tpu_configs import topology
from tpu_configs.catalog import ad_hoc, deployment, deployments
from tpu_configs.chip import GIB
from tpu_configs.fit import check_fit, missing_bytes, room_bytes, sequences
from tpu_configs.pages import HeldPages
from tpu_configs.sizes import Sizes


@pytest.mark.parametrize("name", deployments())
def test_every_deployment_fits(name):
    check_fit(deployment(name))
    assert sequences(deployment(name), 1024) > 0


def test_what_is_too_large_says_by_how_much_and_what_would_do():
    wanted = ad_hoc("llama-3.1-70b", "v5e-8")
    with pytest.raises(ConfigError) as error:
        check_fit(wanted)
    missing = missing_bytes(wanted) / GIB
    assert str(error.value) == (
        "llama-3.1-70b on v5e-8 does not fit: of 15.75 GiB on a device of TPU v5e its weights take 16.43 GiB, and "
        f"{missing:.2f} GiB are missing for one sequence of 8,192 tokens; slice v5p-8 does; int8 weights do."
    )


def test_a_larger_slice_of_the_same_chip_comes_first():
    with pytest.raises(ConfigError, match=r"slice v5e-4 does; int8 weights do"):
        check_fit(ad_hoc("llama-3.1-8b", "v5e-1"))


def test_a_shorter_context_may_do():
    wanted = ad_hoc("llama-3.1-8b", "v6e-1", slots=1, max_seq_len=131_072)
    with pytest.raises(ConfigError, match=r"max_seq_len 1\d\d,\d\d\d does"):
        check_fit(wanted)


def test_layers_with_a_window_hold_no_more_than_it():
    """Gemma 3 27B, 62 layers of 2 KV heads of 128 a chip in 7 sets of 10, of which one sees all 64 pages of 8k."""
    held = HeldPages.of(deployment("gemma-3-27b-v6e-8"))
    assert held.page_bytes == 10 * 128 * 2 * 2 * 128 * 2
    assert [held.num_held(tokens) for tokens in (1024, 8192, 32_768)] == [7 * 8, 64 + 6 * 10, 256 + 6 * 10]
    in_one_set = 64 * held.page_bytes * 62 // 10
    assert in_one_set / (held.num_held(8192) * held.page_bytes) == pytest.approx(3.2)
    assert held.token_bytes(4096) == held.page_bytes * (32 + 6 * 10)
    assert held.most(8192) == 64 + 6 * 18, "its window and two chunks, while it prefills"


def test_layers_of_one_kind_hold_all_tokens():
    found, sizes = deployment("llama-3.1-8b-v6e-1"), Sizes.of(deployment("llama-3.1-8b-v6e-1"))
    held = HeldPages.of(found)
    assert held.page_bytes == sizes.kv_token_bytes * 128 and held.most(8192) == held.num_held(8192) == 64
    assert held.token_bytes(100) == sizes.kv_token_bytes * 100


def test_room_is_what_weights_a_reserve_and_temporaries_leave():
    found = deployment("llama-3.1-70b-v6e-8")
    expected = 31.25 * GIB * 0.94 - Sizes.of(found).weight_bytes
    assert room_bytes(found) == pytest.approx(expected, abs=2)


def test_without_the_tpu_compiler_a_sentence_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(topology, "has_libtpu", lambda: False)
    with pytest.raises(ConfigError, match=r"libtpu, is not installed: pip install 'podstream\[aot\]'"):
        topology.describe_devices(deployment("llama-3.1-8b-v6e-1").slice)
