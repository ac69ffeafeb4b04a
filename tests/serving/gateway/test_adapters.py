"""Adapters over HTTP: asked for as models, listed beside their base, loaded and unloaded while answers are written."""

import asyncio
import time

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from serving.config import EngineConfig
from tests.fakes import FAKE_NAME, FakeEngineLoop, echo
from tests.services import running_app, running_gateway, running_replica, until

CONFIG = EngineConfig("nowhere", loras=("first=/1",), max_loras=2)
FIRST, SECOND = (echo("abcdef" * 2, 12)[place : place + 6] for place in (1, 2))


@pytest.fixture
def engine():
    return FakeEngineLoop(num_adapters=2)


@pytest.fixture(scope="module")
def service():
    return {"config": CONFIG}


async def ask(http, model, **fields):
    body = {"model": model, "prompt": "abcdef", "max_tokens": 6, **fields}
    return await http.post("/v1/completions", json=body)


async def load(http, name, path="/2"):
    return await http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path})


async def unload(http, name):
    return await http.post("/v1/unload_lora_adapter", json={"lora_name": name})


async def listed(http):
    return [(row["id"], row["parent"], row["root"]) for row in (await http.get("/v1/models")).json()["data"]]


async def test_an_adapter_is_a_model_with_a_parent(gateway):
    """With the official client."""
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        assert (await load(gateway.http, "org/second")).status_code == 200
        models = [model async for model in client.models.list()]
        assert [(model.id, model.parent) for model in models] == [
            (FAKE_NAME, None),
            ("first", FAKE_NAME),
            ("org/second", FAKE_NAME),
        ]
        assert await client.models.retrieve("org/second") == models[2]
        answers = [await client.completions.create(model=model.id, prompt="abcdef", max_tokens=6) for model in models]
        assert [(answer.model, answer.choices[0].text) for answer in answers] == [
            (FAKE_NAME, "abcdef"),
            ("first", FIRST),
            ("org/second", SECOND),
        ]
        assert (await unload(gateway.http, "org/second")).status_code == 200
        with pytest.raises(openai.NotFoundError, match="'org/second' is not served here, 'echo', 'first' are"):
            await client.completions.create(model="org/second", prompt="abcdef")


@pytest.mark.parametrize(
    ("name", "path", "status", "says"),
    [
        ("second", "/nowhere", 404, "there is no adapter at /nowhere"),
        ("first", "/2", 400, "the name 'first' is taken"),
        (FAKE_NAME, "/2", 400, "the name 'echo' is taken"),
        ("", "/2", 400, "lora_name"),
        ("second", None, 400, "lora_path"),
    ],
)
async def test_what_cannot_be_loaded_is_refused(own_http, name, path, status, says):
    refused = await load(own_http, name, path)
    assert (refused.status_code, says in refused.json()["error"]["message"]) == (status, True)
    assert await listed(own_http) == [(FAKE_NAME, None, FAKE_NAME), ("first", FAKE_NAME, "/1")]
    assert (await load(own_http, "second")).status_code == 200


async def test_a_name_that_is_not_loaded_cannot_be_unloaded(own_http):
    assert (await unload(own_http, "second")).status_code == 404
    assert (await unload(own_http, FAKE_NAME)).status_code == 404


async def test_answers_go_on_with_an_unloaded_adapter_and_its_place_is_free_when_they_end(own_http, engine):
    engine.go.clear()
    running = asyncio.create_task(ask(own_http, "first"))
    await until(lambda: engine._inbox.qsize() or engine._waiting)
    assert (await unload(own_http, "first")).status_code == 200
    assert (await ask(own_http, "first")).status_code == 404
    engine.go.set()
    assert (await running).json()["choices"][0]["text"] == FIRST
    for name in ("second", "third"):
        assert (await load(own_http, name)).status_code == 200
    assert (await load(own_http, "fourth")).json()["error"]["message"].startswith("all 2 places for adapters are taken")


async def test_several_answers_and_other_endpoints_take_an_adapter(own_http):
    several = (await ask(own_http, "first", n=2, temperature=0)).json()["choices"]
    assert [choice["text"] for choice in several] == [FIRST, FIRST]
    chat = {"model": "first", "messages": [{"role": "user", "content": "abcdef"}], "max_tokens": 6}
    assert (await own_http.post("/v1/chat/completions", json=chat)).json()["choices"][0]["message"]["content"] == FIRST
    assert (await own_http.post("/tokenize", json={"model": "first", "prompt": "ab"})).json()["tokens"] == [97, 98]


async def test_without_room_for_more_the_adapters_are_fixed(engine):
    fixed = EngineConfig("nowhere", loras=CONFIG.loras)
    async with running_replica(engine, config=fixed) as replica, running_app(replica.address) as http:
        assert (await ask(http, "first")).json()["choices"][0]["text"] == FIRST
        for refused in (await load(http, "second"), await unload(http, "first")):
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "lora_name")


async def test_routers_are_told_which_adapters_are_in_use_and_waited_for():
    """By vLLM's metric, of which the names are labels and the value a time."""

    async def told(http):
        text = (await http.get("/metrics")).text
        (family,) = [f for f in text_string_to_metric_families(text) if f.name == "vllm:lora_requests_info"]
        (sample,) = family.samples
        assert family.type == "gauge" and abs(sample.value - time.time()) < 60
        assert sample.labels.keys() == {"max_lora", "running_lora_adapters", "waiting_lora_adapters"}
        return tuple(sample.labels[name] for name in sorted(sample.labels))

    engine = FakeEngineLoop(num_adapters=2, num_slots=1, step_delay_s=0.002)
    async with running_replica(engine, config=CONFIG) as replica, running_app(replica.address) as http:
        assert await told(http) == ("2", "", "")
        await load(http, "second")
        asked = [asyncio.create_task(ask(http, "first", max_tokens=400))]
        await until(lambda: engine.num_tokens_made)
        asked += [asyncio.create_task(ask(http, name)) for name in ("second", "first")]
        await until(lambda: len(engine._waiting) == 2)
        num_tokens = engine.num_tokens_made
        await until(lambda: engine.num_tokens_made > num_tokens + 1)
        assert await told(http) == ("2", "first", "first,second")
        asked[0].cancel()
        await asyncio.wait(asked)
        assert await told(http) == ("2", "", "")


async def test_a_replica_that_comes_back_has_the_adapters_of_its_start(engine):
    """Those that were loaded since are refused by name."""
    async with running_replica(engine, config=CONFIG) as replica, running_gateway(replica.address) as gateway:
        address = replica.address
        assert (await load(gateway.http, "second")).status_code == 200
        await replica.server.stop(0)
        async with running_replica(FakeEngineLoop(num_adapters=2), config=CONFIG, address=address):
            await until(lambda: gateway.client.ready and len(gateway.client.status.adapters) == 1)
            assert (await ask(gateway.http, "first")).json()["choices"][0]["text"] == FIRST
            assert (await ask(gateway.http, "second")).status_code == 404
