"""Budget: where the memory of a device goes, what a step moves, and how fast that can be: predicted, not measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serving.engine.memory import RESERVE_SHARE
from tpu_configs.chip import GIB, MIB
from tpu_configs.compiled import CompiledStep
from tpu_configs.deployment import Deployment
from tpu_configs.pages import HeldPages
from tpu_configs.published import cases, predict
from tpu_configs.roofline import ASSUMED, Assumptions, StepTime, prefill_seconds, step_time
from tpu_configs.sizes import Sizes
from tpu_configs.traffic import link_bytes

CONTEXT = 2048  # of each row in a decode step's figures
ATTENTION, EXPERTS = "paged_attention", "experts"  # kernels; the second runs for gate, up and down
LENGTHS = (1024, 8192, 32_768)


@dataclass(frozen=True, slots=True)
class StepBudget:
    """A decode step of `rows` rows of CONTEXT tokens, on one device."""

    rows: int
    hbm_bytes: float
    floor_bytes: int
    """Weights and live keys and values, each once."""
    collectives: Mapping[str, tuple[int, float]]
    """By kind: how many, and bytes of what they give."""
    link_bytes: float
    """That one device sends."""
    kernel_calls: int
    time: StepTime
    tokens_per_s_chip: float

    @classmethod
    def of(cls, step: CompiledStep, deployment: Deployment, assumed: Assumptions = ASSUMED) -> "StepBudget":
        sizes, model, devices = Sizes.of(deployment), deployment.model, deployment.mesh.num_devices
        rows, live = step.shape.rows, step.shape.rows * sizes.kv_read_bytes(CONTEXT)
        kernels = {ATTENTION: live / model.num_layers, EXPERTS: sizes.expert_bytes(rows) / model.num_layers / 3}
        found = step.traffic(model.num_layers, kernels)
        sent = link_bytes(found.collectives, devices)
        hops = sum(count for count, _ in found.collectives.values()) * (devices - 1)
        time = step_time(deployment.slice.chip, found.hbm_bytes, sizes.flops(rows, CONTEXT), sent / 2, hops, assumed)
        per_chip = rows / time.total_s / deployment.chips
        return cls(
            rows, found.hbm_bytes, sizes.read_bytes(rows) + live, found.collectives, sent, found.kernel_calls, time,
            per_chip,
        )  # fmt: skip

    @property
    def over_floor(self) -> float:
        return self.hbm_bytes / self.floor_bytes


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes are of one device."""

    deployment: Deployment
    weight_bytes: int
    state_bytes: int
    page_bytes: int
    temporary_bytes: int
    program_bytes: int
    vmem_bytes: int
    smem_bytes: int
    compile_s: float
    steps: tuple[StepBudget, ...]
    programs: tuple[tuple[str, float, int, int], ...]
    """Name, seconds to compile, bytes of temporaries, bytes of the program."""

    @classmethod
    def of(
        cls, deployment: Deployment, weight_bytes: int, state_bytes: int, page_bytes: int, steps: Sequence[CompiledStep]
    ) -> "Budget":
        settings = deployment.settings
        decode = [step for step in steps if not step.shape.tiles and not step.shape.drafts]
        return cls(
            deployment,
            weight_bytes,
            state_bytes,
            page_bytes,
            max(step.temporary_bytes for step in steps),
            sum(step.program_bytes for step in steps),
            max(step.vmem_bytes for step in steps),
            4 * settings.slots * settings.pages_per_slot,
            sum(step.compile_s for step in steps),
            tuple(StepBudget.of(step, deployment) for step in decode),
            tuple((str(s.shape), s.compile_s, s.temporary_bytes, s.program_bytes) for s in steps),
        )

    @property
    def hbm_bytes(self) -> int:
        return self.deployment.slice.chip.device_hbm_bytes

    @property
    def reserve_bytes(self) -> int:
        return int(self.hbm_bytes * RESERVE_SHARE)

    @property
    def num_pages(self) -> int:
        """What is left."""
        taken = self.weight_bytes + self.state_bytes + self.temporary_bytes + self.program_bytes + self.reserve_bytes
        return max(0, (self.hbm_bytes - taken) // self.page_bytes)

    def sequences(self, tokens: int) -> int:
        """How many of so many tokens the pages hold, of one replica; the null page holds none."""
        return max(0, self.num_pages - 1) // HeldPages.of(self.deployment).num_held(tokens)

    @property
    def ttft_s(self) -> float:
        """Of a prompt of 1,024 tokens on an idle replica."""
        alone = self.steps[0].time.total_s
        return alone + prefill_seconds(self.deployment, 1024)

    def published(self) -> list[dict[str, Any]]:
        return [
            {"workload": case.workload, "published": case.value, "predicted": predict(self.deployment, case),
             "unit": case.unit, "source": case.source}
            for case in cases(self.deployment.name)
        ]  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in self.__slots__ if name not in ("deployment", "steps", "programs")}
        return {
            "deployment": self.deployment.name,
            "slice": self.deployment.slice.name,
            **own,
            "hbm_bytes": self.hbm_bytes,
            "num_pages": self.num_pages,
            "sequences": {str(tokens): self.sequences(tokens) for tokens in LENGTHS},
            "ttft_s": self.ttft_s,
            "decode_steps": [
                {"rows": step.rows, "context": CONTEXT, "hbm_bytes": step.hbm_bytes, "floor_bytes": step.floor_bytes,
                 "collectives": {k: {"count": n, "bytes": b} for k, (n, b) in step.collectives.items()},
                 "link_bytes": step.link_bytes, "step_s": step.time.total_s,
                 "tokens_per_s_chip": step.tokens_per_s_chip}
                for step in self.steps
            ],
            "programs": [
                {"name": name, "compile_s": seconds, "temporary_bytes": temporaries, "program_bytes": size}
                for name, seconds, temporaries, size in self.programs
            ],
            "published": self.published(),
            "assumed": ASSUMED.lines(),
        }  # fmt: skip


def memory_rows(budget: Budget) -> list[tuple[str, str, str]]:
    """HBM of one device, for people."""
    held = budget.hbm_bytes
    pages = budget.num_pages * budget.page_bytes
    holds = ", ".join(f"{budget.sequences(tokens):,} of {tokens // 1024}k" for tokens in LENGTHS)
    parts = (
        ("weights", budget.weight_bytes, ""),
        ("KV pages", pages, f"{budget.num_pages:,} pages of {budget.deployment.settings.page_size}: {holds} sequences"),
        ("sampler's state", budget.state_bytes, ""),
        ("temporaries", budget.temporary_bytes, "of the hungriest step"),
        ("programs", budget.program_bytes, f"{len(budget.programs)} of them"),
        ("reserve", budget.reserve_bytes, ""),
        ("HBM of a device", held, ""),
    )
    return [(name, f"{size / GIB:,.2f} GiB", f"{size / held:6.1%}  {note}".rstrip()) for name, size, note in parts]


def step_rows(budget: Budget) -> list[tuple[str, ...]]:
    """Decode steps, for people."""
    header = (
        "rows",
        "HBM GB",
        "floor GB",
        "ratio",
        "links MB",
        "step ms",
        "memory",
        "products",
        "links",
        "tokens/s/chip",
    )
    rows = [
        (
            f"{step.rows:,}",
            f"{step.hbm_bytes / 1e9:,.2f}",
            f"{step.floor_bytes / 1e9:,.2f}",
            f"{step.over_floor:.3f}",
            f"{step.link_bytes / 1e6:,.2f}",
            f"{step.time.total_s * 1e3:,.2f}",
            f"{step.time.memory_s * 1e3:,.2f}",
            f"{step.time.compute_s * 1e3:,.2f}",
            f"{step.time.links_s * 1e3:,.2f}",
            f"{step.tokens_per_s_chip:,.0f}",
        )
        for step in budget.steps
    ]
    return [header, *rows]


def core_lines(budget: Budget) -> list[str]:
    chip = budget.deployment.slice.chip
    return [
        f"VMEM: {budget.vmem_bytes / MIB:,.1f} of {chip.vmem_mib} MiB for the operation that takes most",
        f"SMEM: {budget.smem_bytes / 1024:,.0f} of {chip.smem_mib * 1024:,} KiB for the page table of all slots",
    ]
