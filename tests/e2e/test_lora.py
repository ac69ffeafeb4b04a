"""An adapter for the real model comes and goes over HTTP, and the model itself answers as ever."""

import httpx
import openai
import pytest

from sharding.checkpoint import absolute, read_card
from tests.adapters import random_tensors, save_adapter

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

ASK = {"prompt": "The lighthouse keeper", "max_tokens": 12, "temperature": 0}


def answer(server, model):
    return server.client.completions.create(model=model, **ASK).choices[0].text


def test_an_adapter_comes_and_goes(server, demo_model, tmp_path):
    config = read_card(absolute(demo_model)).config
    path = save_adapter(tmp_path, random_tensors(config, seed=1, rank=4, targets=("q_proj", "down_proj")))
    url, base = f"{server.url}/v1", server.model
    before = answer(server, base)
    loaded = httpx.post(f"{url}/load_lora_adapter", json={"lora_name": "keeper", "lora_path": path}, timeout=60)
    assert (loaded.status_code, [model.id for model in server.client.models.list()]) == (200, [base, "keeper"])
    assert answer(server, "keeper") == answer(server, "keeper") != before == answer(server, base)
    assert httpx.post(f"{url}/unload_lora_adapter", json={"lora_name": "keeper"}).status_code == 200
    with pytest.raises(openai.NotFoundError, match="'keeper' is not served here"):
        answer(server, "keeper")
