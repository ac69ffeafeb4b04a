"""RunningTable: the requests that the engine is working on, for whichever gateway, and where their news goes."""

import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from serving.engine.api import EngineRequest, LoadedAdapter, Prefilled, SequenceOutput, StepOutput, StepStats
from serving.errors import EngineFailed, ServiceError
from serving.replica.answer import Answer, AnswerNews
from serving.replica.events import Delta, Ending
from serving.replica.prompt_echo import PromptEcho
from serving.replica.prompts import ReadPrompt
from serving.replica.served import ServedModel
from serving.replica.status import ServedAdapter
from serving.request import FinishReason, Load, Phases

logger = logging.getLogger(__name__)

NewsT = TypeVar("NewsT")


class Listener(Protocol):
    """Who asked: a gateway's stream."""

    def add(self, handle: int, delta: Delta) -> None: ...

    def finish(self, handle: int, ending: Ending) -> None: ...


@dataclass(slots=True)
class _Running:
    handle: int
    listener: Listener
    answer: Answer
    echo: PromptEcho | None = None
    """Of the first answer to a prompt, which tells of it for all of them."""
    all_ids: tuple[str, ...] = ()
    prefilled: Prefilled | None = None
    prefilled_at_s: float = 0.0
    adapter: LoadedAdapter | None = None


class RunningTable:
    """Lives on the event loop. An entry is removed with its Finished: that is why there is exactly one."""

    def __init__(self, served: ServedModel) -> None:
        self.served = served
        self.load: Load = served.engine.load
        self.stats = StepStats()
        self._running: dict[str, _Running] = {}
        self._numbers = itertools.count()

    @property
    def num_requests(self) -> int:
        return len(self._running)

    def adapters(self) -> tuple[ServedAdapter, ...]:
        """Those that may be asked for. Who waits for a slot the engine does not tell: while anybody does, those without
        a computed prompt are taken for it."""
        loaded = self.served.adapters.loaded
        running, waiting = Counter[LoadedAdapter | None](), Counter[LoadedAdapter | None]()
        for each in self._running.values() if loaded else ():
            counts = waiting if self.load.num_waiting and each.prefilled is None else running
            counts[each.adapter] += 1
        return tuple(ServedAdapter(each.name, each.path, running[each], waiting[each]) for each in loaded)

    def submit(
        self, request_id: str, prompt: ReadPrompt, handles: range, listener: Listener, deadline: float | None = None
    ) -> list[str]:
        """Give a request to the engine, once per handle; returns the engine's ids, numbered since clients may repeat
        theirs. Answers after the first wait until it has computed the prompt, and share it. `deadline` is in monotonic
        seconds. Raises ModelNotFound when the prompt's adapter is gone."""
        engine_ids = [f"{request_id}#{next(self._numbers)}" for _ in handles]
        answers = [prompt.for_choice(choice) for choice in range(len(handles))]  # all, before the engine has the first
        for handle, engine_id, answer in zip(handles, engine_ids, answers, strict=True):
            running = _Running(handle, listener, self.served.new_answer(answer), adapter=answer.adapter)
            if engine_id == engine_ids[0]:
                running = replace(running, echo=self.served.new_echo(prompt), all_ids=tuple(engine_ids))
            self.served.adapters.enter(answer.adapter)
            self._running[engine_id] = running
            self.served.engine.submit(
                EngineRequest(
                    engine_id,
                    answer.token_ids,
                    answer.sampling,
                    cache_salt=answer.cache_salt,
                    priority=answer.priority,
                    deadline=deadline,
                    matcher=answer.matcher,
                    after="" if engine_id == engine_ids[0] else engine_ids[0],
                    embed=answer.embed,
                    adapter=answer.adapter,
                )
            )
        first = self._running[engine_ids[0]]
        if first.echo is not None:
            self._tell_prompt(first, first.echo.start())
        return engine_ids

    def abort(self, engine_id: str) -> None:
        """The engine will say when it has stopped."""
        self.served.engine.abort(engine_id)

    def forget(self, engine_id: str) -> None:
        """Abort for a gateway that is gone: nobody wants the Finished."""
        if running := self._running.pop(engine_id, None):
            self.served.engine.abort(engine_id)
            self.served.adapters.leave(running.adapter)

    def fail_all(self, error: ServiceError) -> None:
        """The engine will say no more, or nobody waits for it any longer."""
        for engine_id in list(self._running):
            self.served.engine.abort(engine_id)
            self._finish(engine_id, FinishReason.ERROR, error)

    def on_step(self, step: StepOutput) -> None:
        """Spread one step's news. An output without an entry is late news of an answer that has ended."""
        self.load, self.stats = step.load, step.stats
        for output in step.news.outputs:
            if running := self._running.get(output.request_id):
                self._push(running, output)
        for engine_id, token_ids in zip(step.news.names, step.news.token_ids, strict=True):
            if running := self._running.get(engine_id):
                self._tell(running, engine_id, running.answer.push_tokens, token_ids)

    def _tell_prompt(self, first: _Running, delta: Delta) -> None:
        for engine_id in first.all_ids:
            if running := self._running.get(engine_id):
                running.listener.add(running.handle, delta)

    def _push(self, running: _Running, output: SequenceOutput) -> None:
        if output.prompt_logprobs and running.echo is not None:
            self._tell_prompt(running, running.echo.push(output.prompt_logprobs))
        if output.prefilled is not None:
            running.prefilled, running.prefilled_at_s = output.prefilled, time.monotonic()
        if output.embedding:
            running.listener.add(running.handle, Delta("", 0, embedding=output.embedding))
        self._tell(running, output.request_id, running.answer.push, output, output.error)

    def _tell(
        self,
        running: _Running,
        engine_id: str,
        push: Callable[[NewsT], AnswerNews],
        news_of_step: NewsT,
        error: ServiceError | None = None,
    ) -> None:
        try:
            news = push(news_of_step)
        except Exception:  # one answer's text must not cost the others theirs
            logger.exception("request %s: its tokens could not be turned into text", engine_id)
            self.served.engine.abort(engine_id)
            self._finish(engine_id, FinishReason.ERROR, EngineFailed("the answer's tokens have no text."))
            return
        if news.num_tokens or news.text or news.logprobs:
            running.listener.add(running.handle, Delta(news.text, news.num_tokens, news.logprobs))
        if news.abort:
            self.served.engine.abort(engine_id)
        if news.reason is not None:
            self._finish(engine_id, news.reason, error)

    def _finish(self, engine_id: str, reason: FinishReason, error: ServiceError | None) -> None:
        running = self._running.pop(engine_id)
        self.served.adapters.leave(running.adapter)
        ending = Ending(reason, running.answer.usage, error, self._phases(running))
        running.listener.finish(running.handle, ending)

    def _phases(self, running: _Running) -> Phases | None:
        """None for one whose prompt was never computed."""
        if running.prefilled is None:
            return None
        queue_s, prefill_s, first_step = running.prefilled
        decode_s = time.monotonic() - running.prefilled_at_s
        return Phases(queue_s, prefill_s, decode_s, first_step, self.stats.num_steps)
