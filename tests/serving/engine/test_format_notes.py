import pytest

from model.quantization import Quantization
from serving.engine.format_notes import format_notes


@pytest.mark.parametrize(("quantize", "kv", "words"), [
    (None, "float32", []),
    ("int8", "bfloat16", []),
    ("int4", "bfloat16", ["int4:32 weights save memory on a CPU"]),
    (None, "fp8", ["a cache of fp8 saves memory on a CPU"]),
    ("int4:64", "int8", ["int4:64 weights", "a cache of int8"]),
])  # fmt: skip
def test_a_cpu_says_what_it_does_not_gain(quantize, kv, words):
    quantization = None if quantize is None else Quantization.parse(quantize)
    notes = format_notes("cpu", quantization, kv, "float32")
    assert len(notes) == len(words) and all(word in note for word, note in zip(words, notes, strict=True))
    assert all("widen" in note for note in notes), "the reason is told"
    assert format_notes("tpu", quantization, kv, "float32") == ()


def test_a_cpu_says_that_experts_are_slow():
    [note] = format_notes("cpu", None, "float32", "float32", num_experts=8)
    assert "8 experts" in note
