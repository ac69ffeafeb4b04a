"""ContinuousUsage: vLLM's `stream_options.continuous_usage_stats`: each chunk says what the answer has used so far."""

from collections.abc import Callable, Sequence

import orjson

from serving.errors import ServiceError
from serving.gateway.choice import Choice
from serving.gateway.formats import AnswerFormat
from serving.gateway.transcript import Said
from serving.request import Usage

NOTHING_YET = b',"usage":null}\n\n'
"""How a chunk ends when usage is told at the end; within the JSON there is no line break."""


class ContinuousUsage:
    """Around the format of a chat or completion whose stream includes usage."""

    opens_at_once = False

    def __init__(self, answer: AnswerFormat, prompt_tokens: Callable[[], int]) -> None:
        """`prompt_tokens` is asked once the replica has accepted."""
        self._format, self._prompt_tokens = answer, prompt_tokens
        self._completion_tokens = 0

    def opening(self, choice: int = 0) -> bytes:
        return self._with_usage(self._format.opening(choice))

    def said(self, said: Said) -> bytes:
        self._completion_tokens += said.num_tokens
        return self._with_usage(self._format.said(said))

    def text_event(self) -> None:
        return None

    def end(self, usage: Usage) -> bytes:
        return self._format.end(usage)

    def error(self, error: ServiceError) -> bytes:
        return self._format.error(error)

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        return self._format.whole(choices, usage)

    def _with_usage(self, part: bytes) -> bytes:
        prompt_tokens, completion_tokens = self._prompt_tokens(), self._completion_tokens
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        }
        return part.replace(NOTHING_YET, b',"usage":' + orjson.dumps(usage) + b"}\n\n")
