"""EngineThread: the one thread that owns an Engine.

1. Others put submissions and aborts into the inbox; nobody else touches the engine.
2. The thread empties the inbox. It waits there when the engine is idle, and while the device is busy with the last step
   for long enough: whoever comes meanwhile is in the next one.
3. It runs one step: dispatch the next device call, read the tokens of the one before.
4. News of the step, and how full the engine is, go to `on_step` as one value.
5. A step that raises fails the requests that had begun, and the engine starts anew with empty pages: what lies on the
   device is not to be trusted. After `MAX_FAILURES` in a row without a token in between it fails for good.
   What the last steps planned is written to a file, also when the thread itself crashes.

Where several hosts share a mesh, this is the thread of host 0: the others hear what it takes in before each step, and
there a step that raises is the end of them all, since what the others have on their devices is unknown.
"""

import dataclasses
import logging
import queue
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

from serving.engine import trace
from serving.engine.adapter_write import AdapterWrite
from serving.engine.api import EngineRequest, EngineState, SequenceOutput, StepNews, StepOutput, StepStats
from serving.engine.engine import Engine
from serving.engine.inputs import Command, Peers, StepInputs
from serving.errors import EngineFailed, ServiceError
from serving.request import SEED_BITS, FinishReason, Load

logger = logging.getLogger(__name__)

MAX_FAILURES = 3


class _Stop:
    """Inbox message: end the thread."""


_Message = Command | AdapterWrite | _Stop


class EngineThread:
    """Implements `serving.engine.api.EngineLoop`."""

    def __init__(
        self,
        engine: Engine,
        compiles_after_ready: Callable[[], int],
        crash_folder: Path | None = None,
        peers: Peers | None = None,
    ) -> None:
        """What a crash leaves behind goes to `crash_folder`, or where this machine keeps temporary files. `peers` are
        the other hosts of the mesh."""
        self._engine = engine
        self._peers = peers
        self._crash_folder = crash_folder or Path(tempfile.gettempdir()) / "podstream-crashes"
        self._compiles_after_ready = compiles_after_ready
        self._inbox: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        self._state = EngineState.STARTING
        self._load = engine.load
        self._tracing = False
        self._step_began = 0.0
        self._num_steps_begun = 0
        self._num_failures = 0
        """Steps that raised since the last token."""
        self._thread: threading.Thread | None = None

    @property
    def state(self) -> EngineState:
        """A lost host ends all: the step in progress may wait for it for ever."""
        return EngineState.FAILED if self._peers is not None and self._peers.failure else self._state

    @property
    def failure(self) -> str:
        if self._peers is not None and self._peers.failure:
            return self._peers.failure
        return "the engine failed; its log says why" if self._state is EngineState.FAILED else ""

    @property
    def max_seq_len(self) -> int:
        return self._engine.max_seq_len

    @property
    def vocab_size(self) -> int:
        return self._engine.vocab_size

    @property
    def load(self) -> Load:
        return self._load

    @property
    def step_s(self) -> float:
        began = self._step_began
        return time.monotonic() - began if began else 0.0

    @property
    def num_steps_begun(self) -> int:
        return self._num_steps_begun

    @property
    def num_adapters(self) -> int:
        return 0 if self._engine.adapters is None else self._engine.adapters.num_adapters

    def load_adapter(self, place: int, path: str, may_write: Callable[[], bool] = lambda: True) -> None:
        assert self._engine.adapters is not None, "there is no place for an adapter"
        message = AdapterWrite.read(self._engine.adapters, place, path, may_write)
        if self._thread is None:  # nobody owns the engine yet
            message.run(self._engine.write_adapter)
        else:
            self._inbox.put(message)
        message.wait()

    def start(self, on_step: Callable[[StepOutput], None]) -> None:
        self._thread = threading.Thread(target=self._live, args=(on_step,), name="engine", daemon=True)
        self._state = EngineState.READY
        self._thread.start()

    def submit(self, request: EngineRequest) -> None:
        self._inbox.put(request)

    def abort(self, request_id: str) -> None:
        self._inbox.put(request_id)

    def start_trace(self, folder: str) -> None:
        trace.start_trace(folder)
        self._tracing = True

    def stop_trace(self) -> None:
        self._tracing = False
        trace.stop_trace()

    def stop(self) -> None:
        self._inbox.put(_Stop())
        if self._thread is not None and not (self._peers is not None and self._peers.failure):
            self._thread.join()

    def _live(self, on_step: Callable[[StepOutput], None]) -> None:
        """A crash outside a step has nobody to raise to: the state tells, and the replica ends its requests."""
        try:
            self._run(on_step)
        except Exception:
            logger.exception("the engine's thread crashed; its requests fail and it takes no more")
            self._state = EngineState.FAILED
            self._dump_steps()
        while not self._inbox.empty():  # nobody should wait for what will not happen
            if isinstance(message := self._inbox.get_nowait(), AdapterWrite):
                message.refuse(EngineFailed("the engine has ended."))

    def _run(self, on_step: Callable[[StepOutput], None]) -> None:
        if self._peers is not None:
            self._engine.digest = 0
        while True:
            commands, stopping = self._read_inbox()
            inputs = StepInputs(commands, time.monotonic(), self._engine.took_s)
            steps = self._state is EngineState.READY and not stopping
            if steps and self._peers is not None:
                inputs = dataclasses.replace(inputs, commands=tuple(map(_with_seed, commands)))
                self._peers.send(inputs)
            ends = [ended for command in inputs.commands if (ended := self._take_in(command)) is not None]
            news = self._step(inputs) if steps else StepNews()
            if stopping:
                ends += self._engine.fail_all(EngineFailed("the engine is stopping."))
                self._state = EngineState.STOPPED
                if self._peers is not None:
                    self._peers.stop()
            self._load = self._engine.load
            if ends or news:
                on_step(StepOutput(news.after(ends), self._load, self._stats()))
            if stopping:
                return

    def _stats(self) -> StepStats:
        return dataclasses.replace(self._engine.stats, num_compiles_after_ready=self._compiles_after_ready())

    def _step(self, inputs: StepInputs) -> StepNews:
        self._num_steps_begun += 1
        self._step_began = time.monotonic()
        try:
            return self._run_step(inputs)
        finally:
            self._step_began = 0.0

    def _run_step(self, inputs: StepInputs) -> StepNews:
        try:
            with trace.traced_step(self._engine.stats.num_steps) if self._tracing else nullcontext():
                news = self._engine.step(inputs.now, inputs.took_s)
        except Exception as error:
            logger.exception("the step failed")
            self._dump_steps()
            return StepNews(self._recover(_step_failed(error)))
        if news.has_tokens:
            self._num_failures = 0
        if self._peers is not None and self._engine.digest is not None:
            self._peers.check(self._engine.digest)
        return news

    def _recover(self, failed: EngineFailed) -> tuple[SequenceOutput, ...]:
        self._num_failures += 1
        if self._peers is not None:
            self._peers.fail(str(failed))
            failed = EngineFailed(self._peers.failure)
        elif self._num_failures < MAX_FAILURES:
            try:
                outputs = self._engine.recover(failed)
            except Exception:
                logger.exception("the device cannot be set up anew")
            else:
                logger.error("%d requests failed with the step; the engine goes on with empty pages", len(outputs))
                return outputs
        logger.error("failed %d times without a token in between: this engine takes no more", self._num_failures)
        self._state = EngineState.FAILED
        return self._engine.fail_all(failed)

    def _dump_steps(self) -> None:
        """A full disk must not hide the failure itself."""
        ring = self._engine.ring
        try:
            path = ring.dump(self._crash_folder)
        except OSError as error:
            logger.error("the last %d steps cannot be written to %s: %s", len(ring.records), self._crash_folder, error)
        else:
            logger.error("what the last %d steps planned is in %s", len(ring.records), path)

    def _read_inbox(self) -> tuple[tuple[Command, ...], bool]:
        """All messages that are there, and whether to stop behind them; waits for one when there is nothing to do, and
        for more when there is time."""
        commands: list[Command] = []
        for message in self._messages():
            if isinstance(message, _Stop):
                return tuple(commands), True
            if isinstance(message, AdapterWrite):  # a place that nobody uses: its turn among commands does not matter
                self._write_adapter(message)
            else:
                commands.append(message)
        return tuple(commands), False

    def _messages(self) -> Iterator[_Message]:
        if self._state is not EngineState.READY or not self._engine.has_work:
            yield self._inbox.get()
        while True:
            # Other hosts get the inputs over a network that nobody has measured.
            wait_s = self._engine.spare_s if self._peers is None else 0.0
            try:
                yield self._inbox.get(block=wait_s > 0, timeout=wait_s)
            except queue.Empty:
                return

    def _write_adapter(self, message: AdapterWrite) -> None:
        if self._state is EngineState.READY:
            message.run(self._engine.write_adapter)
        else:
            message.refuse(EngineFailed("the engine has failed and takes no more adapters."))

    def _take_in(self, command: Command) -> SequenceOutput | None:
        if not isinstance(command, str) and self._state is not EngineState.READY:
            failed = EngineFailed("the engine has failed and takes no more requests.")
            return SequenceOutput(command.request_id, (), FinishReason.ERROR, failed)
        return take_in(self._engine, command)


def take_in(engine: Engine, command: Command) -> SequenceOutput | None:
    """Queue a request or abort one; returns its end, if that is it."""
    if isinstance(command, str):
        return engine.abort(command)
    try:
        engine.submit(command)
    except ServiceError as error:
        return SequenceOutput(command.request_id, (), FinishReason.ERROR, error)
    except Exception:  # of one request, before it was queued
        logger.exception("request %s cannot be queued", command.request_id)
        failed = EngineFailed("the request could not be queued; the log of the replica says why.")
        return SequenceOutput(command.request_id, (), FinishReason.ERROR, failed)
    return None


def _with_seed(command: Command) -> Command:
    """A request without a seed gets one here, since each host would draw its own."""
    if isinstance(command, str) or command.sampling.seed is not None:
        return command
    sampling = dataclasses.replace(command.sampling, seed=secrets.randbits(SEED_BITS))
    return dataclasses.replace(command, sampling=sampling)


def _step_failed(error: Exception) -> EngineFailed:
    """What the requests of a failed step are told."""
    return EngineFailed(f"the device step failed ({type(error).__name__}: {error}); the request may be sent again.")
