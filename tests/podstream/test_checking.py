"""What `podstream check` is asked, before anything is compiled."""

import pytest

from model.errors import PodstreamError
from podstream.checking import choose

NOTHING = {"mesh": None, "quantize": None, "slots": None}


def test_a_deployment_by_its_name():
    assert choose("llama-3.1-8b-v6e-1", None, NOTHING).slice.name == "v6e-1"


def test_a_model_on_a_slice_with_changes():
    found = choose("llama-3.1-8b", "v5e-4", {**NOTHING, "quantize": "int8", "slots": 32})
    assert (found.settings.quantize, found.settings.slots, found.mesh.tensor) == ("int8", 32, 4)


@pytest.mark.parametrize(
    ("what", "slice_name", "changes", "sentence"),
    [
        ("llama-3.1-8b", None, {}, "llama-3.1-8b is a model: say on which slice, such as --slice v6e-8."),
        ("llama-3.1-8b-v6e1", None, {}, "is neither a deployment nor a model; did you mean 'llama-3.1-8b-v6e-1'?"),
        ("llama-3.1-8b", "v6e-3", {}, "slice 'v6e-3' is not known; did you mean 'v6e-"),
        ("llama-31-8b", "v6e-1", {}, "model 'llama-31-8b' is not known; did you mean 'llama-3.1-8b'?"),
        ("llama-3.1-8b-v6e-1", None, {"slots": 3}, "slots of a deployment stand in its file; give a model and --slice"),
        ("llama-3.1-8b", "v6e-4", {"mesh": "data=1,tensor=3"}, "needs 3 devices, which do not divide the 4 of slice"),
        ("llama-3.1-8b", "v6e-4", {"quantize": "int3"}, "quantisation 'int3' is not known"),
    ],
)
def test_what_cannot_be_checked_is_one_sentence(what, slice_name, changes, sentence):
    with pytest.raises(PodstreamError) as error:
        choose(what, slice_name, {**NOTHING, **changes})
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)
