"""What is observed of requests: each metric's name, unit, labels and buckets.

Names, labels and buckets are vLLM's where it has them, so that dashboards and autoscalers plug in; ours: `podstream:`.
What a replica knows of itself is not observed here but collected from its status (`gateway.replica_collector`).
"""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, generate_latest

from serving.histogram import Histogram, Series
from serving.request import FinishReason, Phases, Usage

LABELS = ("model_name", "engine")
ENGINE = "0"
TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640,
          2560)  # fmt: skip
ITL_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
E2E_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
NUM_ANSWERS = (1, 2, 5, 10, 20)
TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))


class Metrics:
    """Owns the metric objects of one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._of_model: dict[str, ModelMetrics] = {}
        self._histograms: list[Histogram] = []
        self._ttft = self._histogram("time_to_first_token_seconds", "From the request to its first token.", TTFT_S)
        self._itl = self._histogram("inter_token_latency_seconds", "Time between two tokens of an answer.", ITL_S)
        self._e2e = self._histogram("e2e_request_latency_seconds", "From the request to its end.", E2E_S)
        self._prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a finished request.", TOKENS)
        self._generation = self._histogram("request_generation_tokens", "Tokens of a finished answer.", TOKENS)
        per_token = "Time per token of an answer after its first."
        self._tpot = self._histogram("request_time_per_output_token_seconds", per_token, ITL_S)
        self._decode = self._histogram("request_decode_time_seconds", "From the first token to the last.", E2E_S)
        self._computed = self._histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens that were not found in the prefix cache.", TOKENS
        )
        self._queue = self._histogram("request_queue_time_seconds", "From a request to its first slot.", E2E_S)
        self._prefill = self._histogram("request_prefill_time_seconds", "From its slot to its computed prompt.", E2E_S)
        self._inference = self._histogram("request_inference_time_seconds", "From its slot to its end.", E2E_S)
        longest = "Tokens of the longest of a request's answers."
        self._longest = self._histogram("request_max_num_generation_tokens", longest, TOKENS)
        self._max_tokens = self._histogram("request_params_max_tokens", "The max_tokens that were asked for.", TOKENS)
        self._n = self._histogram("request_params_n", "Answers that were asked for.", NUM_ANSWERS)
        self._finished = Counter(
            "vllm:request_success", "Requests that ended, by reason.", (*LABELS, "finished_reason"), registry=registry
        )

    def of_model(self, model: str) -> "ModelMetrics":
        """The metrics of one model, with their labels looked up once."""
        if model not in self._of_model:
            self._of_model[model] = self._with_labels(model, ENGINE)
        return self._of_model[model]

    def _with_labels(self, *labels: str) -> "ModelMetrics":
        return ModelMetrics(
            self._ttft.labels(*labels),
            self._itl.labels(*labels),
            self._e2e.labels(*labels),
            self._prompt.labels(*labels),
            self._generation.labels(*labels),
            self._tpot.labels(*labels),
            self._decode.labels(*labels),
            self._computed.labels(*labels),
            self._queue.labels(*labels),
            self._prefill.labels(*labels),
            self._inference.labels(*labels),
            self._longest.labels(*labels),
            self._max_tokens.labels(*labels),
            self._n.labels(*labels),
            {reason: self._finished.labels(*labels, reason.value) for reason in FinishReason},
        )

    def render(self) -> bytes:
        """All of it, and what else the registry has, in the text format of Prometheus."""
        return generate_latest(self.registry) + "".join([h.render() for h in self._histograms]).encode()

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        self._histograms.append(Histogram(f"vllm:{name}", text, LABELS, buckets))
        return self._histograms[-1]


class ModelMetrics:
    """What is observed of one model's requests."""

    def __init__(
        self,
        ttft: Series,
        itl: Series,
        e2e: Series,
        prompt: Series,
        generation: Series,
        tpot: Series,
        decode: Series,
        computed: Series,
        queue: Series,
        prefill: Series,
        inference: Series,
        longest: Series,
        max_tokens: Series,
        n: Series,
        finished: dict[FinishReason, Counter],
    ) -> None:
        self._ttft, self._itl, self._e2e = ttft, itl, e2e
        self._prompt, self._generation = prompt, generation
        self._tpot, self._decode, self._computed = tpot, decode, computed
        self._queue, self._prefill, self._inference = queue, prefill, inference
        self._longest, self._max_tokens, self._n = longest, max_tokens, n
        self._finished = finished

    def ask(self, n: int, max_tokens: int | None) -> None:
        """A request that is accepted; `max_tokens` is None when the client left it open."""
        self._n.observe(n)
        if max_tokens is not None:
            self._max_tokens.observe(max_tokens)

    def decoded(self, duration_s: float, num_tokens: int) -> None:
        """One answer took so long from its first token to the last, which are so many together."""
        self._decode.observe(duration_s)
        if num_tokens > 1:
            self._tpot.observe(duration_s / (num_tokens - 1))

    def spent(self, phases: Phases) -> None:
        """Where the time of one answer went."""
        self._queue.observe(phases.queue_s)
        self._prefill.observe(phases.prefill_s)
        self._inference.observe(phases.inference_s)

    def first_token(self, after_s: float) -> None:
        self._ttft.observe(after_s)

    def next_tokens(self, gap_s: float, num_tokens: int) -> None:
        """Tokens that arrive together share their gap evenly."""
        self._itl.observe(gap_s / num_tokens, num_tokens)

    def finish(self, reason: FinishReason, after_s: float, usage: Usage | None, longest: int | None = None) -> None:
        """`usage` is None for a request that ended without being counted; `longest` counts the tokens of the longest of
        its answers, if there are several."""
        self._finished[reason].inc()
        self._e2e.observe(after_s)
        if usage is not None:
            self._prompt.observe(usage.prompt_tokens)
            self._generation.observe(usage.completion_tokens)
            self._longest.observe(usage.completion_tokens if longest is None else longest)
            self._computed.observe(usage.prompt_tokens - usage.cached_tokens)
