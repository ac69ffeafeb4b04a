"""What JSON would take is counted before it is read, and never too much of it."""

import json

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.errors import InvalidRequest
from serving.gateway import bounded_json
from serving.gateway.bounded_json import (
    CONTAINER_BYTES,
    MAX_DEPTH,
    MAX_KEYS,
    TEXT_BYTES,
    VALUE_BYTES,
    JsonRoom,
    read_json,
)

texts = st.text('ab"\\[]{},: \né🙂')
values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | texts,
    lambda inner: st.lists(inner) | st.dictionaries(texts, inner),
)


def weight(value):
    """By hand."""
    match value:
        case str():
            return TEXT_BYTES
        case list():
            return CONTAINER_BYTES + VALUE_BYTES * max(0, len(value) - 1) + sum(map(weight, value))
        case dict():
            keys_and_commas = TEXT_BYTES * len(value) + VALUE_BYTES * max(0, len(value) - 1)
            return CONTAINER_BYTES + keys_and_commas + sum(map(weight, value.values()))
        case _:
            return 0


@given(value=values, ascii_only=st.booleans(), piece=st.integers(1, 40))
def test_what_fits_is_read_and_one_byte_less_room_refuses_it(value, ascii_only, piece):
    data = json.dumps(value, ensure_ascii=ascii_only).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounded_json, "PIECE", piece)
        assert JsonRoom(weight(value)).read(data) == value
        if weight(value):
            with pytest.raises(InvalidRequest, match="too many values"):
                JsonRoom(weight(value) - 1).read(data)


def test_many_small_ones_share_the_room():
    room = JsonRoom(3 * CONTAINER_BYTES)
    for _ in range(3):
        assert room.read("[]") == []
    with pytest.raises(InvalidRequest, match="too many values"):
        room.read("[]")


@pytest.mark.parametrize("text", ["[" * MAX_DEPTH + "]" * MAX_DEPTH, '{"a":' * MAX_DEPTH + "1" + "}" * MAX_DEPTH])
def test_depth_has_an_end(text):
    assert read_json(text) == orjson.loads(text)
    with pytest.raises(InvalidRequest, match=f"more than {MAX_DEPTH} deep"):
        read_json(f"[{text}]")


def test_an_object_has_a_largest_number_of_keys():
    assert len(read_json(orjson.dumps(dict.fromkeys(map(str, range(MAX_KEYS)))))) == MAX_KEYS
    with pytest.raises(InvalidRequest, match="10,000 keys, one has 10,001"):
        read_json(b'{"":[{%s}]}' % b",".join(b'"%x":0' % key for key in range(MAX_KEYS + 1)))


def test_a_long_text_may_talk_of_millions_of_values():
    text = '[{"a": [0, 1]}, \\"' * 400_000
    assert read_json(orjson.dumps({"prompt": text})) == {"prompt": text}
