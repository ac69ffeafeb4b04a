"""What people give that is no model here: one sentence each, with the way out."""

import json
import os
import shutil

import pytest
from etils import epath

from model.errors import CheckpointError
from sharding.foreign import open_foreign
from sharding.stored_model import StoredModel
from tests.model_files import TIED, write_tiny_gguf

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 269060552\n"


def _refusal(path):
    with pytest.raises(CheckpointError) as caught:
        open_foreign(epath.Path(path))
    text = str(caught.value)
    assert text.endswith(".") and str(path) in text
    return text


@pytest.fixture
def folder(tmp_path):
    """A Hugging Face folder without its weights."""
    path = shutil.copytree(TIED, tmp_path / "m")
    for weights in path.glob("model*"):
        weights.unlink()
    return path


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json", "generation_config.json"])
def test_a_pointer_of_git_lfs_in_a_folder(tmp_path, name):
    path = shutil.copytree(TIED, tmp_path / "m")
    (path / name).write_text(POINTER)
    assert f"{name} is a pointer of Git LFS, not the file itself; run `git lfs pull`" in _refusal(path)


def test_a_pointer_of_git_lfs_to_a_gguf_file(tmp_path):
    (tmp_path / "m.gguf").write_text(POINTER)
    assert "m.gguf is a pointer of Git LFS" in _refusal(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("pytorch_model.bin", "pytorch_model.bin, but no weights that are read: these are PyTorch pickles"),
        ("pytorch_model-00001-of-00002.bin", "PyTorch pickles"),
        ("weights.pt", "weights.pt, but no weights that are read: these are PyTorch pickles"),
        ("flax_model.msgpack", "these are Flax's msgpack; load it with from_flax=True"),
        ("tf_model.h5", "these are TensorFlow's HDF5; load it with from_tf=True"),
        ("model.onnx", "ONNX graphs"),
        ("consolidated.safetensors", "consolidated.safetensors, the weights in their authors' own format"),
        ("consolidated.00.pth", "consolidated.00.pth, the weights in their authors' own format"),
        ("weights.safetensors", "safetensors under a name that is not read; call it model.safetensors"),
        ("notes.txt", "holds no weights that are known: no Orbax checkpoint, no safetensors, no GGUF file"),
    ],
)
def test_weights_of_another_kind(folder, name, words):
    (folder / name).write_bytes(b"1234567890")
    assert words in _refusal(folder)


def test_an_empty_folder(tmp_path):
    assert _refusal(tmp_path).endswith("is empty.")


@pytest.mark.parametrize(
    ("config", "base"), [({"base_model_name_or_path": "org/base"}, "base model org/base"), ([], "its base model")]
)
def test_an_adapter(tmp_path, config, base):
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    text = _refusal(tmp_path)
    assert base in text and f"--lora NAME={tmp_path}" in text


def test_one_file_of_a_folder():
    assert _refusal(TIED / "config.json").endswith(f"give the folder that it lies in, {TIED}.")


@pytest.mark.parametrize("num_bytes", [0, 5, 200])
def test_safetensors_that_are_half_written(tmp_path, num_bytes):
    """Before its header, or within it."""
    path = shutil.copytree(TIED, tmp_path / "m")
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:num_bytes])
    assert f"model.safetensors ({num_bytes:,} bytes) is cut or corrupt" in _refusal(path)


def test_a_file_that_is_a_model_is_none_of_these(tmp_path):
    assert open_foreign(epath.Path(write_tiny_gguf(tmp_path / "m.gguf"))).config.num_layers == 2


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["", "config.json", "tokenizer.json", "model.safetensors", "orbax.checkpoint"])
def test_a_pipe_is_never_opened(tmp_path, name):
    """It may lie in the model's own place, or in that of one of its files."""
    path = shutil.copytree(TIED, tmp_path / "m") if name else tmp_path / "m.gguf"
    (path / name).unlink(missing_ok=True)
    os.mkfifo(path / name)
    for read in (open_foreign, StoredModel.open):
        with pytest.raises(CheckpointError, match=f"{name or 'm.gguf'} is a pipe or a device, and no file"):
            read(epath.Path(path))
