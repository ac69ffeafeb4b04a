import socket
import subprocess
import sys

HEAVY = {"jax", "numpy", "grpc", "fastapi", "uvicorn", "httpx"}


def podstream(*arguments):
    return subprocess.run([sys.executable, "-m", "podstream", *arguments], capture_output=True, text=True, timeout=30)


def test_help_needs_nothing_heavy():
    code = (
        "import sys\nfrom podstream.cli import app\n"
        "for command in ['serve', 'replica', 'gateway', 'import', 'chat', 'top', 'profile', 'check', 'plan',"
        " 'version']:\n"
        "    try:\n        app([command, '--help'])\n    except SystemExit as end:\n        assert end.code == 0\n"
        f"assert not {HEAVY} & set(sys.modules), {HEAVY} & set(sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_an_error_is_one_sentence_and_exit_code_1():
    result = podstream("gateway", "--port", "99999")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "--port must be from 0 (any free one) to 65535, got 99999.\n"


def test_wrong_usage_is_exit_code_2():
    result = podstream("serve", "--no-such-flag")
    assert result.returncode == 2
    assert "--no-such-flag" in result.stderr


def test_serve_finds_out_about_a_taken_port_before_anything_else():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        result = podstream("serve", "/no/such/checkpoint", "--port", str(port))
    assert result.returncode == 1
    assert f"port {port} on 127.0.0.1 is in use" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_version():
    from importlib.metadata import version

    assert podstream("version").stdout.strip() == version("podstream")
