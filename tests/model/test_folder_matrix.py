"""A folder means what transformers reads from it: ids, rendered prompts and end tokens are those of AutoTokenizer and
AutoConfig, over folders as people save them."""

import json
import os
from pathlib import Path

import pytest

os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # it says at import that it lacks PyTorch, which it does not need here
from transformers import AutoTokenizer

from model.gguf_tokenizer import read_text_assets
from model.hf_folder import read_hf_folder
from serving.engine.tokenizer import Tokenizer
from tests.model_files import GOLDEN

TEXTS = (
    "ab abc  Hello, world! 12345\n\n",
    "<|turn|>user\nab<|end|> c <|extra|>",
    "plain word<|tool|>ab<|tool|> <|pad|>x",
    "  <unk>é😀<|think|>ab</s><s> a",
)
MESSAGES = [
    {"role": "user", "content": "ab <hi>"},
    {"role": "assistant", "content": "ok"},
    {"role": "user", "content": "c"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
CHAT = (
    "{{ bos_token }}{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}{{ eos_token }}{% endfor %}"
    "[{{ pad_token }}|{{ unk_token }}|{{ image_token }}]{% if add_generation_prompt %}<|turn|>{% endif %}"
)
CALLS = "{{ tools | tojson }}" + CHAT


def _byte_level(pre):
    letters = sorted({*"ab c".replace(" ", "Ġ")} | set(_alphabet()))
    fields = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*letters, "ab", "abc", "Ġa", "<|turn|>", "<|end|>"],
        "tokenizer.ggml.token_type": [1] * (len(letters) + 3) + [3, 3], "tokenizer.ggml.merges": ["a b", "ab c", "Ġ a"],
    }  # fmt: skip
    return read_text_assets(Path("m.gguf"), fields).tokenizer_json


def _alphabet():
    from tokenizers.pre_tokenizers import ByteLevel

    return ByteLevel.alphabet()


def _sentencepiece(*, prefix):
    pieces = ["<pad>", "</s>", "<s>", "<unk>", "▁", "a", "b", "c", "ab", "▁a", "▁ab", "<|turn|>", "<|end|>"]
    fields = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": [*pieces, *(f"<0x{b:02X}>" for b in range(256))],
        "tokenizer.ggml.scores": [0.0] * 8 + [-1.0, -2.0, -3.0] + [0.0] * 258,
        "tokenizer.ggml.token_type": [3, 3, 3, 2, 1, 1, 1, 1, 1, 1, 1, 3, 3] + [6] * 256,
        "tokenizer.ggml.add_space_prefix": prefix,
    }  # fmt: skip
    return json.loads(read_text_assets(Path("m.gguf"), fields).tokenizer_json)


def _gemma():
    """As its authors converted it: spaces become ▁ and texts are cut at them."""
    made = _sentencepiece(prefix=False)
    made["normalizer"] = made["normalizer"]["normalizers"][0]
    made["pre_tokenizer"] = {
        "type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False
    }  # fmt: skip
    return json.dumps(made)


_TYPED_BOS = {
    "__type": "AddedToken", "content": "<s>", "lstrip": False, "rstrip": False, "single_word": False,
    "normalized": False, "special": True,
}  # fmt: skip
TOKENIZERS = {
    "llama3": lambda: _byte_level("llama-bpe"),
    "qwen2": lambda: _byte_level("qwen2"),
    "gemma": _gemma,
    "sentencepiece": lambda: json.dumps(_sentencepiece(prefix=True)),
}
CONFIGS = {
    "llama3": {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|turn|>"},
    "qwen2": {"tokenizer_class": "Qwen2Tokenizer", "bos_token": None, "eos_token": "<|end|>",
              "unk_token": "<|end|>", "pad_token": "<|end|>"},
    "gemma": {
        "tokenizer_class": "GemmaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
        "pad_token": "<pad>", "mask_token": "<pad>",
    },
    "sentencepiece": {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": _TYPED_BOS, "unk_token": "<unk>"},
}  # fmt: skip


def _plain(content, **flags):
    return {"content": content, "lstrip": False, "rstrip": False, "single_word": False, "normalized": False,
            "special": False, **flags}  # fmt: skip


def _token(content, **flags):
    return {"__type": "AddedToken", **_plain(content, special=True, **flags)}


# What a folder says beside its tokenizer.json: changes of tokenizer_config.json, and other files.
VARIANTS = {
    "nothing more": ({}, {}),
    "added_tokens_decoder": (
        {"eos_token": "<|end|>", "pad_token": "<|pad|>"},
        {"added_tokens_decoder": [
            _plain("<|tool|>"), _plain("<|pad|>", special=True), _plain("word", normalized=True)
        ]},
    ),
    "added tokens that swallow spaces": (
        {"eos_token": "<|end|>"},
        {"added_tokens_decoder": [_plain("<|tool|>", lstrip=True, rstrip=True), _plain("plain", single_word=True)]},
    ),
    "other flags for one that is there": (
        {"eos_token": "<|end|>"},
        {"added_tokens_decoder": [_plain("<|turn|>", rstrip=True, special=True)]},
    ),
    "a role makes special": (
        {"eos_token": "<|stop|>"}, {"added_tokens_decoder": [_plain("<|stop|>"), _plain("<|tool|>")]}
    ),
    "added_tokens.json": (
        {"eos_token": "<|end|>", "pad_token": "<|pad|>"}, {"added_tokens.json": ["<|tool|>", "<|pad|>", "<|think|>"]}
    ),
    "added_tokens.json beside a decoder": (
        {"eos_token": "<|end|>"}, {"added_tokens_decoder": [_plain("<|tool|>")], "added_tokens.json": ["<|think|>"]}
    ),
    "special_tokens_map.json": (
        {},
        {"special_tokens_map.json": {
            "eos_token": _plain("<|end|>"), "pad_token": "<|pad|>", "additional_special_tokens": ["<|tool|>"],
        }},
    ),
    "special_tokens_map.json has the last word": (
        {"eos_token": "<|turn|>"}, {"special_tokens_map.json": {"eos_token": "<|end|>"}}
    ),
    "special_tokens_map.json beside a decoder": (
        {"eos_token": "<|end|>"},
        {"added_tokens_decoder": [], "special_tokens_map.json": {"pad_token": "<|pad|>"}},
    ),
    "extra special tokens": ({"eos_token": _token("<|end|>"), "extra_special_tokens": ["<|extra|>", "<|tool|>"]}, {}),
    "additional special tokens": ({"eos_token": "<|end|>", "additional_special_tokens": ["<|extra|>"]}, {}),
    "named special tokens": (
        {"eos_token": "<|end|>", "extra_special_tokens": {"image_token": "<|extra|>"}, "boi_token": "<|tool|>"}, {}
    ),
    "another token field": ({"eos_token": "<|end|>", "image_token": "<|extra|>"}, {}),
    "end token that nobody added": ({"eos_token": "abc"}, {}),
    "end token outside of the vocabulary": ({"eos_token": "<|stop|>"}, {}),
    "template in the config": ({"eos_token": "<|end|>", "chat_template": CHAT}, {}),
    "templates in the config": (
        {"eos_token": "<|end|>", "chat_template": [
            {"name": "tool_use", "template": CALLS}, {"name": "default", "template": CHAT}]},
        {},
    ),
    "template in a file": ({"chat_template": "no"}, {"chat_template.jinja": CHAT}),
    "templates in files": (
        {}, {"chat_template.jinja": CHAT, "additional_chat_templates/tool_use.jinja": CALLS}
    ),
    "a file replaces templates of the config": (
        {"chat_template": [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "no"}]},
        {"chat_template.jinja": CHAT},
    ),
    "a template for something else": (
        {}, {"chat_template.jinja": CHAT, "additional_chat_templates/rag.jinja": "no"}
    ),
}  # fmt: skip


def write_folder(folder, kind, variant):
    """The tokenizer files only."""
    text = TOKENIZERS[kind]()
    (folder / "tokenizer.json").write_text(text)
    made = json.loads(text)
    next_id = len(made["model"]["vocab"])
    changes, files = VARIANTS[variant]
    config = {**CONFIGS[kind], **changes}
    for name, content in files.items():
        if name == "added_tokens_decoder":
            # All are listed, also those of tokenizer.json: so transformers saves them.
            there = {token["content"]: token for token in made["added_tokens"]}
            for token in content:
                there[token["content"]] = {
                    "id": next_id + len(there.keys() - made["model"]["vocab"].keys()),
                    **there.get(token["content"], {}),
                    **token,
                }
            config[name] = {
                str(token["id"]): {key: value for key, value in token.items() if key != "id"}
                for token in there.values()
            }
        else:
            (folder / name).parent.mkdir(exist_ok=True)
            if name == "added_tokens.json":
                content = {token: next_id + index for index, token in enumerate(content)}
            (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_model(folder, **changes):
    """Weights and config.json beside them."""
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((GOLDEN / "tiny_tied" / name).read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_ids_prompts_and_tokens_are_those_of_transformers(kind, variant, tmp_path):
    write_folder(tmp_path, kind, variant)
    write_model(tmp_path)
    theirs, model = AutoTokenizer.from_pretrained(tmp_path), read_hf_folder(tmp_path)
    ours = Tokenizer(model.text)
    for text in TEXTS:
        ids = theirs(text, add_special_tokens=False).input_ids
        assert ours.encode_rendered(text) == ids, text
        decoded = ours.detokenizer()
        assert decoded.push(ids) + decoded.finish() == theirs.decode(ids, skip_special_tokens=True)
    assert model.text.named_tokens == theirs.special_tokens_map
    if theirs.eos_token_id is not None and theirs.eos_token_id < model.config.vocab_size:
        assert theirs.eos_token_id in model.generation.eos_token_ids
    if theirs.chat_template:
        for tools in ([], TOOLS):
            for prompt in (True, False):
                wanted = theirs.apply_chat_template(
                    MESSAGES, tools=tools or None, add_generation_prompt=prompt, tokenize=False
                )
                if "tools" not in theirs.get_chat_template(tools=tools or None):
                    tools = []  # one that knows no tools is told of them in a system message, which is our own
                assert ours.render_chat(MESSAGES, tools, add_generation_prompt=prompt) == wanted
