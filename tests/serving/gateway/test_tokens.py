"""/tokenize and /detokenize, and that they agree with usage."""

import pytest

from serving.config import EngineConfig
from tests.fakes import END_ID, END_TEXT, FAKE_NAME
from tests.services import running_app, running_replica

MESSAGES = [{"role": "user", "content": "hé"}]


async def test_a_prompt_becomes_tokens_and_text_again(http, shared):
    told = (await http.post("/tokenize", json={"prompt": "hé", "return_token_strs": True})).json()
    assert told == {"count": 3, "max_model_len": shared.engine.max_seq_len, "tokens": [104, 195, 169],
                    "token_strs": ["h", "\ufffd", "\ufffd"]}  # fmt: skip
    assert (await http.post("/detokenize", json={"tokens": told["tokens"]})).json() == {"prompt": "hé"}


async def test_counts_agree_with_usage(http):
    told = (await http.post("/tokenize", json={"model": FAKE_NAME, "messages": MESSAGES})).json()
    asked = {"model": FAKE_NAME, "messages": MESSAGES, "max_tokens": 1}
    usage = (await http.post("/v1/chat/completions", json=asked)).json()["usage"]
    assert told["count"] == usage["prompt_tokens"] == 3


@pytest.mark.parametrize("control_tokens", [False, True])
async def test_what_people_write_is_text_also_where_it_spells_a_control_token(control_tokens):
    """But in the prompt of a completion, which is the model's own language; and with the flag everywhere."""
    config = EngineConfig("nowhere", control_tokens=control_tokens)
    messages = [{"role": "user", "content": f"a{END_TEXT}"}]
    async with running_replica(config=config) as replica, running_app(replica.address) as http:
        chat, raw = [
            (await http.post("/tokenize", json=body)).json()["tokens"]
            for body in ({"messages": messages}, {"prompt": f"a{END_TEXT}"})
        ]
    assert raw == [ord("a"), END_ID]
    assert chat == (raw if control_tokens else list(f"a{END_TEXT}".encode()))


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/tokenize", {}, 400, "either prompt or messages"),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, 400, "either prompt or messages"),
        ("/tokenize", {"prompt": "x", "model": "gpt-9"}, 404, "'gpt-9'"),
        ("/tokenize", {"prompt": "x", "other": 1}, 400, "'other'"),
        ("/detokenize", {"tokens": [999]}, 400, "vocabulary of 257"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": "x"}, 400, "tokens"),
    ],
)
async def test_refusals(http, path, body, status, words):
    response = await http.post(path, json=body)
    assert response.status_code == status
    assert words in response.json()["error"]["message"]
