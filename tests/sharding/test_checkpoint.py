import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp

from model.card import ModelCard
from model.convert import convert
from model.errors import CheckpointError
from model.hf_folder import read_hf_folder
from sharding import checkpoint
from sharding.manifest import Manifest
from sharding.stored_model import StoredModel
from tests.model_files import LLAMA3


@pytest.fixture(scope="module")
def card():
    model = read_hf_folder(LLAMA3)
    return ModelCard("tiny", model.config, model.text, model.generation, "golden")


@pytest.fixture(scope="module")
def params():
    return convert(read_hf_folder(LLAMA3))


@pytest.fixture(scope="module")
def saved(tmp_path_factory, params, card):
    """A checkpoint that tests only read."""
    path = tmp_path_factory.mktemp("saved") / "checkpoint"
    checkpoint.save(path, params, card)
    return path


@pytest.fixture
def copy(saved, tmp_path):
    """A checkpoint to be spoiled."""
    return shutil.copytree(saved, tmp_path / "checkpoint")


def _abstract(params, dtype=jnp.float32):
    """Split along the last axis of matrices over all devices there are."""
    mesh = jax.make_mesh((len(jax.devices()),), ("tensor",), axis_types=(AxisType.Auto,))

    def describe(leaf):
        split = leaf.ndim > 1 and leaf.shape[-1] % len(jax.devices()) == 0
        spec = PartitionSpec(*[None] * (leaf.ndim - 1), "tensor") if split else PartitionSpec()
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(describe, params)


def _assert_equal(tree, expected):
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, tree, expected)


def test_restored_equals_saved(saved, params):
    abstract = _abstract(params)
    restored = checkpoint.load(saved, abstract)
    _assert_equal(restored, params)
    assert jax.tree.map(lambda leaf: leaf.sharding, restored) == jax.tree.map(lambda leaf: leaf.sharding, abstract)


def test_the_card_comes_back(saved, card):
    assert checkpoint.read_card(saved) == card


def test_dtype_is_cast_on_the_way(saved, params):
    restored = checkpoint.load(saved, _abstract(params, jnp.bfloat16))
    _assert_equal(restored, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params))


def test_bfloat16_and_device_arrays_are_saved_too(tmp_path, params, card):
    on_device = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), params)
    checkpoint.save(tmp_path / "c", on_device, card)
    _assert_equal(checkpoint.load(tmp_path / "c", _abstract(params, jnp.bfloat16)), on_device)
    _assert_equal(
        checkpoint.load(tmp_path / "c", _abstract(params)),
        jax.tree.map(lambda leaf: leaf.astype(jnp.float32), on_device),
    )


def test_progress_ends_at_all_bytes(saved, params):
    reports = []
    checkpoint.load(saved, _abstract(params), on_progress=lambda done, total: reports.append((done, total)))
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert reports[-1] == (total, total)
    assert len(reports) == len(jax.tree.leaves(params))


def test_relative_paths_and_missing_parents(tmp_path, monkeypatch, params, card):
    monkeypatch.chdir(tmp_path)
    checkpoint.save("new/folder/c", params, card)
    assert checkpoint.read_card(tmp_path / "new/folder/c") == card


def test_nothing_is_overwritten(copy, params, card):
    with pytest.raises(CheckpointError, match="exists already"):
        checkpoint.save(copy, params, card)
    _assert_equal(checkpoint.load(copy, _abstract(params)), params)


def test_a_save_that_fails_leaves_nothing(tmp_path, card):
    def leaves():
        yield ("embed", "embedding"), np.ones((3, 4), np.float32)
        raise CheckpointError("tensor x is cut.")

    with pytest.raises(CheckpointError, match="tensor x is cut"):
        checkpoint.save_leaves(tmp_path / "c", leaves(), card)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_named(tmp_path, params, card):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file/c could not be written"):
        checkpoint.save(tmp_path / "file" / "c", params, card)


def test_rests_of_killed_saves_are_removed_but_nothing_else(tmp_path, params, card):
    checkpoint.save(tmp_path / "c", params, card)
    (tmp_path / ".c-unfinished-0123/partial").mkdir(parents=True)
    (tmp_path / "c2").mkdir()
    checkpoint.remove_unfinished(tmp_path / "c")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "c2"]


def _files(root):
    return sorted(path for path in root.rglob("*") if path.is_file() and path.stat().st_size)


def test_one_flipped_byte_in_any_file_is_refused(saved, copy, params):
    """The array storage itself would load most of these without a word."""
    abstract = _abstract(params)
    for path in _files(copy):
        whole = path.read_bytes()
        middle = len(whole) // 2
        path.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
        with pytest.raises(CheckpointError):
            checkpoint.load(copy, abstract)
        path.write_bytes(whole)
    checkpoint.load(copy, abstract)


def test_a_changed_data_file_is_named_with_its_sums(copy, params):
    largest = max(_files(copy), key=lambda path: path.stat().st_size)
    whole = bytearray(largest.read_bytes())
    whole[len(whole) // 2] ^= 0x10
    largest.write_bytes(whole)
    with pytest.raises(CheckpointError, match=rf"{largest.name} is corrupt: its CRC-32C is [0-9a-f]{{8}}, expected"):
        checkpoint.load(copy, _abstract(params))


def test_a_cut_and_a_missing_file_are_named(copy, params):
    largest = max(_files(copy), key=lambda path: path.stat().st_size)
    whole = largest.read_bytes()
    largest.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=f"{largest.name} has {len(whole) - 1:,} bytes, expected {len(whole):,}"):
        checkpoint.load(copy, _abstract(params))
    largest.unlink()
    with pytest.raises(CheckpointError, match=f"{largest.name} is missing"):
        checkpoint.load(copy, _abstract(params))


def test_no_checkpoint_at_all(tmp_path):
    with pytest.raises(CheckpointError, match=f"there is no checkpoint at {tmp_path}/none"):
        checkpoint.read_card(tmp_path / "none")


def test_another_folder_is_no_checkpoint(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(CheckpointError, match="commit marker is missing"):
        checkpoint.read_card(tmp_path)


def test_without_its_commit_marker_it_is_incomplete(copy, params):
    (copy / "commit_success.txt").unlink()
    with pytest.raises(CheckpointError):
        checkpoint.load(copy, _abstract(params))


def test_without_its_manifest_it_is_incomplete(copy):
    (copy / "podstream_manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"incomplete: podstream_manifest\.json is missing"):
        checkpoint.read_card(copy)


@pytest.mark.parametrize("name", [checkpoint.ORBAX_V1, "_CHECKPOINT_METADATA", "podstream_manifest.json", "state"])
def test_ours_with_any_part_of_it_missing_is_refused_as_it_is_opened(copy, name):
    """Not only as it is loaded: who plans or serves asks for the card first."""
    path = copy / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(CheckpointError, match=r"incomplete|not a complete|corrupt|is missing"):
        StoredModel.open(copy)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 9, "files": {}}', '{"format": 1, "files": {"a": 3}}'])
def test_a_broken_manifest_is_refused(copy, params, text):
    (copy / "podstream_manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match="podstream_manifest"):
        checkpoint.load(copy, _abstract(params))


def test_a_foreign_checkpoint_is_told_from_ours(tmp_path):
    ocp.save(tmp_path / "c", {"a": np.ones(3)})
    with pytest.raises(CheckpointError, match="without a podstream model card"):
        checkpoint.read_card(tmp_path / "c")


def test_a_card_of_another_format_is_refused(tmp_path):
    ocp.save(tmp_path / "c", {"a": np.ones(3)}, custom_metadata={"podstream": {"format": 99}})
    root = epath.Path(tmp_path / "c")
    Manifest.of(root).write(root)
    with pytest.raises(CheckpointError, match="format 99"):
        checkpoint.read_card(tmp_path / "c")


def test_all_misfits_are_told_at_once(saved, params):
    wanted = _abstract(params)
    wanted["final_norm"]["scale"] = _abstract({"x": np.ones(3)})["x"]
    wanted["extra"] = _abstract({"x": np.ones(3)})["x"]
    wanted["embed"] = _abstract({"embedding": params["embed"]["embedding"]}, jnp.int8)
    del wanted["head"]
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(saved, wanted)
    text = str(caught.value)
    assert "final_norm.scale has shape [40], expected [3]" in text
    assert "extra is missing" in text
    assert "embed.embedding has type float32, expected int8" in text
    assert text.endswith("; and 1 more.")


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_damage_to_the_metadata_escapes(saved, copy, data):
    """Reading the card verifies nothing, so it may come back changed, but no foreign exception comes instead."""
    name = data.draw(st.sampled_from(["_CHECKPOINT_METADATA", "state/_METADATA"]))
    whole = bytearray((saved / name).read_bytes())
    whole[data.draw(st.integers(0, min(len(whole), 3000) - 1))] = data.draw(st.integers(0, 255))
    (copy / name).write_bytes(whole)
    try:
        checkpoint.read_card(copy)
    except CheckpointError as error:
        assert str(error).endswith(".")
    finally:
        (copy / name).write_bytes((saved / name).read_bytes())
