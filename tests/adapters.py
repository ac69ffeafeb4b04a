"""Random adapters, written as PEFT saves them, and the same ones merged into a model's weights, computed apart."""

import json

import numpy as np
from safetensors.numpy import save_file

from model.peft import CONFIG, WEIGHTS

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


def tensor_name(layer, target, matrix):
    block = "self_attn" if target in ATTENTION else "mlp"
    return f"base_model.model.model.layers.{layer}.{block}.{target}.lora_{matrix}.weight"


def widths(config, target):
    """Inputs and outputs of a matrix."""
    D, F, N, K, H = config.embed_dim, config.mlp_dim, config.num_heads, config.num_kv_heads, config.head_dim
    return {
        "q_proj": (D, N * H), "k_proj": (D, K * H), "v_proj": (D, K * H), "o_proj": (N * H, D),
        "gate_proj": (D, F), "up_proj": (D, F), "down_proj": (F, D),
    }[target]  # fmt: skip


def random_tensors(config, *, seed, rank, targets=ALL):
    """As large as the weights beside them, so that answers change."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for layer in range(config.num_layers):
        for target in targets:
            inputs, outputs = widths(config, target)
            a = rng.normal(size=(rank, inputs)) / np.sqrt(inputs)
            tensors[tensor_name(layer, target, "A")] = a.astype(np.float32)
            tensors[tensor_name(layer, target, "B")] = rng.normal(size=(outputs, rank)).astype(np.float32)
    return tensors


def save_adapter(folder, tensors, **fields):
    """Returns the folder, as text."""
    folder.mkdir(parents=True, exist_ok=True)
    rank = next(iter(tensors.values())).shape[0]
    targets = sorted({name.split(".")[-3] for name in tensors})
    plain = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets, "bias": "none"}
    (folder / CONFIG).write_text(json.dumps({**plain, **fields}))
    save_file(tensors, folder / WEIGHTS)
    return str(folder)


def merged(params, config, tensors, scale=1.0):
    """`params` with scale * B @ A added to what each is of."""
    K, H, R = config.num_kv_heads, config.head_dim, config.num_heads // config.num_kv_heads
    layers = {module: {name: np.array(leaf) if not isinstance(leaf, dict) else leaf for name, leaf in leaves.items()}
              for module, leaves in params["layers"].items()}  # fmt: skip
    for layer in range(config.num_layers):
        for target in ALL:
            if (name := tensor_name(layer, target, "A")) not in tensors:
                continue
            change = scale * (tensors[tensor_name(layer, target, "B")] @ tensors[name]).T  # [inputs, outputs]
            attention, mlp = layers["attention"], layers["mlp"]
            match target:
                case "q_proj":
                    attention["qkv"][layer, :, :, :R] += change.reshape(-1, K, R, H)
                case "k_proj":
                    attention["qkv"][layer, :, :, R] += change.reshape(-1, K, H)
                case "v_proj":
                    attention["qkv"][layer, :, :, R + 1] += change.reshape(-1, K, H)
                case "o_proj":
                    attention["out"][layer] += change.reshape(K * R, H, -1)
                case "gate_proj":
                    mlp["gate_up"][layer, :, 0] += change
                case "up_proj":
                    mlp["gate_up"][layer, :, 1] += change
                case "down_proj":
                    mlp["down"][layer] += change
    return {**params, "layers": layers}
