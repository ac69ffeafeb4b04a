"""Choice: one of the answers to a prompt, put together from what was said of it."""

from dataclasses import dataclass, field

from serving.gateway.speech.pieces import Content, Reasoning, ToolArguments, ToolStart
from serving.gateway.transcript import Said
from serving.replica.events import TokenLogprob


@dataclass(slots=True)
class ToolCall:
    call_id: str
    name: str
    parts: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        return "".join(self.parts)


@dataclass(slots=True)
class Choice:
    """Complete when it has a reason."""

    parts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    reason: str | None = None
    prompt: list[TokenLogprob] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    def see(self, said: Said) -> None:
        for piece in said.pieces:
            match piece:
                case Content(text):
                    self.parts.append(text)
                case Reasoning(text):
                    self.thoughts.append(text)
                case ToolStart(_, call_id, name):
                    self.calls.append(ToolCall(call_id, name))
                case ToolArguments(index, text):
                    self.calls[index].parts.append(text)
        self.logprobs += said.logprobs
        self.prompt += said.prompt
        self.reason = said.reason

    @property
    def text(self) -> str:
        return "".join(self.parts)

    @property
    def reasoning(self) -> str:
        return "".join(self.thoughts)
