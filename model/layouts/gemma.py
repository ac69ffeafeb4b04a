"""Checkpoints of the library google-deepmind/gemma: what it publishes and what it trains.

Layers are apart. Published ones call a matrix `layer_0/attn/q_einsum` with its numbers in `w`, newer ones nest; both
are read, as `layer_0.attn.q_einsum`.
"""

from collections.abc import Mapping
from typing import Any

from model.fields import Json
from model.foreign import LazyTensor
from model.keys import Key, key

ANCHOR = "embedder.input_embedding"
IGNORED = ("vision_encoder", "embedder.mm_", "siglip")
_LAYER = "layer_{layer}."
_ROWS = (
    ("attention_norm", "pre_attention_norm.scale", "D"),
    ("out", "attn.attn_vec_einsum", "N H D"),
    ("attention_out_norm", "post_attention_norm.scale", "D"),
    ("mlp_norm", "pre_ffw_norm.scale", "D"),
    ("down", "mlp.linear", "F D"),
    ("mlp_out_norm", "post_ffw_norm.scale", "D"),
)
_APART = (("q", "attn.q_einsum", "N D H"), ("kv", "attn.kv_einsum", "C K D H"))
_TOGETHER = (("qkv", "attn.qkv_einsum", "A K D H"),)
_QK_NORMS = (("q_norm", "attn._query_norm.scale", "H"), ("k_norm", "attn._key_norm.scale", "H"))

_LONG = {"max_position_embeddings": 131_072, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
_RELEASED: dict[tuple[int, int], dict[str, Any]] = {
    (26, 2304): {}, (42, 3584): {}, (46, 4608): {"query_pre_attn_scalar": 144},
    (18, 640): {"sliding_window": 512, "max_position_embeddings": 32_768},
    (26, 1152): {"sliding_window": 512, "max_position_embeddings": 32_768},
    (34, 2560): {"sliding_window": 1024, **_LONG}, (48, 3840): {"sliding_window": 1024, **_LONG},
    (62, 5376): {"sliding_window": 1024, "query_pre_attn_scalar": 168, **_LONG},
}  # fmt: skip
"""By layers and width, what shapes do not tell of the models that were released, where a config is missing."""


def keys(fields: Json, tensors: Mapping[str, LazyTensor]) -> tuple[Key, ...]:
    gating = tensors.get("layer_0.mlp.gating_einsum")
    hidden = tensors["layer_0.mlp.linear"].shape[0] if "layer_0.mlp.linear" in tensors else None
    # Some versions of the library have gate and up the other way round.
    dims = "C D F" if gating is not None and gating.shape[-1] == hidden != gating.shape[-2] else "C F D"
    attention = _TOGETHER if "layer_0.attn.qkv_einsum" in tensors else _APART
    norms = _QK_NORMS if _has_qk_norms(tensors) or fields.get("model_type") in ("gemma3", "gemma3_text") else ()
    rows = (*_ROWS, *attention, *norms, ("gate_up", "mlp.gating_einsum", dims))
    return (
        key("embed", ANCHOR, "V D"),
        key("final_norm", "final_norm.scale", "D"),
        *(key(target, _LAYER + name, dims) for target, name, dims in rows),
    )


def guess(tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
    num_layers = sum(name.endswith(".attn.attn_vec_einsum") for name in tensors)
    width = tensors[ANCHOR].shape[-1]
    released = _RELEASED.get((num_layers, width))
    if released is None:
        return {}
    return {"model_type": "gemma3_text" if _has_qk_norms(tensors) else "gemma2", **released}


def _has_qk_norms(tensors: Mapping[str, LazyTensor]) -> bool:
    return "layer_0.attn._query_norm.scale" in tensors
