"""Fetching from a hub: a small server of our own speaks as much of its protocol as a download needs."""

import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

import pytest

from model.convert import check_tensors
from model.errors import SourceUnavailable
from model.hf_folder import read_hf_folder
from model.hub import fetch_repository
from tests.model_files import TIED

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def _files():
    """What lies in the repository: the golden model and things that nobody needs."""
    files = {path.name: path.read_bytes() for path in TIED.iterdir()}
    meaning = {
        "added_tokens.json": b"{}",
        "special_tokens_map.json": b"{}",
        "additional_chat_templates/tool_use.jinja": b"T",
    }
    return files | meaning | {"pytorch_model.bin": b"x" * 1000, "README.md": b"hello"}


class Hub(BaseHTTPRequestHandler):
    """One repository, `org/tiny`, with one revision. `server.broken` names a file that ends early."""

    def do_GET(self):
        self._answer(body=True)

    def do_HEAD(self):
        self._answer(body=False)

    def log_message(self, *args):
        pass

    def _answer(self, *, body):
        path = unquote(self.path.partition("?")[0])
        self.server.asked.append(path)
        match path.strip("/").split("/"):
            case ["api", "models", "org", "tiny"] | ["api", "models", "org", "tiny", "revision", "main" | "v1"]:
                siblings = [{"rfilename": name, "size": len(data)} for name, data in _files().items()]
                self._json({"id": "org/tiny", "sha": COMMIT, "siblings": siblings})
            case ["api", "models", "org", "tiny", "tree", revision] if revision == COMMIT:
                self._json([self._entry(name, data) for name, data in _files().items()])
            case ["api", "models", "org", "tiny", "revision", _]:
                self._refuse(404, "RevisionNotFound")
            case ["api", "models", "org", "pickled"]:
                siblings = [{"rfilename": name, "size": 9} for name in ("config.json", "pytorch_model.bin", "m.gguf")]
                self._json({"id": "org/pickled", "sha": COMMIT, "siblings": siblings})
            case ["api", "models", "org", "gated"]:
                self._refuse(403, "GatedRepo")
            case ["api", "models", "org", "ill"]:
                self._refuse(500, "")
            case ["org", "tiny", "resolve", revision, *parts] if revision == COMMIT:
                self._file("/".join(parts), body=body)
            case _:
                self._refuse(404, "RepoNotFound")

    def _entry(self, name, data):
        return {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}

    def _json(self, value):
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _refuse(self, status, code):
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _file(self, name, *, body):
        data = _files()[name]
        self.send_response(200)
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data[: len(data) // 2] if name in self.server.broken else data)


@contextmanager
def _serving():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.asked, server.broken = [], set()
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def hub():
    with _serving() as server:
        yield server


def _endpoint(server):
    return f"http://127.0.0.1:{server.server_port}"


def _fetch(server, tmp_path, name="org/tiny", revision=None, reports=None):
    report = (lambda done, total: reports.append((done, total))) if reports is not None else lambda *_: None
    return fetch_repository(name, revision, tmp_path / "cache", report, endpoint=_endpoint(server))


def test_a_repository_is_fetched_and_read(hub, tmp_path):
    reports = []
    folder = _fetch(hub, tmp_path, reports=reports)
    model = read_hf_folder(folder)
    check_tensors(model)
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert "model.safetensors" in names and "tokenizer.json" in names
    assert {"added_tokens.json", "special_tokens_map.json", "additional_chat_templates/tool_use.jinja"} <= names
    assert read_hf_folder(folder).text.tool_template == "T"
    assert not names & {"pytorch_model.bin", "README.md", "logits.npz"}
    total = sum(len(_files()[name]) for name in names)
    assert reports[-1] == (total, total)


def test_a_second_fetch_downloads_nothing(hub, tmp_path):
    _fetch(hub, tmp_path, revision="v1")
    hub.asked.clear()
    _fetch(hub, tmp_path, revision="v1")
    assert not [path for path in hub.asked if "/resolve/" in path]


def test_a_file_that_ends_early_is_never_taken_for_whole(hub, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)  # it would retry for five seconds
    hub.broken.add("model.safetensors")
    with pytest.raises(SourceUnavailable, match=r"hf:org/tiny could not be fetched"):
        _fetch(hub, tmp_path)
    hub.broken.clear()
    check_tensors(read_hf_folder(_fetch(hub, tmp_path)))


@pytest.mark.parametrize(
    ("name", "revision", "words"),
    [
        ("org/none", None, "hf:org/none does not exist, or needs a log-in"),
        ("org/tiny", "v9", "hf:org/tiny has no revision 'v9'"),
        ("org/pickled", None, "holds no model.safetensors, whole or in parts, only pytorch_model.bin, m.gguf; a GGUF"),
        ("org/gated", None, "hf:org/gated is gated"),
        ("org/ill", None, "hf:org/ill could not be fetched"),
        ("org/--bad--", None, "hf:org/--bad-- does not exist"),
    ],
)
def test_what_is_not_there_is_said_in_one_sentence(hub, tmp_path, name, revision, words):
    with pytest.raises(SourceUnavailable, match=words):
        _fetch(hub, tmp_path, name, revision)


def test_without_a_network_there_is_a_way_out(tmp_path):
    with _serving() as server:
        gone = server
    with pytest.raises(SourceUnavailable, match="check the network and run the command again"):
        _fetch(gone, tmp_path)
