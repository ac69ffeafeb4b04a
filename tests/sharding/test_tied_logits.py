"""Logits of MaxText's runs whose token vectors are the head, against MaxText's forward pass written out in NumPy."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from model.attention import dense_attention
from model.convert import convert
from model.errors import CheckpointError
from sharding.foreign import open_foreign
from sharding.params import bind
from tests.training_trees import gemma_tree, hf_folder, maxtext_tree, save_v1

TOKENS = np.asarray([3, 17, 4, 200, 9, 9])


def _norm(x, scale):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def _turned(x, theta=10_000.0):
    """[T, heads, H], rope over the two halves of a head."""
    half = x.shape[-1] // 2
    angles = np.arange(len(x))[:, None] / theta ** (np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def maxtext_logits(tree, *, normalize):
    """Of a Llama that MaxText trained: queries hold 1/sqrt(head_dim); `apply_output_head` divides at the end."""
    embedding, decoder = tree["token_embedder"]["embedding"].astype(np.float64), tree["decoder"]
    x = embedding[TOKENS]
    for layer in (decoder["layers_0"], decoder["layers_1"]):
        y, attention = _norm(x, layer["pre_self_attention_layer_norm"]["scale"]), layer["self_attention"]
        q, k, v = (np.einsum("td,dnh->tnh", y, attention[part]["kernel"]) for part in ("query", "key", "value"))
        q, k = _turned(q), _turned(k)
        k, v = (np.repeat(part, q.shape[1] // part.shape[1], axis=1) for part in (k, v))
        scores = np.where(np.tri(len(x), dtype=bool), np.einsum("tnh,snh->nts", q, k), -np.inf)
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        shares /= shares.sum(axis=-1, keepdims=True)
        x = x + np.einsum("nts,snh,nhd->td", shares, v, attention["out"]["kernel"])
        y, mlp = _norm(x, layer["post_self_attention_layer_norm"]["scale"]), layer["mlp"]
        gate = y @ mlp["wi_0"]["kernel"]
        x = x + (gate / (1 + np.exp(-gate)) * (y @ mlp["wi_1"]["kernel"])) @ mlp["wo"]["kernel"]
    logits = _norm(x, decoder["decoder_norm"]["scale"]) @ embedding.T
    return logits / np.sqrt(embedding.shape[1]) if normalize else logits


def _logits(model):
    positions = jnp.arange(len(TOKENS))
    decoder = bind(model.config, jax.tree.map(jnp.asarray, convert(model)))
    with jax.default_matmul_precision("highest"):
        return decoder(
            jnp.asarray(TOKENS), positions, dense_attention(jnp.zeros_like(positions), positions)
        )[0]  # fmt: skip


def _open(tmp_path, said=None):
    keys = tmp_path / "keys.toml"
    keys.write_text("" if said is None else f"[model]\nnormalize_embedding_logits = {said}\n")
    return open_foreign(epath.Path(tmp_path / "run"), str(tmp_path / "source"), str(keys))


@pytest.fixture
def tied(tmp_path):
    source = hf_folder(tmp_path / "source", "llama_tied")
    tree = maxtext_tree(source, scanned=False)
    save_v1(tmp_path / "run", tree)
    return tree["params"]


@pytest.mark.parametrize(("said", "normalize"), [(None, True), ("true", True), ("false", False)])
def test_a_tied_run_of_maxtext_gives_maxtexts_logits(tmp_path, tied, said, normalize):
    """Divided by the root of the width unless `[model]` says otherwise, as MaxText's own configs have it."""
    expected = maxtext_logits(tied, normalize=normalize)
    np.testing.assert_allclose(_logits(_open(tmp_path, said)), expected, rtol=2e-4, atol=2e-5)


def test_what_is_taken_for_granted_is_said(tmp_path, tied, caplog):
    with caplog.at_level(logging.WARNING):
        _open(tmp_path)
        assert "divided by the root of the width, 32" in caplog.text
        caplog.clear()
        _open(tmp_path, "true")
        assert caplog.text == ""


def test_the_field_is_true_or_false(tmp_path, tied):
    with pytest.raises(CheckpointError, match="normalize_embedding_logits must be true or false, got 'no'"):
        _open(tmp_path, '"no"')


@pytest.mark.parametrize(("said", "scale"), [(None, 1.0), ("true", 1.0), ("false", 32**0.5)])
def test_gemma_in_maxtext_has_the_root_in_its_token_vectors(tmp_path, said, scale):
    """So with normalised logits, MaxText's default, its logits are those of its authors."""
    source = hf_folder(tmp_path / "source", "gemma3_text")
    save_v1(tmp_path / "run", maxtext_tree(source, scanned=True))
    assert _open(tmp_path, said).config.logits_scale == pytest.approx(scale, rel=1e-12)


@pytest.mark.parametrize(("said", "scale"), [(None, 1.0), ("true", 32**-0.5), ("false", 1.0)])
def test_other_layouts_divide_only_if_told(tmp_path, said, scale):
    source = hf_folder(tmp_path / "source", "gemma3_text")
    save_v1(tmp_path / "run", gemma_tree(source, published=False))
    assert _open(tmp_path, said).config.logits_scale == pytest.approx(scale, rel=1e-12)


def test_a_run_with_a_head_of_its_own_divides_nothing(tmp_path):
    source = hf_folder(tmp_path / "source", "llama")
    save_v1(tmp_path / "run", maxtext_tree(source, scanned=True))
    assert _open(tmp_path, "true").config.logits_scale == 1.0
