"""A folder means what transformers reads from it: ids, rendered prompts and end tokens are those of AutoTokenizer and
AutoConfig, over folders as people save them."""

import json
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from model.config import LinearScaling, RopeScaling
from model.families import FAMILIES, read_config
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
    "llama2": lambda: json.dumps(_sentencepiece(prefix=True)),
    "llama2 legacy": lambda: json.dumps(_sentencepiece(prefix=True)),
    "llama2 without prefix": lambda: json.dumps(_sentencepiece(prefix=False)),
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
LLAMA2 = {
    "tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "legacy": False,
}  # fmt: skip
CONFIGS |= {
    "llama2": LLAMA2,
    "llama2 legacy": {**LLAMA2, "tokenizer_class": "LlamaTokenizerFast", "legacy": True},
    "llama2 without prefix": {**LLAMA2, "add_prefix_space": False},
}


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
    "another token field in full": ({"eos_token": "<|end|>", "image_token": _token("<|extra|>")}, {}),
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


SHAPE = {
    "vocab_size": 8, "num_hidden_layers": 7, "hidden_size": 32, "intermediate_size": 8, "num_attention_heads": 4,
    "max_position_embeddings": 64, "num_key_value_heads": 2,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
SAID = {
    "nothing more": {},
    "theta": {"rope_theta": 7.0},
    "new form": {"rope_parameters": {"rope_type": "default", "rope_theta": 9.0}},
    "both forms": {"rope_parameters": {"rope_theta": 9.0}, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "llama3": {"rope_theta": 5e5, "rope_scaling": LLAMA3_ROPE},
    "an older name": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "null": {"rope_parameters": None, "rope_scaling": None},
    "theta beside the new form": {"rope_theta": 7.0, "rope_parameters": {"rope_type": "linear", "factor": 4.0}},
    "tied": {"tie_word_embeddings": True, "rms_norm_eps": 0.5},
    "untied": {"tie_word_embeddings": False, "head_dim": 6},
    "windows": {"use_sliding_window": True, "max_window_layers": 3, "sliding_window": 5},
}
NOBODY_SAVES = {
    ("llama", "windows"),
    *(("gemma3_text", said) for said in ("new form", "both forms", "an older name", "theta beside the new form")),
}
"""And transformers does not read, or has no use for. Gemma 3 has two ropes in the new form (`test_families.py`)."""


@pytest.mark.parametrize(
    ("family", "said"),
    [(name, said) for name in (family.model_types[0] for family in FAMILIES) for said in SAID
     if (name, said) not in NOBODY_SAVES],
)  # fmt: skip
def test_configs_are_read_as_transformers_reads_them(family, said, tmp_path):
    fields = {"model_type": family, **SHAPE, **SAID[said]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    theirs, (_, ours) = AutoConfig.from_pretrained(tmp_path), read_config(fields)
    ropes = theirs.rope_parameters
    rope = ropes.get("full_attention", ropes)
    assert (ours.rope_theta, ours.norm_eps) == (rope["rope_theta"], theirs.rms_norm_eps)
    if ours.local_rope_theta is not None:
        assert ours.local_rope_theta == ropes["sliding_attention"]["rope_theta"]
    scaling = {None: "default", LinearScaling: "linear", RopeScaling: "llama3"}
    assert scaling[ours.rope_scaling and type(ours.rope_scaling)] == rope["rope_type"]
    assert ours.rope_scaling is None or ours.rope_scaling.factor == rope["factor"]
    assert ours.tie_embeddings == theirs.tie_word_embeddings
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    window = getattr(theirs, "sliding_window", None)
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * 7
    windows = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    assert ours.windows == (windows if any(windows) else ())
    experts = getattr(theirs, "num_local_experts", None) or getattr(theirs, "num_experts", None) or 0
    assert ours.num_experts == experts
    assert ours.attention_softcap == getattr(theirs, "attn_logit_softcapping", None)
    assert ours.logits_softcap == getattr(theirs, "final_logit_softcapping", None)
    assert ours.query_scale == getattr(theirs, "query_pre_attn_scalar", None)


@pytest.mark.parametrize(
    "places", [("config",), ("text_config",), ("generation",), ("config", "text_config", "generation")]
)
@pytest.mark.parametrize("value", [2, [1, 3]])
def test_end_tokens_are_those_of_both_configs(places, value, tmp_path):
    """Those of the tokenizer are in the matrix of tokenizers above."""
    write_folder(tmp_path, "llama3", "nothing more")
    write_model(tmp_path, eos_token_id=None)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    if "config" in places:
        config["eos_token_id"] = 0
    if "text_config" in places:
        config["text_config"] = {**config, "eos_token_id": value}
    path.write_text(json.dumps(config))
    generation = {"eos_token_id": value} if "generation" in places else {}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    theirs = [
        AutoConfig.from_pretrained(tmp_path).eos_token_id,
        GenerationConfig.from_pretrained(tmp_path).eos_token_id,
    ]
    named = {
        token_id for ids in theirs for token_id in (ids if isinstance(ids, list) else [ids]) if token_id is not None
    }
    assert named <= set(read_hf_folder(tmp_path).generation.eos_token_ids)
