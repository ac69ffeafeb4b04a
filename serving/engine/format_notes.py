"""What a back end does badly of what was asked for, in a sentence each, for the operator."""

from model.quantization import Quantization

ONE_BYTE = ("int8", "fp8")


def format_notes(
    platform: str, quantization: Quantization | None, kv_dtype: str, dtype: str, num_experts: int = 0
) -> tuple[str, ...]:
    """`platform` is what JAX calls the devices; `kv_dtype` is one of `serving.config.KV_DTYPES`."""
    if platform != "cpu":
        return ()
    notes = []
    if quantization is not None and quantization.matrices.group is not None:
        notes.append(
            f"{quantization} weights save memory on a CPU but make it slower: "
            f"it widens them to {dtype} before each product, where int8 is read as it is."
        )
    if kv_dtype in ONE_BYTE:
        notes.append(
            f"a cache of {kv_dtype} saves memory on a CPU but makes it slower: its decode kernel reads float32 and "
            f"bfloat16, other pages are gathered and widened to {dtype} first."
        )
    if num_experts:
        notes.append(
            f"a mixture of {num_experts} experts is slow on a CPU: XLA multiplies every token with all of them."
        )
    return tuple(notes)
