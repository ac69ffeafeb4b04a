"""A start among damaged caches succeeds whatever lies there, gives the same answers, and says what it made anew."""

import itertools
import shutil
from hashlib import sha256
from pathlib import Path

import pytest

import kv
import model
from model.file_lock import file_lock
from podstream.home import home
from tests.damage import DAMAGES
from tests.e2e.conftest import SMALL, serving

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def answer(server):
    params = {"messages": [{"role": "user", "content": "Count to ten."}], "temperature": 0, "max_tokens": 24}
    return server.client.chat.completions.create(model=server.model, **params).choices[0].message.content


def damage_one_each(files):
    """Each kind of damage to one of the files."""
    for damage, file in zip(DAMAGES.values(), itertools.cycle(files), strict=False):
        damage(file)


def below(folder, pattern):
    return sorted(path for path in folder.rglob(pattern) if path.is_file() and path.stat().st_size)


def largest(folder):
    return max(below(folder, "*"), key=lambda path: path.stat().st_size)


def test_a_start_among_damaged_caches(server, demo_model, compile_cache, tmp_path):
    expected = answer(server)
    own, compiled = tmp_path / "home", tmp_path / "compiled"
    shutil.copytree(home() / "downloads" / "pypi", own / "downloads" / "pypi")
    [fetched] = below(own, "*SmolLM2*.gguf")  # an older podstream may have left it without a sum
    fetched.with_name(f"{fetched.name}.sha256").write_text(sha256(fetched.read_bytes()).hexdigest())
    DAMAGES["a flipped bit"](largest(shutil.copytree(demo_model, own / "models" / demo_model.name)))
    damage_one_each(below(shutil.copytree(compile_cache, compiled) / "programs", "*"))
    for package in (model, kv):
        caches = Path(package.__path__[0]) / "__pycache__"
        with file_lock(caches / "kernels.lock"):  # other tests may be reading them
            damage_one_each(below(caches, "*.nb?"))
    with serving(None, compiled, *SMALL, PODSTREAM_HOME=str(own)) as started:
        assert answer(started) == expected
    said = "\n".join(started.lines)
    assert "making the demo model anew" in said
    assert "compiling them anew" in said, "the kernels, but for those that another test has made anew meanwhile"
    assert said.count("compiling it") == len(DAMAGES) - 1, "but for the one that is gone"
