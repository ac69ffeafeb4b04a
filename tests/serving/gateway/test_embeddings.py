"""/v1/embeddings, as OpenAI's clients ask for them."""

import asyncio
import base64

import numpy as np
import openai
import pytest

from tests.fakes import FAKE_NAME, FakeEngineLoop
from tests.services import EngineConfig, running_app, running_gateway, running_replica, until

PATH = "/v1/embeddings"
EVEN, ODD = [0.6, 0.0, 0.8], [0.8, 0.0, -0.6]
CONFIG = EngineConfig("nowhere", embeddings="mean")


@pytest.fixture(scope="module")
def service():
    return {"config": CONFIG}


def body(given="ab", **fields):
    return {"model": FAKE_NAME, "input": given, **fields}


async def vectors(http, given, **fields):
    answer = (await http.post(PATH, json=body(given, **fields))).json()
    assert [row["index"] for row in answer["data"]] == [*range(len(answer["data"]))]
    assert (answer["object"], answer["model"]) == ("list", FAKE_NAME)
    return [row["embedding"] for row in answer["data"]], answer["usage"]


@pytest.mark.parametrize(
    ("given", "expected", "tokens"),
    [
        ("ab", [EVEN], 2),
        (["ab", "abc"], [EVEN, ODD], 5),
        ([1, 2, 3], [ODD], 3),
        ([[1, 2], [3]], [EVEN, ODD], 3),
        (["a"] * 30 + ["ab"], [ODD] * 30 + [EVEN], 32),
    ],
)
async def test_each_input_has_its_vector_and_tokens_are_counted(http, given, expected, tokens):
    found, usage = await vectors(http, given)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert usage == {"prompt_tokens": tokens, "total_tokens": tokens}


async def test_base64_is_of_little_endian_float32(http):
    (shown,), _ = await vectors(http, "ab", encoding_format="base64")
    np.testing.assert_allclose(np.frombuffer(base64.b64decode(shown), "<f4"), EVEN, atol=1e-6)


async def test_dimensions_are_the_first_ones_brought_to_length_1(http):
    (cut,), _ = await vectors(http, "ab", dimensions=2)
    assert cut == pytest.approx([1.0, 0.0])
    (whole,), _ = await vectors(http, "ab", dimensions=3)
    assert whole == pytest.approx(EVEN)


REFUSED = [
    ({"dimensions": 4}, "dimensions", "3 at most"),
    ({"dimensions": 0}, "dimensions", "greater than or equal to 1"),
    ({"encoding_format": "int8"}, "encoding_format", "'float' or 'base64'"),
    ({"input": ""}, "input", "empty"),
    ({"input": []}, "input", "one or more"),
    ({"input": [[]]}, "input", "empty"),
    ({"input": ["a", 3]}, "input", "neither"),
    ({"input": {"a": 1}}, "input", "must be a text"),
    ({"input": [257]}, "input", "outside the vocabulary"),
    ({"input": [2**80]}, "input", "neither"),
    ({"input": "x" * 600}, "input", "context holds 512"),
    ({"input": ["a"] * 2049}, "input", "at most 2,048 inputs, got 2,049"),
    ({"stream": True}, "stream", "not known"),
]


async def test_refusals(http):
    for fields, param, words in REFUSED:
        response = await http.post(PATH, json=body(**fields))
        assert response.status_code == 400, (fields, response.text)
        error = response.json()["error"]
        assert words in error["message"] and error["param"] in (param, None), error


async def test_an_unknown_model(http):
    assert (await http.post(PATH, json=body(model="gpt-9"))).status_code == 404


async def test_without_the_flag_it_is_refused_in_a_sentence():
    async with running_replica() as replica, running_app(replica.address) as http:
        response = await http.post(PATH, json=body())
    assert response.status_code == 400
    assert "--embeddings mean or last" in response.json()["error"]["message"]


async def test_the_official_client_with_its_defaults(shared_gateway):
    """It asks for base64 and decodes it itself."""
    async with openai.AsyncOpenAI(base_url=f"{shared_gateway.url}/v1", api_key="none", max_retries=0) as client:
        answer = await client.embeddings.create(model=FAKE_NAME, input=["ab", "abc"])
    assert [row.embedding for row in answer.data] == [pytest.approx(EVEN), pytest.approx(ODD)]
    assert answer.usage.prompt_tokens == 5


async def test_a_full_gateway_refuses_at_once_and_places_are_given_back():
    engine = FakeEngineLoop()
    async with (
        running_replica(engine, config=CONFIG) as replica,
        running_gateway(replica.address, max_queued=8) as gateway,
    ):
        engine.go.clear()
        call = asyncio.create_task(gateway.http.post(PATH, json=body(["a"] * 20)))
        await until(lambda: gateway.admission.num_in_flight == 8)
        refused = await gateway.http.post(PATH, json=body())
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        engine.go.set()
        assert (await call).status_code == 200
        assert gateway.admission.num_in_flight == 0


async def test_a_client_that_leaves_ends_the_work():
    engine = FakeEngineLoop()
    async with running_replica(engine, config=CONFIG) as replica, running_gateway(replica.address) as gateway:
        engine.go.clear()
        call = asyncio.create_task(gateway.http.post(PATH, json=body(["a"] * 100)))
        await until(lambda: gateway.client.num_in_flight == 8)
        call.cancel()
        await asyncio.wait([call])
        await until(lambda: gateway.admission.num_in_flight == gateway.client.num_in_flight == 0)
        engine.go.set()
    assert engine.num_tokens_made <= 16
