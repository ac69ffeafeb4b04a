"""The README's examples run as they stand, but for the port."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

README = (Path(__file__).parents[2] / "README.md").read_text()
CURL, SHORT_FORM = re.findall(r"^curl .*?(?=^```)", README, re.MULTILINE | re.DOTALL)[:2]
SDK, RESPONSES, WEBSOCKET, EMBEDDINGS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[:4]


def run(command, server):
    moved = [argument.replace("127.0.0.1:8000", f"127.0.0.1:{server.port}") for argument in command]
    return subprocess.run(moved, capture_output=True, text=True, timeout=120, check=True).stdout


def test_the_curl_example(server):
    told = run(["bash", "-c", CURL], server)
    assert '"content":" Paris"' in told and told.rstrip().endswith("data: [DONE]")


def test_the_sdk_example(server):
    assert "Paris" in run([sys.executable, "-c", SDK], server)


def test_the_responses_example(server):
    assert "Paris" in run([sys.executable, "-c", RESPONSES], server)


def test_the_short_form_example(server):
    told = run(["bash", "-c", SHORT_FORM], server)
    assert '{"type":"text"' in told and '{"type":"usage"' in told


def test_the_embeddings_example(server):
    assert 0.1 < float(run([sys.executable, "-c", EMBEDDINGS], server)) < 1


def test_the_websocket_example(server):
    assert run([sys.executable, "-c", WEBSOCKET], server).strip()
