"""Checkpoints of MaxText, whose layers are scanned (stacked on the second axis) or apart.

Gemma 2 comes in blocks of two layers, Gemma 3, if scanned, in blocks of six. What MaxText folds into its weights is
told by the config instead: 1/sqrt(head_dim) in queries, the 1 of Gemma's norms. The root of the width in Gemma's token
vectors is divided out, as they are the head too. Where token vectors are the head, `normalize_embedding_logits`, which
is true unless a run says otherwise, divides logits by the root of the width.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from model.config import ModelConfig
from model.errors import UnsupportedModel
from model.fields import Json
from model.foreign import LazyTensor
from model.hf_config import FULL, MAX_LAYERS, HfConfig
from model.keys import Key, key

ANCHOR = "token_embedder.embedding"
_GEMMA = ("gemma2", "gemma3_text", "gemma3")
_FOLDED = ("llama", "mistral", "mixtral", "gemma2")
_KNOWN = (*_FOLDED, "qwen2", "qwen3", "qwen3_moe", "gemma3_text", "gemma3")
_BLOCK = 6
_NOT_NORMALIZED = (
    (24, 896), (28, 1536), (36, 2048),  # Qwen 2.5
    (28, 1024), (28, 2048), (36, 2560),  # Qwen 3
    (16, 2048), (28, 3072),  # Llama 3.2
)  # fmt: skip
"""Layers and widths of models that others released and MaxText has configs or converters for, which must not divide."""

_ATTENTION = (
    ("q", "self_attention{suffix}.query.kernel", "D N H"),
    ("k", "self_attention{suffix}.key.kernel", "D K H"),
    ("v", "self_attention{suffix}.value.kernel", "D K H"),
    ("out", "self_attention{suffix}.out.kernel", "N H D"),
)
_BIASES = (
    ("q_bias", "self_attention.query.bias", "N H"),
    ("k_bias", "self_attention.key.bias", "K H"),
    ("v_bias", "self_attention.value.bias", "K H"),
)
_QK_NORMS = (
    ("q_norm", "self_attention.query_norm.scale", "H"),
    ("k_norm", "self_attention.key_norm.scale", "H"),
)
_MLP = (
    ("gate", "mlp{suffix}.wi_0.kernel", "D F"),
    ("up", "mlp{suffix}.wi_1.kernel", "D F"),
    ("down", "mlp{suffix}.wo.kernel", "F D"),
)
_EXPERTS = (
    ("router", "{block}.gate.kernel", "D Z"),
    ("gate", "{block}.wi_0", "Z D F"),
    ("up", "{block}.wi_1", "Z D F"),
    ("down", "{block}.wo", "Z F D"),
)
_NORMS = (
    ("attention_norm", "pre_self_attention_layer_norm.scale", "D"),
    ("mlp_norm", "post_self_attention_layer_norm.scale", "D"),
)
_GEMMA_NORMS = (
    ("attention_norm", "pre_self_attention_norm{suffix}.scale", "D"),
    ("attention_out_norm", "post_self_attention_norm{suffix}.scale", "D"),
    ("mlp_norm", "pre_ffw_norm{suffix}.scale", "D"),
    ("mlp_out_norm", "post_ffw_norm{suffix}.scale", "D"),
)
_Row = tuple[str, str, str]


def keys(fields: Json, tensors: Mapping[str, LazyTensor]) -> tuple[Key, ...]:
    """Raises UnsupportedModel for a family whose weights MaxText shapes in a way that is not known here."""
    kind = fields.get("model_type")
    if kind not in _KNOWN:
        raise UnsupportedModel(f"MaxText's layout of {kind!r} is not known; known: {', '.join(_KNOWN)}.")
    is_scanned = any(name.startswith("decoder.layers.") for name in tensors)
    rows = _rows(str(kind), tensors)
    num_layers = HfConfig(fields, {}).count("num_hidden_layers", most=MAX_LAYERS)
    layers = [
        made
        for base, suffix, layers, scanned in _bases(str(kind), is_scanned, num_layers)
        for made in _in_layers(rows, base, suffix, layers, fields, is_scanned=scanned)
    ]
    width = fields.get("hidden_size")
    times = 1 / math.sqrt(width) if kind in _GEMMA and isinstance(width, int) else 1.0
    return (
        key("embed", ANCHOR, "V D", times=times, may_be_longer=True),
        key("head", "decoder.logits_dense.kernel", "D V", may_be_longer=True),
        key("final_norm", "decoder.decoder_norm.scale", "D"),
        *layers,
    )


def adapt(config: ModelConfig, fields: Json) -> ModelConfig:
    kind = fields.get("model_type")
    if kind in _FOLDED:
        config = replace(config, query_scale=(config.query_scale or config.head_dim) / config.head_dim)
    if kind not in _GEMMA:
        return config
    # The root of the width was divided out of the token vectors: with normalised logits nothing is left to be done.
    is_normalized = config.logits_scale != 1.0 or not config.tie_embeddings
    return replace(config, norm_offset=0.0, logits_scale=1.0 if is_normalized else math.sqrt(config.embed_dim))


def normalizes_logits(config: ModelConfig) -> bool:
    """MaxText's default, unless the sizes are those of a model whose authors do not."""
    return (config.num_layers, config.embed_dim) not in _NOT_NORMALIZED


def _rows(kind: str, tensors: Mapping[str, LazyTensor]) -> list[_Row]:
    rows: list[_Row] = [*_ATTENTION, *(_GEMMA_NORMS if kind in _GEMMA else _NORMS)]
    if kind == "qwen2":
        rows += _BIASES
    if kind in ("qwen3", "qwen3_moe", "gemma3", "gemma3_text"):
        rows += _QK_NORMS
    if kind not in ("mixtral", "qwen3_moe"):
        return [*rows, *_MLP]
    block = next((block for block in ("MoeBlock_0", "moe_block") if any(f".{block}." in name for name in tensors)), "")
    return [*rows, *((target, name.format(block=block), dims) for target, name, dims in _EXPERTS)]


def _bases(kind: str, is_scanned: bool, num_layers: int | None) -> Iterator[tuple[str, str, slice, bool]]:
    """What stands before the names of layers, behind the names of their modules, which layers these are, and whether
    they are stacked."""
    base = "decoder.layers." if is_scanned else "decoder.layers_{layer}."
    if kind == "gemma2":
        yield base, "_local", slice(0, None, 2), is_scanned
        yield base, "_global", slice(1, None, 2), is_scanned
    elif kind in ("gemma3", "gemma3_text") and is_scanned:
        in_blocks = (num_layers or 0) // _BLOCK * _BLOCK
        for place in range(_BLOCK):
            yield f"decoder.layers.layers_{place}.", "", slice(place, in_blocks, _BLOCK), True
        yield "decoder.layers_remainder.layers_{layer}.", "", slice(in_blocks, None), False
    else:
        yield base, "", slice(None), is_scanned


def _in_layers(
    rows: list[_Row], base: str, suffix: str, layers: slice, fields: Json, *, is_scanned: bool
) -> Iterator[Key]:
    # Llama 3.1 is turned by neighbours there, as its authors do; everything else by halves.
    scaling = HfConfig(fields, {}).rope_fields(FULL)
    kind = scaling.text("rope_type") or scaling.text("type")
    is_interleaved = fields.get("model_type") == "llama" and kind == "llama3"
    for target, name, dims in rows:
        axes = dims.split()
        if is_scanned:
            axes.insert(1, "L")
        turned = is_interleaved and target in ("q", "k")
        source = base + name.format(suffix=suffix)
        yield key(target, source, " ".join(axes), layers=layers, is_interleaved=turned)
