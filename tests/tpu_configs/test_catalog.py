"""What lies in tpu_configs, and every sentence about what does not fit."""

from dataclasses import replace

import pytest

from serving.errors import ConfigError
from tpu_configs.catalog import ad_hoc, chips, deployment, deployments, model_config, models, slices
from tpu_configs.slice import Slice

GOOD = 'model = "llama-3.1-8b"\nslice = "v5e-4"\nmesh = "data=1,tensor=4"\n'


def written(tmp_path, text):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("name", deployments())
def test_every_deployment_is_consistent(name):
    found = deployment(name)
    assert found.name == name
    assert found.replicas * found.mesh.num_devices == found.slice.num_devices


@pytest.mark.parametrize("name", models())
def test_every_model_can_be_read(name):
    assert model_config(name).num_layers > 0


def test_every_figure_of_a_chip_has_a_source():
    for chip in chips().values():
        figures = {"hbm_gib", "hbm_gb_s", "bf16_tflops", "int8_tops", "ici_gb_s", "vmem_mib", "smem_mib"}
        assert set(chip.sources) == figures


def test_those_that_the_service_is_made_for_are_there():
    wanted = {
        ("smollm2-135m", "v5e-1", None), ("llama-3.1-8b", "v6e-1", None), ("llama-3.1-8b", "v5e-4", "int8"),
        ("llama-3.1-70b", "v5e-16", "int8"), ("llama-3.1-70b", "v6e-8", None), ("llama-3.1-70b", "v5p-8", None),
        ("llama-3.1-70b", "tpu7x-4", None), ("qwen3-32b", "v6e-8", None), ("gemma-3-27b", "v6e-8", None),
        ("qwen3-30b-a3b", "v6e-8", None), ("mixtral-8x7b", "v5e-16", "int8"),
    }  # fmt: skip
    settings = [deployment(name).settings for name in deployments()]
    assert wanted <= {(one.model, one.slice, one.quantize) for one in settings}
    assert any(d.settings.model == "llama-3.1-405b" and d.slice.hosts > 1 for d in map(deployment, deployments()))


def test_a_price_is_set_by_the_user():
    assert deployment("llama-3.1-8b-v6e-1").slice.chip.price_per_hour == 0
    assert deployment("llama-3.1-8b-v6e-1", {"v6e": 2.5}).slice.chip.price_per_hour == 2.5


def test_a_file_of_ones_own(tmp_path):
    found = deployment(written(tmp_path, GOOD + 'quantize = "int8"\nslots = 64\n'))
    assert (found.name, found.settings.slots, found.settings.engine.quantize) == ("mine", 64, "int8")


def test_a_model_on_a_slice_takes_as_many_devices_as_divide_it():
    assert ad_hoc("llama-3.1-70b", "v5e-16").mesh.tensor == 8
    assert ad_hoc("smollm2-135m", "v5e-4").mesh.tensor == 1
    assert ad_hoc("llama-3.1-8b", "v6e-4", mesh="data=1,tensor=2").replicas == 2


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (GOOD + "slotz = 3", "mine.toml: key 'slotz' is not known; did you mean 'slots'?"),
        (GOOD + "zzz = 3", "mine.toml: key 'zzz' is not known; known: chunk_tokens,"),
        (GOOD + 'slots = "many"', "mine.toml: slots must be int, got 'many'."),
        ('model = "llama-3.1-8b"', "mine.toml: key 'slice' is missing."),
        (GOOD.replace("v5e-4", "v5e-5"), "slice 'v5e-5' is not known; did you mean 'v5e-"),
        (GOOD.replace("llama-3.1-8b", "llama-31-8b"), "model 'llama-31-8b' is not known; did you mean 'llama-3.1-8b'?"),
        (GOOD.replace("tensor=4", "tensor=3"), "needs 3 devices, which do not divide the 4 of slice v5e-4"),
        (
            GOOD.replace("v5e-4", "v5e-16").replace("tensor=4", "tensor=16"),
            "mesh tensor=16 does not divide the 8 KV heads of llama-3.1-8b; possible: 1, 2, 4, 8.",
        ),
        (GOOD + "max_seq_len = 131072\npage_size = 16", "is 4,194,304 bytes, the scalar memory of TPU v5e 1,048,576;"),
        (GOOD + "max_seq_len = 200000\nslots = 8", "max_seq_len 200,000 is more than the context of llama-3.1-8b"),
        (
            GOOD.replace("v5e-4", "v5e-8").replace("tensor=4", "tensor=8") + 'kv_dtype = "int8"',
            "int8 pages need two KV heads per device, mesh tensor=8 leaves 1 of 8; take bfloat16 pages or at most "
            "tensor=4.",
        ),
        (GOOD + 'dtype = "float17"', "dtype 'float17' is not known"),
        (GOOD.replace("data=1", "data=2"), "mesh data=2,tensor=4 is not planned for yet; give tensor alone."),
        ("slots = [", "is not TOML"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_sentence_with_the_numbers(tmp_path, text, sentence):
    with pytest.raises(ConfigError) as error:
        deployment(written(tmp_path, text))
    assert sentence in str(error.value)
    assert "\n" not in str(error.value) or "TOML" in sentence


def test_unknown_names_are_answered_with_the_nearest():
    with pytest.raises(ConfigError, match=r"did you mean 'llama-3\.1-70b-v6e-8'"):
        deployment("llama-3.1-70b-v6e8")
    with pytest.raises(ConfigError, match="chip 'v66' is not known"):
        deployment("llama-3.1-70b-v6e-8", {"v66": 1.0})
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        deployment("nowhere.toml")


def test_hosts_must_hold_the_chips():
    v5e = slices()["v5e-16"]
    assert v5e.host_bounds == (2, 2, 1)
    with pytest.raises(
        ConfigError, match="topology 4x4 has 16 chips, which do not make 3 hosts of TPU v5e; possible: 16, 4, 2"
    ):
        replace(v5e, hosts=3)
    with pytest.raises(ConfigError, match="topology reads like 4x4"):
        Slice("odd", v5e.chip, "4by4", 4)
