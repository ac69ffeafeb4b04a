"""Checkpoints as training runs in JAX leave them: the parameter trees of MaxText and of google-deepmind/gemma, made
from a Hugging Face model by plain indexing, with the optimizer's state beside them.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import orbax.checkpoint as v0
from orbax.checkpoint import v1
from safetensors.numpy import save_file

from model.families import read_config
from model.foreign import ForeignModel
from model.hf_folder import read_hf_folder
from tests.model_files import GOLDEN, TIED

SHAPE = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "eos_token_id": 1, "head_dim": 16,
}  # fmt: skip
LLAMA31 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 32}  # fmt: skip
FAMILIES = {
    "llama": {},
    "llama_tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama31": {"model_type": "llama", "rope_scaling": LLAMA31},
    "mistral": {"sliding_window": 8},
    "mixtral": {"num_local_experts": 3, "num_experts_per_tok": 2},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 20},
    "gemma2": {"num_hidden_layers": 4, "sliding_window": 8, "query_pre_attn_scalar": 20},
    "gemma3_text": {"num_hidden_layers": 8, "sliding_window": 8, "query_pre_attn_scalar": 20},
}


def hf_folder(folder: Path, name: str, seed: int = 0) -> Path:
    """A small random model of a family, with the tokenizer of a golden one."""
    fields = {"model_type": name, **SHAPE, **FAMILIES[name]}
    family, config = read_config(fields)
    random = np.random.default_rng(seed)
    tensors = {}
    for key in family.keys:
        if key.is_head and config.tie_embeddings:
            continue
        shape = key.tensor_shape(config)
        for part in key.parts(config):
            usual = 0.0 if name.startswith("gemma") else 1.0
            is_norm = key.ours in ("D", "H")
            numbers = (
                random.uniform(usual - 0.5, usual + 0.5, shape)
                if is_norm
                else random.normal(0, shape[-1] ** -0.5, shape)
            )
            tensors[part.name] = numbers.astype(np.float32)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(fields))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        if (GOLDEN / TIED.name / file).exists():
            shutil.copy(GOLDEN / TIED.name / file, folder)
    return folder


def model_files(folder: Path, source: Path) -> Path:
    """What of a Hugging Face folder is no weight."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.suffix in (".json", ".jinja") and "index" not in path.name:
            shutil.copy(path, folder)
    return folder


class Matrices:
    """The tensors of a Hugging Face model, `[in, out]` with heads apart."""

    def __init__(self, model: ForeignModel) -> None:
        self.config = model.config
        self._tensors = {name: tensor.read() for name, tensor in model.tensors.items()}

    def __contains__(self, name):
        return name in self._tensors

    def __call__(self, name):
        return self._tensors[name]

    def heads(self, layer, part):
        """[D, heads, H]."""
        c = self.config
        return self(f"model.layers.{layer}.self_attn.{part}_proj.weight").T.reshape(c.embed_dim, -1, c.head_dim)

    def out(self, layer):
        """[N, H, D]."""
        c = self.config
        return self(f"model.layers.{layer}.self_attn.o_proj.weight").T.reshape(c.num_heads, c.head_dim, c.embed_dim)

    def in_layer(self, layer, name):
        return self(f"model.layers.{layer}.{name}")


def neighbours(x):
    """Halves of the last axis as pairs of neighbours."""
    out = np.empty_like(x)
    out[..., 0::2], out[..., 1::2] = np.split(x, 2, axis=-1)
    return out


def maxtext_tree(source: Path, *, scanned: bool, extra_rows: int = 0):
    """What stands below `params` of MaxText's checkpoints."""
    model = read_hf_folder(source)
    kind, m, c = json.loads((source / "config.json").read_text())["model_type"], Matrices(model), model.config
    is_gemma = kind.startswith("gemma")
    layers = [_maxtext_layer(m, layer, kind) for layer in range(c.num_layers)]
    embedding = m("model.embed_tokens.weight") * (np.sqrt(c.embed_dim) if is_gemma else 1)
    padding = np.full((extra_rows, c.embed_dim), 7, np.float32)
    decoder = {"decoder_norm": {"scale": m("model.norm.weight") + is_gemma}}
    if "lm_head.weight" in m:
        decoder["logits_dense"] = {"kernel": m("lm_head.weight").T}
    tree = {"token_embedder": {"embedding": np.concatenate([embedding, padding]).astype(np.float32)}}
    if kind == "gemma2":
        layers = [_paired(local, far) for local, far in zip(layers[0::2], layers[1::2], strict=True)]
    if not scanned:
        decoder |= {f"layers_{index}": layer for index, layer in enumerate(layers)}
    elif kind == "gemma3_text":
        whole = c.num_layers // 6 * 6
        decoder["layers"] = {f"layers_{place}": _stacked(layers[place:whole:6]) for place in range(6)}
        decoder["layers_remainder"] = {f"layers_{index}": layer for index, layer in enumerate(layers[whole:])}
    else:
        decoder["layers"] = _stacked(layers)
    return {"params": {**tree, "decoder": decoder}}


def _stacked(trees):
    first = trees[0]
    if isinstance(first, dict):
        return {name: _stacked([tree[name] for tree in trees]) for name in first}
    return np.stack(trees, axis=1)


def _paired(local, far):
    return {f"{name}_local": part for name, part in local.items()} | {
        f"{name}_global": part for name, part in far.items()
    }


def _maxtext_layer(m, layer, kind):
    c, is_gemma = m.config, kind.startswith("gemma")
    turn = neighbours if c.rope_scaling is not None and kind == "llama" else lambda x: x
    folded = np.sqrt(c.head_dim) if kind in ("llama", "mistral", "mixtral", "gemma2") else 1
    attention = {
        "query": {"kernel": (turn(m.heads(layer, "q")) / folded).astype(np.float32)},
        "key": {"kernel": turn(m.heads(layer, "k"))},
        "value": {"kernel": m.heads(layer, "v")},
        "out": {"kernel": m.out(layer)},
    }
    if kind == "qwen2":
        for name in ("query", "key", "value"):
            bias = m.in_layer(layer, f"self_attn.{name[0]}_proj.bias")
            attention[name]["bias"] = bias.reshape(-1, c.head_dim)
    if c.qk_norm:
        for name in ("query", "key"):
            scale = m.in_layer(layer, f"self_attn.{name[0]}_norm.weight")
            attention[f"{name}_norm"] = {"scale": scale + is_gemma}
    norms = {
        "pre_self_attention_layer_norm": "input_layernorm",
        "post_self_attention_layer_norm": "post_attention_layernorm",
    }
    if is_gemma:
        norms = {
            "pre_self_attention_norm": "input_layernorm", "post_self_attention_norm": "post_attention_layernorm",
            "pre_ffw_norm": "pre_feedforward_layernorm", "post_ffw_norm": "post_feedforward_layernorm",
        }  # fmt: skip
    tree = {name: {"scale": m.in_layer(layer, f"{theirs}.weight") + is_gemma} for name, theirs in norms.items()}
    return {**tree, "self_attention": attention, **_maxtext_mlp(m, layer, kind)}


def _maxtext_mlp(m, layer, kind):
    if not m.config.num_experts:
        parts = (("wi_0", "gate"), ("wi_1", "up"), ("wo", "down"))
        return {"mlp": {name: {"kernel": m.in_layer(layer, f"mlp.{part}_proj.weight").T} for name, part in parts}}
    block, theirs, names = ("moe_block", "mlp", ("gate_proj", "up_proj", "down_proj"))
    if kind == "mixtral":
        block, theirs, names = ("MoeBlock_0", "block_sparse_moe", ("w1", "w3", "w2"))
    experts = {
        name: np.stack(
            [m.in_layer(layer, f"{theirs}.experts.{z}.{part}.weight").T for z in range(m.config.num_experts)]
        )
        for name, part in zip(("wi_0", "wi_1", "wo"), names, strict=True)
    }
    return {block: {"gate": {"kernel": m.in_layer(layer, f"{theirs}.gate.weight").T}, **experts}}


def gemma_tree(source: Path, *, published: bool):
    """The tree of google-deepmind/gemma: as it is published, with paths for names, or as the library nests it."""
    m = Matrices(read_hf_folder(source))
    layers = {f"layer_{layer}": _gemma_layer(m, layer) for layer in range(m.config.num_layers)}
    tree = {
        "embedder": {"input_embedding": m("model.embed_tokens.weight")},
        "final_norm": {"scale": m("model.norm.weight")},
        **layers,
    }
    return dict(_paths(tree, "transformer")) if published else tree


def _paths(tree, path):
    """Modules by their paths; a bare matrix becomes a module with a `w`."""
    arrays = {}
    for name, part in tree.items():
        if isinstance(part, dict):
            yield from _paths(part, f"{path}/{name}")
        elif name in ("scale", "input_embedding", "w"):
            arrays[name] = part
        else:
            yield f"{path}/{name}", {"w": part}
    if arrays:
        yield path, arrays


def _gemma_layer(m, layer):
    def scale(name):
        return {"scale": m.in_layer(layer, f"{name}.weight")}

    attention = {
        "q_einsum": {"w": m.heads(layer, "q").transpose(1, 0, 2)},
        "kv_einsum": {"w": np.stack([m.heads(layer, part).transpose(1, 0, 2) for part in "kv"])},
        "attn_vec_einsum": {"w": m.out(layer)},
    }
    if m.config.qk_norm:
        attention |= {"_query_norm": scale("self_attn.q_norm"), "_key_norm": scale("self_attn.k_norm")}
    gating = np.stack([m.in_layer(layer, f"mlp.{part}_proj.weight") for part in ("gate", "up")])
    return {
        "attn": attention,
        "mlp": {"gating_einsum": gating, "linear": m.in_layer(layer, "mlp.down_proj.weight").T},
        "pre_attention_norm": scale("input_layernorm"),
        "post_attention_norm": scale("post_attention_layernorm"),
        "pre_ffw_norm": scale("pre_feedforward_layernorm"),
        "post_ffw_norm": scale("post_feedforward_layernorm"),
    }


def train_state(params):
    """With the two moments of an optimizer, which have the names of the parameters."""
    return {"step": 7, "params": params, "opt_state": [{"mu": params, "nu": params, "count": 7}, {}]}


def save_v1(path, tree):
    v1.save(path, tree)


def save_v0(path, tree):
    with v0.PyTreeCheckpointer() as saver:
        saver.save(path, tree)


def save_v0_files(path, tree):
    """Without a database: a folder for each array."""
    with v0.Checkpointer(v0.PyTreeCheckpointHandler(use_ocdbt=False)) as saver:
        saver.save(path, args=v0.args.PyTreeSave(tree))


def save_v0_run(path, tree):
    """As MaxText's runs do: a folder for each step, the state in `items`."""
    with v0.CheckpointManager(path, item_names=("items",)) as manager:
        for step in (3, 12):
            manager.save(step, args=v0.args.Composite(items=v0.args.PyTreeSave(tree)))
        manager.wait_until_finished()
