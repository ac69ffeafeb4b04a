"""What XLA says of a step that it compiled for a TPU."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from serving.engine.batch import StepShape
from tpu_configs.hlo import Hlo, Instruction
from tpu_configs.traffic import Traffic, step_traffic

_SCOPED_VMEM = re.compile(r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"\d+","size":"(\d+)"')


@dataclass(frozen=True, slots=True)
class CompiledStep:
    """Bytes are of one device."""

    shape: StepShape
    temporary_bytes: int
    """Beside arguments and what is written in their place."""
    program_bytes: int
    aliased_bytes: int
    """Results that lie where donated arguments lay."""
    vmem_bytes: int
    """Of the operation that takes most for itself."""
    hlo: Hlo = field(repr=False)
    compile_s: float = 0.0
    """From the program before it to this one; 0 where nobody took the time."""

    @classmethod
    def of(cls, shape: StepShape, compiled: Any) -> "CompiledStep":
        """`compiled` is a `jax.stages.Compiled`."""
        memory, text = compiled.memory_analysis(), compiled.as_text()
        return cls(
            shape,
            int(memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes),
            int(memory.generated_code_size_in_bytes),
            int(memory.alias_size_in_bytes),
            max(map(int, _SCOPED_VMEM.findall(text)), default=0),
            Hlo.parse(text),
        )

    def traffic(self, num_layers: int, kernel_bytes: Mapping[str, float]) -> Traffic:
        """Of one token for each row, or of a mixed step; for `kernel_bytes` see `step_traffic`."""

        def trips(loop: Instruction) -> int:
            """The loop over layers is named (`model.decoder`); one over trips or edits counts once."""
            return loop.known_trips or (num_layers if LAYERS in loop.op_name.split("/") else 1)

        return step_traffic(self.hlo, trips, kernel_bytes)


LAYERS = "layers"
"""`jax.named_scope` of the scan over them."""
