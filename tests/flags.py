"""How XLA compiles in tests, which compile far more than they compute. To be set before JAX starts; end-to-end tests go
without."""


def xla_flags(num_devices: int = 1) -> str:
    """Nothing is optimised, and fusions are emitted in the short way: a quarter of the seconds. Virtual devices make
    sharded programs real."""
    return (
        f"--xla_force_host_platform_device_count={num_devices} --xla_backend_optimization_level=0 "
        "--xla_cpu_use_fusion_emitters=false"
    )
