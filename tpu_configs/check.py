"""Check: a deployment's steps, compiled for a slice that is not here. The programs are those that a replica runs."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import jax

from kv.attention_check import check_attention
from model.card import GenerationDefaults, ModelCard, TextAssets
from model.quantization import choose_quantization
from serving.config import EngineConfig
from serving.engine.batch import StepShape
from serving.engine.build import limits_of, shapes_of, step_spec
from serving.engine.device_arrays import FlatWeights
from serving.engine.executables import Executables, num_compile_threads
from serving.engine.loaded_model import LoadedModel, attention_needs
from serving.engine.step import StepSpec
from serving.engine.step_program import StepState, abstract_state, compile_step
from serving.engine.useful_pages import useful_pages
from serving.errors import ConfigError
from sharding.mesh import make_mesh
from sharding.params import abstract_params
from sharding.rules import choose_rules
from sharding.sizes import device_bytes
from tpu_configs.chip import GIB
from tpu_configs.compiled import CompiledStep
from tpu_configs.deployment import Deployment
from tpu_configs.fit import check_fit, room_bytes
from tpu_configs.topology import describe_devices

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Ahead:
    """An engine's programs before they are compiled: everything abstract, on devices that are described."""

    deployment: Deployment
    spec: StepSpec
    shapes: tuple[StepShape, ...]
    weights: FlatWeights
    state: StepState
    weight_bytes: int
    page_bytes: int
    num_pages: int
    """With the null page."""

    @classmethod
    def of(cls, deployment: Deployment) -> "Ahead":
        """Raises ConfigError when it cannot fit, before anything is compiled."""
        check_fit(deployment)
        settings = deployment.settings
        mesh = make_mesh(deployment.mesh, describe_devices(deployment.slice))
        rules = choose_rules(deployment.model, deployment.mesh)
        model = rules.served(deployment.model)
        check_attention(*attention_needs(settings.engine, model, mesh, rules, settings.dtype, settings.max_seq_len))
        weights = abstract_params(model, mesh, rules, settings.dtype, choose_quantization(settings.quantize, None))
        card = ModelCard(settings.model, model, TextAssets("{}"), GenerationDefaults(()), "described")
        described = LoadedModel(card, mesh, rules, settings.dtype, weights)
        page_bytes = described.page_bytes(settings.engine)
        spec = step_spec(settings.engine, described)
        _, most = useful_pages(spec, limits_of(settings.engine))
        num_sets = len(spec.windows)  # a replica is told of pages of all of them
        num_pages = min(room_bytes(deployment) // page_bytes - 1, most) // num_sets * num_sets + 1
        return cls(
            deployment,
            spec,
            shapes_of(settings.engine, described),
            FlatWeights.of(described.forms()[1]),
            abstract_state(spec, described.pages(num_pages - 1, settings.engine)),
            described.num_bytes,
            page_bytes,
            num_pages,
        )

    @property
    def engine(self) -> EngineConfig:
        """With which a replica has these programs."""
        return replace(self.deployment.settings.engine, num_pages=(self.num_pages - 1) // len(self.spec.windows))

    @property
    def state_bytes(self) -> int:
        """Of the newest tokens and the sampler's state."""
        return device_bytes(self.state[1:])

    def compile(self, shape: StepShape, executables: Executables) -> CompiledStep:
        """Kept in `executables`, if they have a folder. Raises ConfigError when XLA finds that it does not fit."""
        try:
            compiled = compile_step(executables, self.spec, shape, self.weights, self.state)
        except jax.errors.JaxRuntimeError as error:
            raise self._too_large(shape, error) from error
        return CompiledStep.of(shape, compiled)

    def _too_large(self, shape: StepShape, error: Exception) -> Exception:
        if "RESOURCE_EXHAUSTED" not in str(error):
            return error
        wanted = str(error).split("RESOURCE_EXHAUSTED:")[-1].strip().splitlines()[0]
        return ConfigError(
            f"{self.deployment.name}: {shape} does not fit beside {self.weight_bytes / GIB:,.2f} GiB of weights and "
            f"{self.num_pages * self.page_bytes / GIB:,.2f} GiB of pages: {wanted} These two fit, so it is what the "
            "step needs besides; fewer slots, fewer chunk_tokens or another mesh need less."
        )


def compile_steps(
    ahead: Ahead, shapes: Sequence[StepShape], progress: Progress, save: str | None = None
) -> list[CompiledStep]:
    """In the order of `shapes`, one after another, while the next one is lowered. Programs are kept at the URL `save`,
    where replicas find them that have it as their compile cache."""
    executables = Executables(save, ahead.spec.mesh, are_here=False)
    steps, before = [], time.monotonic()
    with ThreadPoolExecutor(num_compile_threads(ahead.spec.mesh), "compile") as pool:
        for step in pool.map(lambda shape: ahead.compile(shape, executables), shapes):
            now = time.monotonic()
            steps.append(replace(step, compile_s=now - before))
            progress(f"compiled {step.shape} in {now - before:.1f} s")
            before = now
    return steps
