"""Sizes: bytes and operations of a model on one device, from its numbers alone. Imports no JAX.

`tests/tpu_configs/test_sizes.py` holds them against the arrays that are served.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from model.config import ModelConfig
from model.quantization import Quantization
from tpu_configs.deployment import Deployment

BYTES = {"float32": 4, "bfloat16": 2, "int8": 1, "fp8": 1}
LANES = 128  # a row of a TPU's memory, which a head fills up
SCALE_BYTES = 2  # of int8 pages, for each token and KV head


@dataclass(frozen=True, slots=True)
class Matrix:
    """Weights of one kind, all layers together."""

    name: str
    count: int
    """Numbers in it."""
    outputs: int
    """How many outputs have a scale each, where it is int8."""
    of_experts: bool = False
    of_vocabulary: bool = False


def matrices(model: ModelConfig) -> Iterator[Matrix]:
    """Everything that is split over a mesh's tensor axis, biases aside."""
    L, D, F, V = model.num_layers, model.embed_dim, model.mlp_dim, model.vocab_size
    N, K, H, Z = model.num_heads, model.num_kv_heads, model.head_dim, max(model.num_experts, 1)
    has_experts = model.num_experts > 0
    yield Matrix("qkv", L * D * (N + 2 * K) * H, L * (N + 2 * K) * H)
    yield Matrix("out", L * N * H * D, L * D)
    yield Matrix("gate_up", L * Z * D * 2 * F, L * Z * 2 * F, has_experts)
    yield Matrix("down", L * Z * F * D, L * Z * D, has_experts)
    yield Matrix("embed", V * D, V, of_vocabulary=True)
    if not model.tie_embeddings:
        yield Matrix("head", V * D, V, of_vocabulary=True)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of one device of a deployment."""

    model: ModelConfig
    tensor: int
    """Devices that share the matrices."""
    dtype: str
    quantize: str | None
    kv_type: str

    @classmethod
    def of(cls, deployment: Deployment) -> "Sizes":
        settings = deployment.settings
        return cls(deployment.model, deployment.mesh.tensor, settings.dtype, settings.quantize, settings.kv_type)

    @property
    def num_params(self) -> int:
        """Of the whole model, norms and biases aside."""
        return sum(matrix.count for matrix in matrices(self.model))

    @property
    def weight_bytes(self) -> int:
        return sum(self._bytes(matrix) for matrix in matrices(self.model)) + self._whole_bytes()

    def read_bytes(self, rows: int) -> int:
        """Of weights, in a decode step of so many rows. A table of tokens is looked up, not read; of experts those
        that some row goes to, if rows choose evenly."""
        others = (
            self._bytes(matrix)
            for matrix in matrices(self.model)
            if not matrix.of_experts and (matrix.name != "embed" or self.model.tie_embeddings)
        )
        return sum(others) + self.expert_bytes(rows) + self._whole_bytes()

    def expert_bytes(self, rows: int) -> int:
        """Of those, what experts' matrices are."""
        return sum(
            int(self._bytes(one) * self._share_of_experts(rows)) for one in matrices(self.model) if one.of_experts
        )

    def _share_of_experts(self, rows: int) -> float:
        """That at least one of so many rows goes to."""
        model = self.model
        return 1 - (1 - model.experts_per_token / model.num_experts) ** rows if model.num_experts else 1.0

    @property
    def kv_token_bytes(self) -> int:
        """Of one token's keys and values in all layers."""
        heads = self.model.num_kv_heads // self.tensor
        width = -(-self.model.head_dim // LANES) * LANES
        per_head = width * BYTES[self.kv_type] + (SCALE_BYTES if self.kv_type == "int8" else 0)
        return 2 * self.model.num_layers * heads * per_head

    def kv_read_bytes(self, context: float) -> int:
        """Of keys and values, for one row with so many tokens: layers with a window read no further back."""
        windows = self.model.windows or (None,) * self.model.num_layers
        seen = sum(context if window is None else min(context, window) for window in windows)
        return int(self.kv_token_bytes / self.model.num_layers * seen)

    def flops(self, tokens: float, context: float) -> float:
        """To compute so many tokens that see `context` tokens each: products with weights, scores and values."""
        model = self.model
        share = 1.0 if not model.num_experts else model.experts_per_token / model.num_experts
        active = sum(
            matrix.count * (share if matrix.of_experts else 1.0)
            for matrix in matrices(model)
            if matrix.name != "embed" or model.tie_embeddings
        )
        windows = model.windows or (None,) * model.num_layers
        seen = sum(context if window is None else min(context, window) for window in windows)
        attention = 4 * model.num_heads * model.head_dim * seen
        return tokens * (2 * active + attention) / self.tensor

    def _bytes(self, matrix: Matrix) -> int:
        """Of this device's part, scales included."""
        width, scales = BYTES[self.dtype], 0
        if self.quantize is None:
            return matrix.count * width // self.tensor
        group = Quantization.parse(self.quantize).matrices.group
        if group is None or matrix.of_vocabulary:
            scales = matrix.outputs if matrix.name in ("out", "down") else matrix.outputs // self.tensor
            return matrix.count // self.tensor + scales * width
        return matrix.count // self.tensor // 2 + matrix.count // group // self.tensor * width

    def _whole_bytes(self) -> int:
        """What is kept on every device, and the biases."""
        model = self.model
        per_layer = model.embed_dim * (4 if model.sandwich_norms else 2)
        per_layer += 2 * model.head_dim if model.qk_norm else 0
        per_layer += model.embed_dim * model.num_experts
        per_layer += (model.num_heads + 2 * model.num_kv_heads) * model.head_dim // self.tensor if model.qkv_bias else 0
        return (model.num_layers * per_layer + model.embed_dim) * BYTES[self.dtype]
