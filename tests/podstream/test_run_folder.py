import os
import signal
import subprocess
import sys

from podstream.run_folder import run_folder

HOLD = """
from podstream.run_folder import run_folder
with run_folder() as folder:
    print(folder, flush=True)
    input()
"""


def hold(folder):
    """A process that has a folder of its own there."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "TMPDIR": str(folder)},
    )  # fmt: skip
    return process, process.stdout.readline().strip()


def test_it_is_private_and_gone_in_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with run_folder() as folder:
        assert folder.parent == tmp_path and folder.stat().st_mode & 0o777 == 0o700
        (folder / "replica.sock").touch()
    assert not list(tmp_path.iterdir())


def test_what_a_killed_service_left_is_removed_by_the_next_and_nothing_that_is_in_use(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    killed, left = hold(tmp_path)
    lives, used = hold(tmp_path)
    with killed, lives:
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        with run_folder() as folder:
            assert {str(path) for path in tmp_path.iterdir()} == {str(folder), used}
        assert left != used
        lives.communicate("\n")
    assert not list(tmp_path.iterdir())
