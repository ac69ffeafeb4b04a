"""Formats read and write themselves; what cannot be is refused in one sentence."""

import pytest

from model import axes
from model.errors import QuantizationError
from model.quantization import Quantization, WeightFormat, choose_quantization


@pytest.mark.parametrize(
    ("text", "written"),
    [("int8", "int8"), ("int4", "int4:32"), ("int4:32", "int4:32"), ("int4:64", "int4:64"), ("int4:128", "int4:128")],
)
def test_formats_are_read_and_written(text, written):
    assert str(Quantization.parse(text)) == written
    assert Quantization.parse(written) == Quantization.parse(text)


@pytest.mark.parametrize("text", ["", "int", "INT8", "int8:64", "int4:", "int4:48", "int4:1024", "int4:-32", "fp8"])
def test_an_unknown_format_is_refused_with_the_known_ones(text):
    with pytest.raises(QuantizationError, match=rf"'{text}' is not known; known: int8, int4 .*int4:128"):
        Quantization.parse(text)


def test_what_is_quantised_and_how():
    int4 = Quantization.parse("int4:64")
    assert int4.format_of("out", (9, 64, 576), (axes.HEADS, axes.HEAD_DIM, axes.EMBED), (0, 1)) == WeightFormat(64)
    assert int4.format_of("embedding", (100, 576), (axes.VOCAB, axes.EMBED), (1,)) == WeightFormat()
    assert int4.format_of("norm", (576,), (axes.EMBED,), ()) is None


def test_groups_that_do_not_divide_are_named_with_their_weight():
    with pytest.raises(QuantizationError, match="groups of 128 do not divide the 576 inputs of gate"):
        Quantization.parse("int4:128").format_of("gate", (576, 1536), (axes.EMBED, axes.MLP), (0,))


def test_as_saved_or_as_wanted_but_never_twice():
    assert choose_quantization(None, None) is None
    assert choose_quantization("int4", None) == Quantization.parse("int4")
    assert choose_quantization(None, "int8") == choose_quantization("int8", "int8") == Quantization.parse("int8")
    with pytest.raises(QuantizationError, match="int8 already, rounding it again to int4:32"):
        choose_quantization("int4", "int8")
