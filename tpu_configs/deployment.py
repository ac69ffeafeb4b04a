"""Deployment: a model on a slice, in some precision, on a mesh. Plain data; imports no JAX."""

from collections.abc import Mapping
from dataclasses import dataclass

from model.config import ModelConfig
from serving.config import EngineConfig
from serving.errors import ConfigError
from sharding.spec import MeshSpec
from tpu_configs.slice import Slice

MAX_SEQ_LEN = 8192


@dataclass(frozen=True, slots=True)
class Settings:
    """The keys of a file in `deployments/`. Those of the engine mean what they mean in `serving.config`."""

    model: str
    """A file in `models/`, or a path to a `config.json`."""
    slice: str
    mesh: str
    """Of one replica: a slice may hold several."""
    dtype: str = "bfloat16"
    quantize: str | None = None
    kv_dtype: str | None = None
    slots: int = 128
    page_size: int = 128
    max_seq_len: int = MAX_SEQ_LEN
    chunk_tokens: int = 512
    decode_steps: int = 8

    @property
    def engine(self) -> EngineConfig:
        """What a replica would be told."""
        return EngineConfig(
            self.model,
            mesh=self.mesh,
            dtype=self.dtype,
            num_slots=self.slots,
            page_size=self.page_size,
            max_seq_len=self.max_seq_len,
            chunk_tokens=self.chunk_tokens,
            decode_steps=self.decode_steps,
            quantize=self.quantize,
            kv_dtype=self.kv_dtype,
        )

    @property
    def kv_type(self) -> str:
        """Type of cached keys and values."""
        return self.kv_dtype or self.dtype

    @property
    def pages_per_slot(self) -> int:
        return -(-self.max_seq_len // self.page_size)


@dataclass(frozen=True, slots=True)
class Deployment:
    """Settings whose names are looked up, checked across each other."""

    name: str
    settings: Settings
    model: ModelConfig
    slice: Slice

    def __post_init__(self) -> None:
        self.settings.engine  # noqa: B018  # has checks of its own
        if self.mesh.num_devices != self.mesh.tensor:
            raise ConfigError(f"{self.name}: mesh {self.mesh} is not planned for yet; give tensor alone.")
        devices, held = self.mesh.num_devices, self.slice.num_devices
        if held % devices:
            raise ConfigError(
                f"{self.name}: mesh {self.mesh} needs {devices} devices, which do not divide the {held} of slice "
                f"{self.slice.name}; possible: {', '.join(map(str, _divisors(held)))}."
            )
        if self.settings.max_seq_len > self.model.max_seq_len:
            raise ConfigError(
                f"{self.name}: max_seq_len {self.settings.max_seq_len:,} is more than the context of "
                f"{self.settings.model}, {self.model.max_seq_len:,}."
            )
        self._check_division()
        self._check_scalar_memory()
        self._check_one_byte_pages()

    @property
    def mesh(self) -> MeshSpec:
        return MeshSpec.parse(self.settings.mesh)

    @property
    def replicas(self) -> int:
        """Engines on one slice."""
        return self.slice.num_devices // self.mesh.num_devices

    @property
    def chips(self) -> float:
        """Of one replica; half a chip where a chip is two devices."""
        return self.mesh.num_devices / self.slice.chip.devices

    def _check_division(self) -> None:
        """What does not divide would be kept whole on every device, and its memory and time with it."""
        split, sizes = self.mesh.tensor, split_sizes(self.model)
        for what, size in sizes.items():
            if size % split:
                fits = [n for n in range(1, split) if all(s % n == 0 for s in sizes.values())]
                raise ConfigError(
                    f"{self.name}: mesh tensor={split} does not divide the {size:,} {what} of {self.settings.model}; "
                    f"possible: {', '.join(map(str, fits))}."
                )

    def _check_scalar_memory(self) -> None:
        """Kernels read the page table from scalar memory: the rows of the largest step."""
        slots, pages = self.settings.slots, self.settings.pages_per_slot
        needed, held = 4 * slots * pages, self.slice.chip.smem_mib << 20
        if needed > held:
            raise ConfigError(
                f"{self.name}: the page table of {slots:,} slots with {pages:,} pages is {needed:,} bytes, the scalar "
                f"memory of {self.slice.chip.title} {held:,}; take longer pages, fewer slots or a smaller max_seq_len."
            )

    def _check_one_byte_pages(self) -> None:
        heads, split = self.model.num_kv_heads, self.mesh.tensor
        if self.settings.kv_type in ("int8", "fp8") and heads // split < 2:
            raise ConfigError(
                f"{self.name}: {self.settings.kv_type} pages need two KV heads per device, mesh tensor={split} leaves "
                f"{heads // split} of {heads}; take bfloat16 pages or at most tensor={max(heads // 2, 1)}."
            )


def split_sizes(model: ModelConfig) -> Mapping[str, int]:
    """What a mesh's tensor axis must divide."""
    return {
        "KV heads": model.num_kv_heads,
        "query heads": model.num_heads,
        "rows of the vocabulary": model.vocab_size,
        "columns of the MLP": model.mlp_dim,
    }


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
