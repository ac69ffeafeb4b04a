"""A model in several GGUF files is the model in one."""

import numpy as np
import pytest
from etils import epath
from gguf import GGUFWriter

from model.errors import CheckpointError
from model.gguf_file import read_gguf
from model.sources import find_source
from sharding.foreign import open_foreign
from sharding.stored_model import StoredModel
from tests.model_files import tiny_fields, tiny_tensors, to_gguf, write_gguf, write_tiny_gguf

COUNT = 3


def _name(number):
    return f"tiny-{number:05}-of-{COUNT:05}.gguf"


def write_split(folder, **first):
    """As llama-gguf-split writes it: only the first file says what the model is. `first` replaces its fields."""
    model, tensors = tiny_tensors()
    tensors = [*to_gguf(model, tensors).items()]
    folder.mkdir(exist_ok=True)
    for number in range(COUNT):
        fields = tiny_fields(model) if number == 0 else {}
        split = {"split.count": COUNT, "split.no": number, "split.tensors.count": len(tensors)}
        changes = {key.replace("__", "."): value for key, value in first.items()} if number == 0 else {}
        write_gguf(folder / _name(number + 1), {**fields, **split, **changes}, dict(tensors[number::COUNT]))
    return folder


@pytest.fixture
def split(tmp_path):
    return write_split(tmp_path / "m")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return read_gguf(write_tiny_gguf(tmp_path_factory.mktemp("whole") / "tiny.gguf"))


@pytest.mark.parametrize("given", ["", _name(1), _name(3)], ids=["folder", "first", "last"])
def test_the_folder_or_any_file_is_the_model(split, whole, given):
    model = open_foreign(epath.Path(split / given))
    assert (model.config, model.text, model.generation) == (whole.config, whole.text, whole.generation)
    assert model.tensors.keys() == whole.tensors.keys()
    for name, tensor in whole.tensors.items():
        np.testing.assert_array_equal(model.tensors[name].read(), tensor.read(), err_msg=name)


def test_what_the_librarys_own_writer_splits_is_the_model(tmp_path, whole):
    """As convert_hf_to_gguf.py does with --split-max-tensors."""
    model, tensors = tiny_tensors()
    write_gguf(tmp_path / "tiny.gguf", tiny_fields(model), to_gguf(model, tensors), max_tensors=7)
    assert sorted(path.name for path in tmp_path.iterdir()) == [_name(number) for number in (1, 2, 3)]
    found = open_foreign(epath.Path(tmp_path))
    assert (found.config, found.text) == (whole.config, whole.text)
    for name, tensor in whole.tensors.items():
        np.testing.assert_array_equal(found.tensors[name].read(), tensor.read(), err_msg=name)


def test_it_is_called_by_what_its_files_have_in_common(split, tmp_path):
    assert StoredModel.open(split / _name(2)).card.name == "tiny"
    assert find_source(str(split / _name(2)), tmp_path, {}, lambda *_: None).name == "tiny"


def test_files_that_are_missing_are_named(split):
    (split / _name(2)).unlink()
    with pytest.raises(CheckpointError, match=f"1 of the 3 files of tiny are missing: {_name(2)}; fetch them"):
        open_foreign(epath.Path(split / _name(1)))
    (split / _name(1)).unlink()
    with pytest.raises(CheckpointError, match=f"2 of the 3 files of tiny are missing: {_name(1)}, {_name(2)}"):
        open_foreign(epath.Path(split))


def test_a_file_that_was_renamed_is_refused(split):
    (split / _name(1)).rename(split / "tiny.gguf")
    with pytest.raises(CheckpointError, match=r"tiny\.gguf is one of 3 files of a model; the others are not known"):
        read_gguf(split / "tiny.gguf")


def test_files_of_another_split_are_refused(split):
    (split / _name(2)).write_bytes((split / _name(3)).read_bytes())
    with pytest.raises(CheckpointError, match="called number 2 of 3 says that it is number 3 of 3"):
        read_gguf(split / _name(1))


def test_tensors_that_are_missing_or_there_twice_are_refused(tmp_path):
    folder = write_split(tmp_path / "m", split__tensors__count=99)
    with pytest.raises(CheckpointError, match=r"3 files of the model hold 20 tensors, expected are 99"):
        read_gguf(folder / _name(1))
    writer = GGUFWriter(str(folder / _name(2)), "llama")
    writer.add_uint32("split.count", COUNT)
    writer.add_uint32("split.no", 1)
    writer.add_tensor("token_embd.weight", np.zeros((3, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"tensor token_embd\.weight is in two of the 3 files"):
        read_gguf(folder / _name(1))


def test_a_folder_with_several_models_needs_to_be_told_which(tmp_path, whole):
    for name in ("a.gguf", "mmproj-a.gguf"):
        write_tiny_gguf(tmp_path / name)
    assert open_foreign(epath.Path(tmp_path)).config == whole.config
    write_tiny_gguf(tmp_path / "b.gguf")
    with pytest.raises(CheckpointError, match=r"holds 2 GGUF models: a\.gguf, b\.gguf; give the file of one"):
        open_foreign(epath.Path(tmp_path))
