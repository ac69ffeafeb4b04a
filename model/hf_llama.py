"""SentencePiece tokenizers of Llama as transformers 5 reads them (`LlamaTokenizer`).

Their tokenizer.json, which older converters wrote, puts a space before each piece of text between special tokens; the
authors' code, and so what models were trained with, does so at the beginning of a text only, unless `legacy` is set.
"""

import json
from typing import Any

from model.fields import Fields

AS_THEY_ARE = ("mistral", "mixtral")
"""Models whose tokenizer.json transformers takes as it is, whatever class it names; also Qwen 2, which has another."""
_CLASSES = ("LlamaTokenizer", "LlamaTokenizerFast")
SPACE = "▁"


def as_llama_reads(text: str, config: Fields, model_type: str | None) -> str:
    """The tokenizer.json `text` with the spaces of its class, if tokenizer_config.json names that class."""
    if config.text("tokenizer_class") not in _CLASSES or model_type in (*AS_THEY_ARE, "qwen2"):
        return text
    said: dict[str, Any] = json.loads(text)
    if said["model"].get("type") != "BPE" or not _is_of_sentencepiece(said):
        return text
    has_prefix = config.get("add_prefix_space") is None or config.flag("add_prefix_space")
    scheme = "never" if not has_prefix else "always" if config.flag("legacy") else "first"
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if has_prefix else []
    replace = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    changes = {
        "normalizer": None,
        "pre_tokenizer": {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": scheme, "split": False},
        "decoder": {"type": "Sequence", "decoders": [replace, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        "model": {**said["model"], "unk_token": None, "fuse_unk": True, "byte_fallback": True, "dropout": None,
                  "ignore_merges": False},
    }  # fmt: skip
    return json.dumps({**said, **changes}, ensure_ascii=False)


def _is_of_sentencepiece(said: dict[str, Any]) -> bool:
    """Nothing in it works on bytes."""
    return '"ByteLevel"' not in json.dumps([said.get(part) for part in ("normalizer", "pre_tokenizer", "decoder")])
