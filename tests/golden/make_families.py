"""Makes `families/`: a small random model of each family, and the logits that Hugging Face transformers computes.

Its dependencies are not podstream's. Run once for a new family, from the root of the repository, and commit its folder:

    python3.11 -m venv /tmp/golden-venv
    /tmp/golden-venv/bin/pip install torch==2.13.0 transformers==5.24.0
    /tmp/golden-venv/bin/python tests/golden/make_families.py [FAMILY ...]

Of each family: `config.json` and `model.safetensors` as transformers saves them, and `logits.npz` with `prompt_0`,
`prompt_1`, ... int32 [T] and `logits_0`, ... float32 [T, V], the logits after every token. Prompts outgrow windows.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

FOLDER = Path(__file__).parent / "families"
PROMPT_LENGTHS = (1, 9, 40)

SHAPE = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": None, "dtype": "float32",
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
SLIDING, FULL = "sliding_attention", "full_attention"
GEMMA = {
    "head_dim": 12, "num_hidden_layers": 3, "sliding_window": 8, "query_pre_attn_scalar": 20,
    "layer_types": [SLIDING, SLIDING, FULL],
}  # fmt: skip
FAMILIES = {
    "mistral": {"head_dim": 12, "sliding_window": 8, "rope_parameters": ROPE},
    "qwen2": {"tie_word_embeddings": True, "rope_parameters": {**ROPE, "rope_theta": 1e6}},
    "qwen3": {"head_dim": 12, "rope_parameters": {**ROPE, "rope_theta": 1e6}},
    "gemma2": {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma3_text": {
        **GEMMA,
        "rope_parameters": {
            SLIDING: ROPE,
            FULL: {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
        },
    },
    "mixtral": {
        "head_dim": 12, "intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2,
        "rope_parameters": ROPE,
    },
    "qwen3_moe": {
        "head_dim": 12, "moe_intermediate_size": 20, "num_experts": 6, "num_experts_per_tok": 3,
        "norm_topk_prob": True, "rope_parameters": ROPE,
    },
}  # fmt: skip


def main(names: list[str]) -> None:
    for seed, (name, changes) in enumerate(FAMILIES.items()):
        if not names or name in names:
            write(FOLDER / name, make_model(name, changes, seed))


def make_model(name: str, changes: dict, seed: int) -> PreTrainedModel:
    """Weights are wide enough that logits differ clearly, and no norm scale is what changes nothing."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(name, **{**SHAPE, **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter_name, weight in model.named_parameters():
            if "norm" in parameter_name:
                usual = 0.0 if "gemma" in name else 1.0
                weight.uniform_(usual - 0.5, usual + 0.5)
            else:
                weight.normal_(0.0, 0.3 if parameter_name.endswith("bias") else weight.shape[-1] ** -0.5)
    return model


def write(folder: Path, model: PreTrainedModel) -> None:
    model.save_pretrained(folder)
    arrays = {}
    for index, length in enumerate(PROMPT_LENGTHS):
        generator = torch.Generator().manual_seed(index)
        prompt = torch.randint(0, model.config.vocab_size, (1, length), generator=generator)
        with torch.no_grad():
            arrays[f"logits_{index}"] = model(prompt).logits[0].numpy()
        arrays[f"prompt_{index}"] = prompt[0].numpy().astype(np.int32)
    np.savez_compressed(folder / "logits.npz", **arrays)


if __name__ == "__main__":
    main(sys.argv[1:])
