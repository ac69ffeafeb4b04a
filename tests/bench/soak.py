"""An hour at full pages, in steps instead of seconds: `python -m tests.bench.soak` (360,000 steps of 10 ms).

More is asked than the pages hold, all the time: both bands, shared beginnings, aborts, deadlines near and far, long and
short prompts and answers. The engine is the real one over steps that need no device, so every token is known. Checked
are the engine's books, each answer's tokens, that each request ends once, and that nothing has grown in the end.
"""

import argparse
import gc
import json
import random
import time
import types
from collections import Counter
from dataclasses import dataclass, field, replace

from serving.engine.api import EngineRequest, SequenceOutput
from serving.engine.build import TILE_TOKENS
from serving.engine.plan import Limits
from serving.errors import DeadlineExceeded, Overloaded
from serving.request import FinishReason, Priority, SamplingParams
from tests.engines import PAGE_SIZE, counted, counting_engine

STEP_S = 0.01
HOUR = 360_000
LIMITS = Limits(PAGE_SIZE, TILE_TOKENS, max_tiles=4, growth_tokens=0, patience=200, max_trips=4)
NUM_PAGES, NUM_SLOTS, MAX_WAITING = 120, 12, 24
CHECK_EVERY = 25


@dataclass
class Report:
    """What happened; counts of requests unless said otherwise."""

    steps: int = 0
    submitted: int = 0
    refused: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    full_steps: int = 0
    """Steps after which not one page was free."""
    mean_pages_used: float = 0.0
    """Of all, 0 to 1."""
    objects_early: int = 0
    """Objects that the engine holds when it is empty after a third of the steps, and in the end."""
    objects_late: int = 0
    seconds: float = 0.0


class Soak:
    """Drives one engine. Time is simulated: a step takes `STEP_S`."""

    def __init__(self, seed: int = 0) -> None:
        self.engine = counting_engine(LIMITS, num_slots=NUM_SLOTS, num_pages=NUM_PAGES, max_waiting=MAX_WAITING)
        self.report = Report()
        self._rng = random.Random(seed)
        self._num_steps = 0
        self._running: dict[str, tuple[EngineRequest, list[int]]] = {}

    def run(self, num_steps: int) -> Report:
        started, self._num_steps = time.perf_counter(), num_steps
        self._spend(num_steps // 3)
        self._drain()
        self.report.objects_early = count_objects(self.engine)
        self._spend(num_steps - num_steps // 3)
        self._drain()
        self.report.objects_late = count_objects(self.engine)
        stats = self.engine.stats
        self.report.preemptions, self.report.cached_tokens = stats.num_preemptions, stats.prefix_cache_hits
        self.report.seconds = round(time.perf_counter() - started, 1)
        return self.report

    def _spend(self, num_steps: int) -> None:
        for _ in range(num_steps):
            while self.engine.load.num_waiting < MAX_WAITING // 2 or self._rng.random() < 0.2:
                self._submit()
            if self._rng.random() < 0.05:
                self._abort(self._rng.choice(list(self._running)))
            self._step()
            free = self.engine.load.free_pages
            self.report.full_steps += free == 0
            self.report.mean_pages_used += (1 - free / NUM_PAGES) / self._num_steps

    def _drain(self) -> None:
        while self.engine.has_work:
            self._step()
        self.engine.check_integrity()
        load = self.engine.load
        assert not self._running, "some requests never ended"
        assert (load.free_pages, load.free_slots) == (NUM_PAGES, NUM_SLOTS), "pages or slots are lost"

    def _step(self) -> None:
        for output in self.engine.step(self.report.steps * STEP_S):
            self._see(output)
        self.report.steps += 1
        if self.report.steps % CHECK_EVERY == 0:
            self.engine.check_integrity()

    def _submit(self) -> None:
        """One request, or several answers to one prompt."""
        first = self._request(str(self.report.submitted))
        names = [f"{first.request_id}/{i}" for i in range(self._rng.choice([0, 0, 0, 3]))]
        for request in [first, *(replace(first, request_id=name, after=first.request_id) for name in names)]:
            self._submit_one(request)

    def _submit_one(self, request: EngineRequest) -> None:
        self.report.submitted += 1
        try:
            self.engine.submit(request)
        except Overloaded:
            self.report.refused += 1
        else:
            self._running[request.request_id] = request, []

    def _request(self, name: str) -> EngineRequest:
        rng = self._rng
        family = rng.randrange(6)  # prompts of a family begin alike
        prompt = [(family + 17 * i) % 50 for i in range(rng.choice([1, 7, 30, 60]))]
        prompt += [rng.randrange(50) for _ in range(rng.randrange(1, 30))]
        wait_s = rng.choice([None, None, 0.05, 1.0, 1e6])
        return EngineRequest(
            name,
            tuple(prompt),
            SamplingParams(
                temperature=0.0, max_tokens=rng.choice([1, 4, 20, 60]), stop_token_ids=(rng.randrange(500),)
            ),
            cache_salt=rng.choice(["", "", "tenant"]),
            priority=rng.choice([Priority.INTERACTIVE, Priority.BATCH]),
            deadline=None if wait_s is None else self.report.steps * STEP_S + wait_s,
        )

    def _abort(self, name: str) -> None:
        ended = self.engine.abort(name)
        assert ended is not None, "a running request was not known"
        self._see(ended)

    def _see(self, output: SequenceOutput) -> None:
        request, tokens = self._running[output.request_id]  # KeyError: news after the end
        tokens += output.token_ids
        self.report.tokens += len(output.token_ids)
        if output.finish_reason is not None:
            del self._running[output.request_id]
            self.report.ended[output.finish_reason.value] += 1
            _check_answer(request, tokens, output)


def _check_answer(request: EngineRequest, tokens: list[int], end: SequenceOutput) -> None:
    start, sampling = len(request.token_ids), request.sampling
    assert tokens == [counted(start + i) for i in range(len(tokens))], f"{request.request_id} has other tokens"
    match end.finish_reason:
        case FinishReason.LENGTH:
            assert len(tokens) == sampling.max_tokens
        case FinishReason.STOP:
            assert tokens[-1] in sampling.stop_token_ids
        case FinishReason.ERROR:
            assert isinstance(end.error, DeadlineExceeded) and not tokens


def count_objects(root: object) -> int:
    """Objects that can be reached from `root`, without code and what modules share."""
    shared = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.CodeType)
    seen, todo = {id(root)}, [root]
    while todo:
        for inner in gc.get_referents(todo.pop()):
            if id(inner) not in seen and not isinstance(inner, shared):
                seen.add(id(inner))
                todo.append(inner)
    return len(seen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=HOUR)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    report = Soak(options.seed).run(options.steps)
    print(json.dumps({**vars(report), "ended": dict(report.ended)}))


if __name__ == "__main__":
    main()
