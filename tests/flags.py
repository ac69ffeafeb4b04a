"""How XLA compiles in tests, which compile far more than they compute: nothing is optimised, and fusions are emitted in
the short way, in a quarter of the seconds. To be set before JAX starts; end-to-end tests go without."""

XLA_FLAGS = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"


def virtual_devices(count: int) -> str:
    """XLA_FLAGS that make sharded programs real."""
    return f"{XLA_FLAGS} --xla_force_host_platform_device_count={count}"
