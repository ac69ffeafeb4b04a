"""Checkpoints of training runs, read as they lie, against the Hugging Face import of the same weights."""

import dataclasses
import json
import os
import shutil

import jax
import numpy as np
import pytest
import tensorstore as ts
from etils import epath
from orbax.checkpoint import v1

from model.convert import convert
from model.errors import CheckpointError, PodstreamError
from model.hf_folder import read_hf_folder
from model.tree import as_tree, put
from sharding.foreign import foreign_leaves, open_foreign
from sharding.manifest import Manifest
from sharding.mesh import make_mesh
from sharding.orbax_tree import OrbaxTree
from sharding.params import abstract_params
from sharding.rules import choose_rules
from sharding.spec import MeshSpec
from tests.model_files import write_tiny_gguf
from tests.training_trees import (
    FAMILIES,
    gemma_tree,
    hf_folder,
    maxtext_tree,
    model_files,
    save_v0,
    save_v0_files,
    save_v0_run,
    save_v1,
    train_state,
)  # fmt: skip


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A Hugging Face folder of each family."""
    root = tmp_path_factory.mktemp("sources")
    return {name: hf_folder(root / name, name, seed) for seed, name in enumerate(FAMILIES)}


def open_run(path, source):
    return open_foreign(epath.Path(path), str(source))


def meaning(model):
    """The parameters, with what the config would do to them done: so that two ways to say the same are equal."""
    config, params = model.config, convert(model)
    qkv = params["layers"]["attention"]["qkv"].copy()
    qkv[..., :-2, :] /= np.sqrt(np.float32(config.query_scale or config.head_dim)) if not config.qk_norm else 1
    put(params, ("layers", "attention", "qkv"), qkv)
    shifted = jax.tree.map_with_path(
        lambda path, leaf: leaf + np.float32(config.norm_offset) if path[-1].key == "scale" else leaf, params
    )
    plain = dataclasses.replace(config, norm_offset=0.0, query_scale=config.query_scale if config.qk_norm else None)
    return plain, shifted


def assert_same_model(found, expected):
    (config, params), (wanted_config, wanted) = meaning(found), meaning(expected)
    assert config == wanted_config
    assert jax.tree.structure(params) == jax.tree.structure(wanted)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=3e-7, atol=1e-8), params, wanted)
    assert (found.text, found.generation) == (expected.text, expected.generation)


@pytest.mark.parametrize(
    ("name", "scanned", "save"),
    [
        ("llama", True, save_v0_run),
        ("llama31", False, save_v1),
        ("llama31", True, save_v0),
        ("mistral", False, save_v0_files),
        ("mixtral", True, save_v1),
        ("mixtral", False, save_v0_files),
        ("qwen2", True, save_v0_files),
        ("qwen3", False, save_v0),
        ("qwen3_moe", True, save_v0_files),
        ("gemma2", True, save_v1),
        ("gemma2", False, save_v0_files),
        ("gemma3_text", True, save_v0),
        ("gemma3_text", False, save_v0_files),
    ],
)
def test_maxtext(sources, tmp_path, name, scanned, save):
    """Each of Orbax's formats; as a run leaves it, with an optimizer, but where there would be many files."""
    tree = maxtext_tree(sources[name], scanned=scanned)
    save(tmp_path / "run", tree if save is save_v0_files else train_state(tree))
    keys = tmp_path / "keys.toml"  # Hugging Face never divides logits, as MaxText would where they are tied
    keys.write_text("[model]\nnormalize_embedding_logits = false\n" if name == "qwen2" else "")
    found = open_foreign(epath.Path(tmp_path / "run"), str(sources[name]), str(keys))
    assert_same_model(found, read_hf_folder(sources[name]))


@pytest.mark.parametrize("name", ["gemma2", "gemma3_text"])
@pytest.mark.parametrize("published", [True, False], ids=["published", "nested"])
def test_the_gemma_library(sources, tmp_path, name, published):
    save = save_v0_files if published else save_v1
    tree = gemma_tree(sources[name], published=published)
    save(tmp_path / "run", tree if published else train_state(tree))
    assert_same_model(open_run(tmp_path / "run", sources[name]), read_hf_folder(sources[name]))


TABLE = """
[model]
model_type = "llama"
max_position_embeddings = 256
rms_norm_eps = 1e-6
eos_token_id = 1

[tensors]
embed = ["wte", "V D"]
head = ["lm_head", "D V"]
final_norm = ["ln_f.g", "D"]
attention_norm = ["h_{layer}.ln_1.g", "D"]
q = {name = "h_{layer}/q", axes = "N D H", times = 0.5}
kv = ["h_{layer}.kv", "C K D H"]
out = ["h_{layer}.out", "NH D"]
mlp_norm = ["norms", "L D"]
gate_up = ["gates", "L C F D"]
down = ["h_{layer}.down", "D F"]
"""


def _own_tree(source):
    tree = maxtext_tree(source, scanned=False)["params"]
    layers = [tree["decoder"][f"layers_{layer}"] for layer in range(2)]
    attention = [layer["self_attention"] for layer in layers]
    own = {
        f"h_{number}": {
            "ln_1": {"g": layer["pre_self_attention_layer_norm"]["scale"]},
            "q": attention[number]["query"]["kernel"].transpose(1, 0, 2) * 8,  # of which a quarter is MaxText's
            "kv": np.stack([attention[number][part]["kernel"].transpose(1, 0, 2) for part in ("key", "value")]),
            "out": attention[number]["out"]["kernel"].reshape(64, 32),
            "down": layer["mlp"]["wo"]["kernel"].T,
        }
        for number, layer in enumerate(layers)
    }
    gates = np.stack([np.stack([layer["mlp"][part]["kernel"].T for part in ("wi_0", "wi_1")]) for layer in layers])
    return {
        "wte": tree["token_embedder"]["embedding"],
        "lm_head": tree["decoder"]["logits_dense"]["kernel"],
        "ln_f": {"g": tree["decoder"]["decoder_norm"]["scale"]},
        "norms": np.stack([layer["post_self_attention_layer_norm"]["scale"] for layer in layers]),
        "gates": gates,
        **own,
    }


def test_any_tree_with_a_key_table_beside_it_and_no_config(sources, tmp_path):
    """Sizes are told by shapes; what shapes do not tell stands in the table."""
    save_v1(tmp_path / "run", train_state(_own_tree(sources["llama"])))
    model_files(tmp_path / "run", sources["llama"])
    (tmp_path / "run/config.json").unlink()
    (tmp_path / "run/podstream.toml").write_text(TABLE)
    assert_same_model(open_foreign(epath.Path(tmp_path / "run")), read_hf_folder(sources["llama"]))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("embed =", "embedding ="), "'embedding' is not one of embed, head"),
        (('"N D H"', '"N D"'), "q has dimensions D N H, but h_{layer}.q has N D"),
        (('"V D"', '"W D"'), "axis 'W' is not one of"),
        (("[model]", "[modle]"), "'modle' is not one of layout, model, prefix, tensors"),
        (('["wte", "V D"]', "3"), 'tensor embed must read like ["its.name", "D F"]'),
        (("[model]", "[model"), "is not a TOML file"),
        (('q = {name = "h_{layer}/q"', 'q = {name = "h_{layer}/query"'), "tensor h_0.query is missing"),
    ],
)
def test_a_key_table_that_is_wrong_is_refused(sources, tmp_path, own_run, change, words):
    table = tmp_path / "table.toml"
    table.write_text(TABLE.replace(*change))
    with pytest.raises(CheckpointError) as caught:
        open_foreign(epath.Path(own_run), str(sources["llama"]), str(table))
    assert words in str(caught.value)


@pytest.fixture(scope="module")
def own_run(sources, tmp_path_factory):
    path = tmp_path_factory.mktemp("own") / "run"
    save_v1(path, _own_tree(sources["llama"]))
    return path


@pytest.fixture(scope="module")
def maxtext_run(sources, tmp_path_factory):
    path = tmp_path_factory.mktemp("maxtext") / "run"
    save_v0(path, train_state(maxtext_tree(sources["llama"], scanned=True)))
    return path


def _abstract(model, tensor=4, dtype="float32"):
    spec = MeshSpec(tensor=tensor)
    return abstract_params(model.config, make_mesh(spec), choose_rules(model.config, spec), dtype)


def _bytes_read():
    [metric] = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return metric["values"][0]["value"]


def test_straight_onto_a_mesh_and_the_optimizer_is_not_read(sources, tmp_path):
    moments = np.random.default_rng(0).normal(size=(512, 1024)).astype(np.float32)
    state = train_state(maxtext_tree(sources["llama"], scanned=True))
    save_v0(tmp_path / "run", {**state, "opt_state": {"mu": state["params"], "nu": moments}})
    before, reports = _bytes_read(), []
    model = open_run(tmp_path / "run", sources["llama"])
    params = as_tree(foreign_leaves(model, _abstract(model), lambda done, total: reports.append((done, total))))
    assert 0 < _bytes_read() - before < moments.nbytes / 2
    jax.tree.map(np.testing.assert_array_equal, params, convert(model))
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: a.sharding == b.sharding, params, _abstract(model))))
    assert reports[-1] == (total := sum(leaf.nbytes for leaf in jax.tree.leaves(params)), total)


def test_a_device_reads_its_own_chunks(tmp_path):
    """Chunks are smaller than parts here, as where a run on a mesh has written them."""
    numbers = np.random.default_rng(0).normal(size=(512, 1024)).astype(np.float32)
    context = v1.Context()
    context.array.saving.storage_options.chunk_byte_size = 128 << 10
    with context:
        v1.save(tmp_path / "run", {"a": jax.numpy.asarray(numbers)})
    tree = OrbaxTree.open(epath.Path(tmp_path / "run" / "state"))
    before = _bytes_read()
    half = tree.tensors["a"].region((slice(256, 512), slice(0, 1024)))
    np.testing.assert_array_equal(half, numbers[256:])
    assert 0.4 * numbers.nbytes < _bytes_read() - before < 0.6 * numbers.nbytes


def test_an_own_head_is_used_though_the_config_ties_it_and_a_copy_stays_tied(sources, tmp_path):
    files, tree = model_files(tmp_path / "files", sources["llama"]), maxtext_tree(sources["llama"], scanned=True)
    config = json.loads((files / "config.json").read_text()) | {"tie_word_embeddings": True}
    (files / "config.json").write_text(json.dumps(config))
    save_v1(tmp_path / "own", tree)
    assert_same_model(open_run(tmp_path / "own", files), read_hf_folder(sources["llama"]))
    tree["params"]["decoder"]["logits_dense"]["kernel"] = tree["params"]["token_embedder"]["embedding"].T
    save_v1(tmp_path / "copy", tree)
    assert open_run(tmp_path / "copy", files).config.tie_embeddings


def test_more_rows_for_tokens_than_tokens_are_padding(sources, tmp_path):
    save_v1(tmp_path / "run", maxtext_tree(sources["gemma2"], scanned=True, extra_rows=32))
    assert_same_model(open_run(tmp_path / "run", sources["gemma2"]), read_hf_folder(sources["gemma2"]))


@pytest.fixture(scope="module")
def whole(sources, tmp_path_factory):
    """A folder for each array, so that single ones can be spoilt."""
    path = tmp_path_factory.mktemp("whole") / "run"
    save_v0_files(path, maxtext_tree(sources["llama"], scanned=True))
    return path


@pytest.fixture
def copy(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "run")


def _with_header(array, **changes):
    header = json.loads((array / ".zarray").read_text())
    (array / ".zarray").write_text(json.dumps(header | changes))


def _with_nan(array):
    opened = ts.open({"driver": "zarr", "kvstore": f"file://{array}/"}, open=True).result()
    opened[0, 0, 5].write(np.nan).result()


WI = "decoder.layers.mlp.wi_0.kernel"


@pytest.mark.parametrize(
    ("name", "spoil", "words"),
    [
        (WI, shutil.rmtree, f"tensor {WI} is missing"),
        ("decoder.logits_dense.kernel", shutil.rmtree, "tensor decoder.logits_dense.kernel is missing"),
        (
            WI,
            lambda array: shutil.copytree(array, array.with_suffix(".twin")),
            "tensor decoder.layers.mlp.wi_0.twin is unexp",
        ),
        (WI, lambda array: _with_header(array, shape=[32, 2, 47]), f"tensor {WI} has shape [32, 2, 47], expected"),
        (WI, lambda array: _with_header(array, dtype="<i4"), f"tensor {WI} has type int32, which is not supported"),
        (WI, _with_nan, f"tensor {WI} holds 1 numbers of 3,072 that are NaN"),
        (WI, lambda array: (array / "0.0.0").unlink(), f"tensor params.{WI} has 0 of 1 chunks"),
        (WI, lambda array: os.truncate(array / "0.0.0", 99), f"tensor params.{WI} is cut or corrupt"),
        (WI, lambda array: os.truncate(array / ".zarray", 9), "is damaged"),
    ],
    ids=["missing", "untied-without-head", "extra", "shape", "dtype", "nan", "chunk", "cut", "header"],
)
def test_what_does_not_fit_is_refused_with_its_name(sources, copy, name, spoil, words):
    spoil(copy / f"params.{name}")
    with pytest.raises(PodstreamError) as caught:
        convert(open_run(copy, sources["llama"]))
    assert words in str(caught.value)


def test_missing_data_files_are_refused(sources, maxtext_run, tmp_path):
    """Those with numbers: any one of them may hold nothing but the optimizer's, which are never read."""
    run = shutil.copytree(maxtext_run, tmp_path / "run")
    for path in [path for path in run.rglob("d/*") if path.stat().st_size > 10_000]:
        path.unlink()
    with pytest.raises(CheckpointError, match=r"cut or corrupt|damaged"):
        convert(open_run(run, sources["llama"]))


def test_a_flipped_byte_is_refused_where_there_is_a_manifest(sources, maxtext_run, tmp_path):
    run = shutil.copytree(maxtext_run, tmp_path / "run")
    Manifest.of(epath.Path(run)).write(epath.Path(run))
    open_run(run, sources["llama"])
    largest = max((path for path in run.rglob("d/*")), key=lambda path: path.stat().st_size)
    whole = bytearray(largest.read_bytes())
    whole[len(whole) // 2] ^= 1
    largest.write_bytes(whole)
    with pytest.raises(CheckpointError, match=f"{largest.name} is corrupt: its CRC-32C"):
        open_run(run, sources["llama"])


def test_an_unfinished_save_is_refused(sources, maxtext_run, tmp_path):
    run = shutil.copytree(maxtext_run, tmp_path / "run.orbax-checkpoint-tmp-12")
    with pytest.raises(CheckpointError, match="is not complete"):
        open_run(run, sources["llama"])


def test_without_a_tokenizer_it_is_said_what_to_give(maxtext_run):
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json beside it; give the folder .* with --model-files"):
        open_foreign(epath.Path(maxtext_run))


def test_an_unknown_tree_is_told_by_some_of_its_names(sources, own_run):
    with pytest.raises(CheckpointError, match=r"no layout that is known \(maxtext, gemma\).*--keys FILE"):
        open_run(own_run, sources["llama"])


def test_other_formats_are_read_onto_a_mesh_too(sources, tmp_path):
    for model in (read_hf_folder(sources["qwen3_moe"]), open_foreign(epath.Path(write_tiny_gguf(tmp_path / "m.gguf")))):
        loaded = as_tree(foreign_leaves(model, _abstract(model, tensor=2, dtype="bfloat16")))
        jax.tree.map(np.testing.assert_array_equal, loaded, convert(model, "bfloat16"))
