"""Host time of one engine step, with a device step that takes no time: what is left is ours."""

import time

import numpy as np

from kv.page_pool import PagePool
from model.config import ModelConfig
from serving.engine.api import EngineRequest
from serving.engine.batch import step_shapes
from serving.engine.engine import Engine
from serving.engine.plan import Limits
from serving.engine.prompt_logprobs import StepLogprobs
from serving.engine.step import StepSpec
from serving.request import SamplingParams

PAGE_SIZE, CONTEXT, MAX_TILES, TILE_TOKENS = 16, 2_048, 8, 32


class NullPrograms:
    """Stands where `Programs` stands: the same shapes and the same packed upload, but nothing is computed."""

    draft = None

    def __init__(self, num_slots: int) -> None:
        self.spec = StepSpec(ModelConfig.tiny(), None, num_slots, CONTEXT // PAGE_SIZE, TILE_TOKENS)  # type: ignore[arg-type]
        self.shapes = step_shapes(num_slots, MAX_TILES)
        self._tokens_RI = np.ones((num_slots, 1), np.int32)

    def run(self, shape: object, packed: object, masks: object = None) -> tuple[np.ndarray, StepLogprobs]:
        return self._tokens_RI, StepLogprobs(None)  # type: ignore[arg-type]  # nobody asks


def host_microseconds_per_step(num_running: int, num_steps: int = 300) -> float:
    """Median over decode steps with `num_running` sequences, in microseconds."""
    engine = Engine(
        NullPrograms(num_running),  # type: ignore[arg-type]
        PagePool(num_running * CONTEXT // PAGE_SIZE + 1),
        Limits(PAGE_SIZE, TILE_TOKENS, MAX_TILES),
        eos_token_ids=(),
        max_seq_len=CONTEXT,
        max_waiting=num_running,
        draw_seed=lambda bits: 0,
    )
    greedy = SamplingParams(temperature=0.0)
    for i in range(num_running):
        engine.submit(EngineRequest(str(i), (1,) * 100, greedy))
    while engine.load.num_waiting:
        engine.step()
    times = []
    for _ in range(num_steps):
        started = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - started)
    return round(sorted(times)[len(times) // 2] * 1e6, 1)
