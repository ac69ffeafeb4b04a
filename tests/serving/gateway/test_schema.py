"""From a body to a request, where no answer would show the difference."""

import pytest

from serving.gateway.schema import parse_chat, parse_completion
from serving.request import Priority


@pytest.mark.parametrize(
    ("fields", "priority"),
    [
        ({}, Priority.INTERACTIVE),
        ({"priority": None}, Priority.INTERACTIVE),
        ({"priority": "interactive"}, Priority.INTERACTIVE),
        ({"priority": "batch"}, Priority.BATCH),
    ],
)
def test_priority_names_the_band(fields, priority):
    completion = parse_completion({"model": "x", "prompt": "a", **fields})
    chat = parse_chat({"model": "x", "messages": [{"role": "user", "content": "a"}], **fields})
    assert completion.to_request("1").priority == chat.to_request("2").priority == priority
