"""Published: what others have measured, and what the roofline predicts for the same case."""

from dataclasses import dataclass

from serving.errors import ConfigError
from tpu_configs.catalog import FOLDER
from tpu_configs.deployment import Deployment
from tpu_configs.fit import sequences
from tpu_configs.roofline import ASSUMED, Assumptions, decode_step, prefill_seconds
from tpu_configs.schema import read_table, read_toml

UNITS = {"decode": "tokens/s/chip", "requests": "requests/s", "tokens": "tokens/s"}


@dataclass(frozen=True, slots=True)
class Case:
    """A table of `published.toml`."""

    deployment: str
    kind: str
    value: float
    source: str
    rows: int = 0
    """Sequences at once; 0 for as many as fit."""
    context: int = 0
    prompt: int = 0
    answer: int = 0

    def __post_init__(self) -> None:
        if self.kind not in UNITS:
            raise ConfigError(f"published case of {self.deployment}: kind {self.kind!r} is not {', '.join(UNITS)}.")

    @property
    def unit(self) -> str:
        return UNITS[self.kind]

    @property
    def workload(self) -> str:
        if self.kind == "decode":
            return f"decode, {self.rows} rows of {self.context:,} tokens on each replica"
        at_once = f", {self.rows} at once" if self.rows else ""
        return f"prompts of {self.prompt:,}, answers of {self.answer:,}{at_once}"


def cases(deployment: str) -> tuple[Case, ...]:
    """Of a deployment's name."""
    path = FOLDER / "published.toml"
    tables = read_toml(path)["case"]
    found = (read_table(Case, table, f"{path.name} case {number}") for number, table in enumerate(tables, start=1))
    return tuple(case for case in found if case.deployment == deployment)


def predict(deployment: Deployment, case: Case, assumed: Assumptions = ASSUMED) -> float:
    """In the unit of the case. Prompts and answers share a device's time, rows as many as pages and slots hold."""
    if case.kind == "decode":
        return case.rows / decode_step(deployment, case.rows, case.context, assumed).total_s / deployment.chips
    context = case.prompt + case.answer // 2
    held = min(sequences(deployment, context), deployment.settings.slots)
    rows = min(held, -(-case.rows // deployment.replicas)) if case.rows else held
    token_s = decode_step(deployment, rows, context, assumed).total_s / rows
    request_s = case.answer * token_s + prefill_seconds(deployment, case.prompt, assumed)
    per_slice = deployment.replicas / request_s
    return per_slice if case.kind == "requests" else per_slice * case.answer
