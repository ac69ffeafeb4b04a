"""What a back end does not gain from the formats that were asked for, in a sentence each, for the operator."""

from model.quantization import Quantization

ONE_BYTE = ("int8", "fp8")


def format_notes(platform: str, quantization: Quantization | None, kv_dtype: str, dtype: str) -> tuple[str, ...]:
    """`platform` is what JAX calls the devices; `kv_dtype` is one of `serving.config.KV_DTYPES`."""
    if platform != "cpu":
        return ()
    notes = []
    if quantization is not None:
        notes.append(
            f"{quantization} weights save memory on a CPU but make it slower: "
            f"it widens them to {dtype} before each product."
        )
    if kv_dtype in ONE_BYTE:
        notes.append(
            f"a cache of {kv_dtype} saves memory on a CPU but makes it slower: its decode kernel reads float32 and "
            f"bfloat16, other pages are gathered and widened to {dtype} first."
        )
    return tuple(notes)
