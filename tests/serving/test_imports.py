"""What a gateway starts without."""

import subprocess
import sys

HEAVY = {"jax", "numpy", "opentelemetry.sdk"}


def test_the_gateway_and_its_client_need_nothing_heavy():
    """Traces are off until they are turned on; the replica's side of them is the same module."""
    code = f"import serving.gateway.main, serving.replica.client, sys; assert not {HEAVY} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
