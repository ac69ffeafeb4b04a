"""An engine without a model: its tokens can be computed by hand, its thread and its way of ending are real."""

import json
import queue
import threading
import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from model.card import GenerationDefaults, ModelCard, TextAssets
from model.config import ModelConfig
from serving.engine.api import (
    EngineRequest,
    EngineState,
    Prefilled,
    SequenceOutput,
    StepNews,
    StepOutput,
    StepStats,
    TokenLogprobs,
)
from serving.errors import DeadlineExceeded, EngineFailed, InvalidRequest, ModelNotFound
from serving.request import FinishReason, Load

END_ID = 256
VOCAB_SIZE = 257
END_TEXT = "<|end|>"
FAKE_NAME = "echo"
PREFIX_CACHE = {"prefix_cache_queries": 40, "prefix_cache_hits": 30}
HOST_CACHE = {"host_cache_queries": 18, "host_cache_hits": 8, "num_host_pages": 3}
GUESSES = {"num_drafts": 5, "num_draft_tokens": 20, "num_accepted_tokens": 13}
TIMES = {"step_host_s": 1.5, "step_device_wait_s": 4.5}
ACCEPTED_AT = (6, 4, 2, 1)
STEPS = {"step_tokens": (2, 3, *[0] * 12), "sum_step_tokens": 26}
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@dataclass
class _Sequence:
    request: EngineRequest
    token_ids: list[int] = field(default_factory=list)

    def next_id(self) -> int:
        if self.request.matcher is not None:
            return self._next_of_grammar(self.request.matcher)
        prompt, seed = self.request.token_ids, self.request.sampling.seed or 0
        skipped = 0 if self.request.adapter is None else self.request.adapter.place + 1
        return prompt[(len(self.token_ids) + seed + skipped) % len(prompt)]

    def _next_of_grammar(self, matcher) -> int:
        mask = np.unpackbits(np.frombuffer(matcher.native.compute_bitmask(), np.uint8), bitorder="little")
        lowest = int(np.flatnonzero(mask)[0])
        assert matcher.accept(lowest)
        return lowest


def logprobs_of(sequence):
    """Of the newest token: -1/8 for the first, -2/8 for the second, ...; its rivals are the bytes before it."""
    wanted = sequence.request.sampling.logprobs
    if wanted is None:
        return ()
    token, place = sequence.token_ids[-1], len(sequence.token_ids)
    rivals = tuple(((token - i) % VOCAB_SIZE, -(place + i) / 8) for i in range(wanted))
    return (TokenLogprobs(-place / 8, rivals),)


def prompt_logprobs_of(request):
    """Of token i of the prompt: -i/8 and rank i; its rivals are the bytes before it."""
    wanted = request.sampling.prompt_logprobs
    if wanted is None:
        return ()
    return tuple(
        TokenLogprobs(-place / 8, tuple(((token - i) % VOCAB_SIZE, -(place + i) / 8) for i in range(wanted)), place)
        for place, token in enumerate(request.token_ids)
        if place
    )


def embedding_of(request):
    """Of length 1: its first number is 3/5 for a prompt of an even length and 4/5 for an odd one, the last its sign."""
    even = len(request.token_ids) % 2 == 0
    return np.asarray([0.6, 0.0, 0.8] if even else [0.8, 0.0, -0.6], "<f4").tobytes()


class FakeEngineLoop:
    """Repeats its prompt: token i of the answer is prompt[(i + seed) % len(prompt)]. Implements EngineLoop.

    An answer that follows a grammar is made of the lowest tokens that it allows. An adapter skips as many
    tokens as its place says, counted from 1.

    One token per step and request; END_ID ends an answer as a model's EOS would.
    """

    def __init__(self, *, step_delay_s=0.0, max_seq_len=512, num_slots=64, num_adapters=0):
        self.max_seq_len = max_seq_len
        self.vocab_size = VOCAB_SIZE
        self.step_delay_s = step_delay_s
        self.num_steps = self.num_tokens_made = 0
        self.aborted: dict[str, int] = {}  # request id -> step at which it was let go
        self.traces: list[list] = []  # folder, step at the start, step at the end
        self.go = threading.Event()  # cleared: the next step waits
        self.go.set()
        self.step_s = 0.0
        self.num_steps_begun = 0
        self.num_adapters = num_adapters
        self.adapters: dict[int, str] = {}  # path by place
        self._num_slots = num_slots
        self._state = EngineState.STARTING
        self._inbox: queue.SimpleQueue = queue.SimpleQueue()
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._thread: threading.Thread | None = None

    @property
    def state(self):
        return self._state

    @property
    def failure(self):
        return "the fake engine failed" if self._state is EngineState.FAILED else ""

    @property
    def load(self):
        free = self._num_slots - len(self._running)
        return Load(len(self._running), len(self._waiting), free, self._num_slots, free, self._num_slots, 16)

    def start(self, on_step):
        self._state = EngineState.READY
        self._thread = threading.Thread(target=self._run, args=(on_step,), name="fake-engine", daemon=True)
        self._thread.start()

    def submit(self, request):
        self._inbox.put(request)

    def abort(self, request_id):
        self._inbox.put(request_id)

    def load_adapter(self, place, path, may_write=lambda: True):
        if path == "/nowhere":
            raise ModelNotFound("there is no adapter at /nowhere.", param="lora_path")
        self.go.wait()
        if may_write():
            self.adapters[place] = path

    def start_trace(self, folder):
        if folder == "/traces/full":
            raise InvalidRequest("no trace can be started: the disk is full.")
        self.traces.append([folder, self.num_steps, None])

    def stop_trace(self):
        self.traces[-1][2] = self.num_steps

    def fail(self):
        """What a step that raises does to an engine."""
        self._inbox.put(EngineState.FAILED)

    def stop(self):
        self._inbox.put(EngineState.STOPPED)
        self.go.set()
        if self._thread:
            self._thread.join()

    def _run(self, on_step):
        while self._state is EngineState.READY:
            outputs = self._read_inbox()
            if self._state is EngineState.READY:
                self.go.wait()
                outputs += self._step()
            if outputs:
                stats = StepStats(
                    num_steps=self.num_steps,
                    generation_tokens=self.num_tokens_made,
                    **PREFIX_CACHE,
                    **HOST_CACHE,
                    **GUESSES,
                    accepted_at=ACCEPTED_AT,
                    **TIMES,
                    **STEPS,
                )
                on_step(StepOutput(_as_news(outputs), self.load, stats))

    def _read_inbox(self):
        outputs = []
        block = not (self._running or self._waiting)
        while True:
            try:
                message = self._inbox.get(block=block)
            except queue.Empty:
                return outputs
            block = False
            if isinstance(message, EngineRequest):
                self._waiting.append(_Sequence(message))
            elif isinstance(message, EngineState):
                self._state = message
                return outputs + self._end_all()
            else:
                outputs += self._abort(message)

    def _abort(self, request_id):
        for group in (self._running, self._waiting):
            for sequence in list(group):
                if sequence.request.request_id == request_id:
                    group.remove(sequence)
                    self.aborted[request_id] = self.num_steps
                    return [SequenceOutput(request_id, (), FinishReason.ABORT)]
        return []

    def _end_all(self):
        ended = [*self._running, *self._waiting]
        self._running, self._waiting = [], deque()
        error = EngineFailed("the fake engine failed.")
        return [SequenceOutput(s.request.request_id, (), FinishReason.ERROR, error) for s in ended]

    def _step(self):
        late = self._drop_late()
        while self._waiting and len(self._running) < self._num_slots:
            self._running.append(self._waiting.popleft())
        if not self._running:
            return late
        time.sleep(self.step_delay_s)
        self.num_steps += 1
        outputs = [self._advance(sequence) for sequence in self._running]
        ended = {output.request_id for output in outputs if output.finish_reason}
        self._running = [s for s in self._running if s.request.request_id not in ended]
        self.num_tokens_made += len(outputs)
        return late + outputs

    def _drop_late(self):
        now = time.monotonic()
        late = [s for s in self._waiting if s.request.deadline is not None and s.request.deadline <= now]
        self._waiting = deque(s for s in self._waiting if s not in late)
        error = DeadlineExceeded("the fake engine was too slow.")
        return [SequenceOutput(s.request.request_id, (), FinishReason.ERROR, error) for s in late]

    def _advance(self, sequence):
        token_id = sequence.next_id()
        sequence.token_ids.append(token_id)
        reason = self._reason(sequence, token_id)
        prompt = prompt_logprobs_of(sequence.request) if len(sequence.token_ids) == 1 else ()
        name, logprobs = sequence.request.request_id, logprobs_of(sequence)
        vector = embedding_of(sequence.request) if sequence.request.embed else b""
        prefilled = Prefilled(0.25, 0.5, self.num_steps) if len(sequence.token_ids) == 1 else None
        return SequenceOutput(
            name, (token_id,), reason, logprobs=logprobs, prompt_logprobs=prompt, embedding=vector, prefilled=prefilled
        )

    def _reason(self, sequence, token_id):
        sampling = sequence.request.sampling
        stopped = sequence.request.matcher is not None and sequence.request.matcher.is_stopped
        if stopped or token_id in sampling.stop_token_ids or (token_id == END_ID and not sampling.ignore_eos):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(sequence.token_ids) == sampling.max_tokens else None


def _as_news(outputs):
    """As the engine tells them: who got tokens and nothing else stands in columns."""
    plain = [o for o in outputs if o.token_ids and o == SequenceOutput(o.request_id, o.token_ids)]
    others = tuple(o for o in outputs if o not in plain)
    return StepNews(others, [o.request_id for o in plain], [o.token_ids for o in plain])


def byte_tokenizer_json(num_bytes=END_ID) -> str:
    """Byte-level, without merges: the token ids of a text are its UTF-8 bytes, and the next id is special."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={letters[byte]: byte for byte in range(num_bytes)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_TEXT])
    return tokenizer.to_str()


def fake_card(template=CHAT_TEMPLATE, **generation) -> ModelCard:
    """The card that goes with FakeEngineLoop: a chat is the concatenation of its messages."""
    text = TextAssets(byte_tokenizer_json(), template, eos_token=END_TEXT)
    defaults = GenerationDefaults(eos_token_ids=(END_ID,), **generation)
    return ModelCard(FAKE_NAME, ModelConfig.tiny(vocab_size=VOCAB_SIZE), text, defaults, source="tests")


def echo(prompt: str, max_tokens: int) -> str:
    """The answer of FakeEngineLoop, by hand."""
    data = prompt.encode()
    answer = bytes(data[i % len(data)] for i in range(max_tokens))
    return answer.decode(errors="replace")


def sse_events(body: str) -> list:
    """The JSON of every event, "[DONE]" as it is."""
    frames = [frame.removeprefix("data: ") for frame in body.split("\n\n") if frame]
    return [frame if frame == "[DONE]" else json.loads(frame) for frame in frames]
