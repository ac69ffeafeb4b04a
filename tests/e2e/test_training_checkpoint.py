"""What a training run in JAX left is served as it lies: `podstream serve PATH`, nothing converted, nothing imported."""

import jax
import jax.numpy as jnp
import pytest
import tokenizers

from model.attention import dense_attention
from model.convert import convert
from model.hf_folder import read_hf_folder
from serving.engine.tokenizer import Tokenizer
from sharding.params import bind
from tests.e2e.conftest import QUICKLY, serving
from tests.training_trees import hf_folder, maxtext_tree, model_files, save_v0_run, train_state

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
NUM_TOKENS, LENGTH = 8, 32
CUT = "\N{REPLACEMENT CHARACTER}"  # stands for a letter whose last bytes are missing
FLAGS = ("--slots", "1", "--chunk-tokens", "32", "--decode-steps", "1", "--max-seq-len", "64", "--pages", "8")


def test_a_maxtext_run_answers_as_the_import_of_the_same_weights(tmp_path):
    """The folder of a run with two steps, scanned layers and an optimizer; tokenizer and config lie beside it."""
    source = hf_folder(tmp_path / "source", "llama31")
    save_v0_run(tmp_path / "run", train_state(maxtext_tree(source, scanned=True)))
    model_files(tmp_path / "run", source)
    model = read_hf_folder(source)
    prompt = "the cat"
    with serving(tmp_path / "run", tmp_path / "compiled", *FLAGS, XLA_FLAGS=QUICKLY) as server:
        [choice] = server.client.completions.create(
            model=server.model, prompt=prompt, max_tokens=NUM_TOKENS, temperature=0,
            extra_body={"ignore_eos": True},
        ).choices  # fmt: skip
        source = server.client.models.retrieve(server.model).model_extra["source"]
        assert source == f"{tmp_path}/run/12/items", "the newest of its two steps"
    assert f"weights: {source}" in server.lines
    tokenizer = tokenizers.Tokenizer.from_str(model.text.tokenizer_json)
    answer = _answer(model, Tokenizer(model.text).encode(prompt))
    assert len({*answer}) > 1
    assert choice.text.rstrip(CUT) == tokenizer.decode(answer, skip_special_tokens=True).rstrip(CUT)


def _answer(model, tokens):
    """The most likely tokens one after another, by the dense decoder over the imported weights."""
    decoder = bind(model.config, jax.tree.map(jnp.asarray, convert(model)))
    positions = jnp.arange(LENGTH)
    logits = jax.jit(lambda row: decoder(row, positions, dense_attention(jnp.zeros_like(positions), positions))[0])
    answer = []
    while len(answer) < NUM_TOKENS:
        known = [*tokens, *answer]
        row = jnp.asarray([*known, *[0] * (LENGTH - len(known))])
        answer.append(int(jnp.argmax(logits(row)[len(known) - 1])))
    return answer
