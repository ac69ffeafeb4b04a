"""A secret is read from a file, and its words never show."""

import pytest

from serving.errors import ConfigError
from serving.secret import Secret


def test_it_is_the_line_of_a_file(tmp_path):
    (tmp_path / "secret").write_text(" 0123456789abcdef \n")
    secret = Secret.read(str(tmp_path / "secret"))
    assert secret.metadata == (("authorization", "Bearer 0123456789abcdef"),)
    assert secret.is_known_to((("user-agent", "x"), *secret.metadata))
    assert "0123" not in repr(secret)
    assert Secret.read(None) is None


@pytest.mark.parametrize("said", [(), (("authorization", "Bearer 0123456789abcdeX"),), (("authorization", b"\xff"),)])
def test_who_says_something_else_does_not_know_it(said):
    assert not Secret(b"0123456789abcdef").is_known_to(said)


@pytest.mark.parametrize(
    "text", ["", "short", "two lines\n of some length", "not ASCII: äöüäöüäöü", "a tab\tor a nul \0 in it"]
)
def test_what_can_be_guessed_or_misread_is_refused_without_being_shown(tmp_path, text):
    (tmp_path / "secret").write_text(text)
    with pytest.raises(ConfigError, match="one line of 16 or more ASCII characters") as refused:
        Secret.read(str(tmp_path / "secret"))
    assert not text or text not in str(refused.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        Secret.read(str(tmp_path / "none"))
