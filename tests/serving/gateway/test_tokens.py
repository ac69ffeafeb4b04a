"""/tokenize and /detokenize, and that they agree with usage."""

import pytest

from tests.fakes import FAKE_NAME

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
