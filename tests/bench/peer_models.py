"""The demo model's weights as other servers read them: Hugging Face folders and GGUF files, in two types each.

All are written from the one source that podstream's own checkpoint comes from, so every server computes with the same
numbers; in bfloat16 each is rounded once, to the nearest.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType as Quant
from gguf import LlamaFileType, quantize
from safetensors.numpy import save_file

from model.card import TextAssets
from model.config import ModelConfig
from model.foreign import ForeignModel
from model.gguf_header import GgufHeader
from tests.model_files import to_gguf, write_gguf

DTYPES: Mapping[str, type] = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
FILE_TYPES = {"float32": LlamaFileType.ALL_F32, "bfloat16": LlamaFileType.MOSTLY_BF16}


def hf_folder(folder: Path, source: Callable[[], ForeignModel], dtype: str) -> Path:
    """`folder`, written on the first call."""
    return _once(folder, lambda partial: write_hf_folder(partial, source(), dtype))


def gguf_file(path: Path, source: Callable[[], ForeignModel], dtype: str) -> Path:
    """`path`, written on the first call. The source must be a GGUF file, whose metadata are kept."""
    return _once(path, lambda partial: write_gguf_copy(partial, source(), dtype))


def _once(path: Path, write: Callable[[Path], None]) -> Path:
    """It gets its name when it is complete."""
    if not path.exists():
        partial = path.with_name(f"{path.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        write(partial)
        partial.rename(path)
    return path


def write_hf_folder(folder: Path, model: ForeignModel, dtype: str) -> None:
    folder.mkdir(parents=True)
    tensors = {name: np.ascontiguousarray(t.read(), DTYPES[dtype]) for name, t in model.tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    ends = list(model.generation.eos_token_ids)
    (folder / "tokenizer.json").write_text(model.text.tokenizer_json, encoding="utf-8")
    files = {
        "config.json": {**hf_config(model.config, dtype), "eos_token_id": ends},
        "generation_config.json": {"eos_token_id": ends},
        "tokenizer_config.json": hf_tokenizer_config(model.text, model.config),
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8")


def hf_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
    assert config.rope_scaling is None, "scaled rope is not written"
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "attention_bias": False, "mlp_bias": False, "vocab_size": config.vocab_size,
        "hidden_size": config.embed_dim, "intermediate_size": config.mlp_dim, "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim, "max_position_embeddings": config.max_seq_len, "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta, "tie_word_embeddings": config.tie_embeddings, "torch_dtype": dtype,
    }  # fmt: skip


def hf_tokenizer_config(text: TextAssets, config: ModelConfig) -> dict[str, Any]:
    """The plain class uses tokenizer.json as it is; GPT2Tokenizer would rebuild it and cut digits differently."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config.max_seq_len,
        "clean_up_tokenization_spaces": False, "bos_token": text.bos_token, "eos_token": text.eos_token,
        "chat_template": text.chat_template,
    }  # fmt: skip


def write_gguf_copy(path: Path, model: ForeignModel, dtype: str) -> None:
    kept = GgufHeader.read(Path(model.where)).fields
    fields = {name: value for name, value in kept.items() if name != "general.architecture"}
    fields["general.file_type"] = int(FILE_TYPES[dtype])
    tensors = to_gguf(model, {name: tensor.read() for name, tensor in model.tensors.items()})
    write_gguf(path, fields, {name: _as_stored(tensor, dtype) for name, tensor in tensors.items()})


def _as_stored(tensor: np.ndarray, dtype: str) -> np.ndarray | tuple[np.ndarray, Quant]:
    """Scales of norms stay in float32, as every converter keeps them."""
    if dtype == "float32" or tensor.ndim == 1:
        return tensor
    return quantize(tensor, Quant.BF16), Quant.BF16
