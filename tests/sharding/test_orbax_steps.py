"""Which step of a run is read, and what is refused because it is only half there. Orbax itself writes every run."""

import json
import logging
import shutil

import numpy as np
import orbax.checkpoint as v0
import pytest
from etils import epath

from model.errors import CheckpointError
from sharding.orbax_steps import find_pytree
from sharding.orbax_tree import OrbaxTree

TREE = {"params": {"k": np.arange(24.0, dtype=np.float32).reshape(4, 6), "zero": np.zeros((3,), np.float32)}}


def _save_run(path, *, use_ocdbt):
    handler = v0.PyTreeCheckpointHandler(use_ocdbt=use_ocdbt)
    with v0.CheckpointManager(path, item_names=("items",), item_handlers={"items": handler}) as manager:
        for step in (3, 12):
            manager.save(step, args=v0.args.Composite(items=v0.args.PyTreeSave(TREE)))
        manager.wait_until_finished()
    return path


@pytest.fixture(scope="module", params=[True, False], ids=["database", "files"])
def whole(request, tmp_path_factory):
    return _save_run(tmp_path_factory.mktemp("whole") / "run", use_ocdbt=request.param)


@pytest.fixture
def run(whole, tmp_path):
    """A copy to be spoilt."""
    return shutil.copytree(whole, tmp_path / "run")


def _find(path):
    return find_pytree(epath.Path(path))


def test_the_newest_step_of_a_run_is_read(whole):
    assert _find(whole) == epath.Path(whole / "12/items")
    assert _find(whole / "3") == _find(whole / "3/items") == epath.Path(whole / "3/items")
    np.testing.assert_array_equal(OrbaxTree.open(_find(whole)).tensors["params.k"].read(), TREE["params"]["k"])


def _is_emptied(run):
    shutil.rmtree(run / "12")
    (run / "12").mkdir()


def _lost_its_items(run):
    shutil.rmtree(run / "12/items")


def _is_not_committed(run):
    path = run / "12/_CHECKPOINT_METADATA"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"commit_timestamp_nsecs": None}))


def _is_being_written(run):
    (run / "12").rename(run / "12.orbax-checkpoint-tmp-7")


def _items_are_being_written(run):
    (run / "12/items").rename(run / "12/items.orbax-checkpoint-tmp-7")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_is_emptied, "12 is not complete: it holds no arrays"),
        (_lost_its_items, "12 is not complete: it holds no arrays"),
        (_items_are_being_written, "12 is not complete: it holds no arrays"),
        (_is_not_committed, "12 is not complete: _CHECKPOINT_METADATA has no time of commit"),
        (_is_being_written, "12.orbax-checkpoint-tmp-7 is not complete: the run that wrote it did not finish"),
        (lambda run: (run / "12/_CHECKPOINT_METADATA").write_text("{"), "12/_CHECKPOINT_METADATA is corrupt"),
        (lambda run: (run / "12/_CHECKPOINT_METADATA").unlink(), "12 is not complete: it lacks _CHECKPOINT_METADATA"),
        (lambda run: (run / "12/commit_success.txt").unlink(), "12 is not complete: it lacks commit_success.txt"),
    ],
)
def test_a_newest_step_that_is_not_whole_is_refused_with_the_path_of_one_that_is(run, spoil, words):
    spoil(run)
    with pytest.raises(CheckpointError) as caught:
        _find(run)
    assert words in str(caught.value)
    assert str(caught.value).endswith(
        f"it is the newest step of {run}, the newest whole one is {run / '3'}: give that."
    )
    assert _find(run / "3") == epath.Path(run / "3/items")


@pytest.mark.parametrize(
    ("spoil", "given"),
    [
        (_is_emptied, "12"),
        (_lost_its_items, "12"),
        (_is_not_committed, "12"),
        (_is_not_committed, "12/items"),
        (_is_being_written, "12.orbax-checkpoint-tmp-7"),
    ],
)
def test_a_step_that_is_not_whole_is_refused_with_the_path_of_one_that_is(run, spoil, given):
    spoil(run)
    with pytest.raises(CheckpointError) as caught:
        _find(run / given)
    assert "is not complete" in str(caught.value)
    assert str(caught.value).endswith(f"; the newest whole step beside it is {run / '3'}.")


def test_an_older_step_that_is_not_whole_is_nobodys_business(run):
    shutil.rmtree(run / "3/items")
    (run / "5.orbax-checkpoint-tmp-7").mkdir()
    assert _find(run) == epath.Path(run / "12/items")


def test_where_no_step_is_whole_that_is_said(run):
    for step in ("3", "12"):
        shutil.rmtree(run / step / "items")
    with pytest.raises(CheckpointError, match=rf"12 is not complete: .*; no other step of {run} is whole"):
        _find(run)


def test_databases_that_were_never_merged_are_refused(tmp_path):
    run = _save_run(tmp_path / "run", use_ocdbt=True)
    (run / "12/items/manifest.ocdbt").unlink()
    shutil.rmtree(run / "12/items/d")
    with pytest.raises(CheckpointError, match=r"databases of its 1 processes were never merged .*/run/3: give that"):
        _find(run)
    with pytest.raises(CheckpointError, match="never merged"):
        _find(run / "12/items")
    with pytest.raises(CheckpointError, match="what one process of a run wrote, give the folder that it lies in"):
        _find(run / "12/items/ocdbt.process_0")


@pytest.fixture
def files(tmp_path):
    """Without a database, as a run leaves it that was killed while it wrote the last of its files."""
    with v0.Checkpointer(v0.PyTreeCheckpointHandler(use_ocdbt=False)) as saver:
        saver.save(tmp_path / "step", args=v0.args.PyTreeSave({"w": np.ones((4, 6), np.float32), "b": np.ones(3)}))
    for name in ("_METADATA", "commit_success.txt", "_CHECKPOINT_METADATA"):
        (tmp_path / "step" / name).unlink()
    return epath.Path(tmp_path / "step")


def test_chunks_that_are_missing_are_no_zeros(files):
    np.testing.assert_array_equal(OrbaxTree.open(find_pytree(files)).tensors["b"].read(), np.ones(3))
    (files / "w/0.0").unlink()
    with pytest.raises(CheckpointError, match=r"step: tensor w\S* has 0 of 1 chunks in its folder; copy it again"):
        OrbaxTree.open(find_pytree(files))


def test_what_an_old_orbax_left_out_as_zeros_is_said(files, caplog):
    """It stored no chunk of zeros, and its metadata does not say how it is with them."""
    (files / "_METADATA").write_text('{"tree_metadata": {}, "use_zarr3": false}')
    (files / "b/0").unlink()
    with caplog.at_level(logging.WARNING):
        tree = OrbaxTree.open(find_pytree(files))
    assert "chunks of 1 tensors are missing and read as zeros" in caplog.text and "b (1 of 1)" in caplog.text
    np.testing.assert_array_equal(tree.tensors["b"].read(), np.zeros(3))


def test_a_folder_with_nothing_of_it_is_told_from_one_that_is_broken(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    assert _find(tmp_path) is None
