from pathlib import Path

import pytest

from podstream.home import environment, home
from serving.errors import ConfigError


@pytest.fixture(autouse=True)
def bare(monkeypatch):
    monkeypatch.delenv("PODSTREAM_HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)


def test_the_users_cache_folder_is_the_default(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert home() == tmp_path / ".cache" / "podstream"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert home() == tmp_path / "caches" / "podstream"


def test_the_chosen_folder_wins_and_is_absolute(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PODSTREAM_HOME", "~/models")
    assert home() == tmp_path / "models"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PODSTREAM_HOME", "here")
    assert home() == Path.cwd() / "here"


def test_who_has_no_home_folder_is_told_the_way_out(monkeypatch):
    monkeypatch.setenv("PODSTREAM_HOME", "~nobody-of-this-name/models")
    with pytest.raises(ConfigError, match=r"no home folder .* set PODSTREAM_HOME"):
        home()


def test_children_inherit_a_copy(monkeypatch):
    monkeypatch.setenv("PODSTREAM_TEST", "1")
    assert environment()["PODSTREAM_TEST"] == "1"
