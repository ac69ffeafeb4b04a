"""Embeddings: pooled hidden states of Hugging Face transformers, whatever chunks, neighbours, cache and preemption."""

import dataclasses

import jax
import numpy as np
import pytest

from kv.page_pool import PagePool
from model.card import GenerationDefaults, ModelCard, TextAssets
from model.convert import convert
from model.hf_folder import read_hf_folder
from serving.config import EngineConfig
from serving.engine.build import TILE_TOKENS, make_programs
from serving.engine.engine import Engine
from serving.engine.loaded_model import LoadedModel
from serving.engine.plan import Limits
from serving.engine.pooling import Pooling
from serving.request import SamplingParams
from sharding.mesh import make_mesh
from sharding.params import abstract_params
from sharding.rules import choose_rules
from sharding.spec import MeshSpec
from tests.engines import MAX_SEQ_LEN, PAGE_SIZE, request
from tests.model_files import LLAMA3

pytestmark = pytest.mark.slow
GOLDEN = np.load(LLAMA3 / "logits.npz")
POOLED = np.load(LLAMA3 / "pooled.npz")
ONE = SamplingParams(temperature=0.0, max_tokens=1)
REQUESTS = [request(i, GOLDEN[f"prompt_{i}"].tolist(), ONE, embed=True) for i in range(3)]
PLAIN = request("plain", GOLDEN["prompt_2"].tolist(), SamplingParams(temperature=0.0, max_tokens=20))


@pytest.fixture(scope="module")
def programs():
    config = EngineConfig(
        "none", num_slots=2, page_size=PAGE_SIZE, num_pages=64, chunk_tokens=TILE_TOKENS, max_seq_len=MAX_SEQ_LEN,
        decode_steps=1, embeddings="mean",
    )  # fmt: skip
    foreign, spec = read_hf_folder(LLAMA3), MeshSpec()
    mesh, rules = make_mesh(spec), choose_rules(foreign.config, spec)
    abstract = abstract_params(foreign.config, mesh, rules, "float32")
    weights = jax.tree.map(lambda x, a: jax.device_put(x, a.sharding), convert(foreign), abstract)
    card = ModelCard("tiny", foreign.config, TextAssets("{}"), GenerationDefaults(()), "golden")
    return make_programs(config, LoadedModel(card, mesh, rules, "float32", weights), None, lambda _: None)


def embeddings_of(programs, requests, *, num_pages=64, **changes):
    """By request id; each comes once, before the end."""
    settings = {"overlap": True, "prefix_cache": True, **changes}
    limits = Limits(PAGE_SIZE, TILE_TOKENS, 1)
    engine = Engine(
        programs, PagePool(num_pages + 1), limits, eos_token_ids=(), max_seq_len=MAX_SEQ_LEN, max_waiting=99,
        draw_seed=lambda bits: 0, trip_s=0.001, **settings,
    )  # fmt: skip
    for asked in requests:
        engine.submit(asked)
    told, ended = {}, set()
    while engine.has_work:
        for output in engine.step():
            if output.embedding:
                assert output.request_id not in told and output.request_id not in ended
                told[output.request_id] = np.frombuffer(output.embedding, "<f4")
            if output.finish_reason:
                ended.add(output.request_id)
        engine.check_integrity()
    return told, engine


@pytest.fixture(scope="module", params=Pooling)
def pooling(request):
    return request.param


@pytest.fixture(scope="module")
def alone(programs, pooling):
    return {r.request_id: embeddings_of(programs, [r], pooling=pooling)[0][r.request_id] for r in REQUESTS}


def test_they_are_the_pooled_hidden_states_of_transformers(alone, pooling):
    for i in range(3):
        pooled = POOLED[f"{pooling}_{i}"]
        assert np.linalg.norm(alone[str(i)]) == pytest.approx(1, abs=1e-6)
        np.testing.assert_allclose(alone[str(i)], pooled / np.linalg.norm(pooled), atol=2e-6)


@pytest.mark.parametrize("changes", [{}, {"overlap": False}, {"prefix_cache": False}], ids=str)
def test_beside_others_and_behind_cached_pages_they_are_the_same(programs, alone, pooling, changes):
    again = dataclasses.replace(REQUESTS[2], request_id="again")
    told, _ = embeddings_of(programs, [PLAIN, REQUESTS[2], *REQUESTS[:2], again], pooling=pooling, **changes)
    assert told.keys() == {"0", "1", "2", "again"}
    for name, vector in told.items():
        np.testing.assert_allclose(vector, alone["2" if name == "again" else name], atol=1e-6)


def test_preemption_counts_no_token_twice(programs, alone, pooling):
    """The plain answer grows into the last pages while the other's prompt is half read."""
    crowd = [dataclasses.replace(PLAIN, request_id=f"p{i}", sampling=SamplingParams(temperature=0.0, max_tokens=60))
             for i in range(2)]  # fmt: skip
    told, engine = embeddings_of(programs, [*crowd, REQUESTS[2]], num_pages=40, pooling=pooling)
    assert engine.stats.num_preemptions
    np.testing.assert_allclose(told["2"], alone["2"], atol=1e-6)
