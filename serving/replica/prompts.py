"""PromptReader: the checks at the door. A request becomes token ids that the engine can surely hold, or an error."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from model.card import GenerationDefaults
from serving.dialect import MARKS, THINK, THOUGHT, ToolDialect, begins_in_thought
from serving.engine.api import LoadedAdapter, Matcher
from serving.engine.grammar import GrammarCompiler
from serving.engine.tokenizer import Tokenizer
from serving.errors import InvalidRequest, PromptTooLong
from serving.replica.adapters import AdapterTable
from serving.request import (
    MAX_PROMPT_NUMBERS,
    ChatPrompt,
    Grammar,
    Priority,
    Prompt,
    Request,
    SamplingParams,
    TextPrompt,
    TokenPrompt,
    check_prompt_length,
    choice_seed,
)

SURELY_QUICK_CHARS = 32 << 10


@dataclass(frozen=True, slots=True)
class ReadPrompt:
    """A request as the engine takes it: `sampling.max_tokens` is set and fits."""

    token_ids: tuple[int, ...]
    sampling: SamplingParams
    matcher: Matcher | None = None
    priority: Priority = Priority.INTERACTIVE
    cache_salt: str = ""
    echo: tuple[str, ...] = ()
    """The text of each token, if the answer begins with the prompt."""
    prompt_only: bool = False
    embed: bool = False
    in_thought: bool = False
    """The prompt has opened the model's thought: the answer begins within it."""
    shown: tuple[str, ...] = ()
    """Special tokens that the answer shows, since they say what its parts are."""
    adapter: LoadedAdapter | None = None

    def for_choice(self, choice: int) -> "ReadPrompt":
        """What the engine needs for one of several answers to it: a seed and a matcher of its own. What there is to say
        about the prompt is said once."""
        if choice == 0:
            return self
        seed = choice_seed(self.sampling.seed, choice)
        sampling = dataclasses.replace(self.sampling, seed=seed, prompt_logprobs=None)
        matcher = None if self.matcher is None else self.matcher.copy()
        return dataclasses.replace(self, sampling=sampling, matcher=matcher)


@dataclass(frozen=True, slots=True)
class PromptReader:
    """Pure and slow (tokenizing, compiling grammars): called in a thread, never on the event loop."""

    adapters: AdapterTable
    tokenizer: Tokenizer
    grammars: GrammarCompiler
    defaults: GenerationDefaults
    max_seq_len: int
    vocab_size: int
    tool_dialect: ToolDialect = ToolDialect.NONE
    thinks: bool = False
    embeds: bool = False
    """Whether the engine makes embeddings."""
    with_control_tokens: bool = False
    """Whether messages may spell control tokens."""

    def read(self, request: Request) -> ReadPrompt:
        """Raises ModelNotFound, PromptTooLong or InvalidRequest."""
        adapter = self.adapters.find(request.model)
        if request.embed and not self.embeds:
            raise InvalidRequest(
                f"{self.adapters.model!r} is served without embeddings; --embeddings mean or last serves them."
            )
        token_ids, in_thought = self._token_ids(request.prompt)
        self._check_prompt(token_ids, "messages" if isinstance(request.prompt, ChatPrompt) else "prompt")
        self._check_steering(request.sampling)
        sampling = self._sampling(request, len(token_ids))
        matcher = None if request.grammar is None else self._matcher(request.grammar, request.prompt, in_thought)
        self._check_prompt_logprobs(sampling.prompt_logprobs, len(token_ids), request.num_choices)
        echo = self._pieces(token_ids) if request.echo else ()
        return ReadPrompt(
            token_ids,
            sampling,
            matcher,
            request.priority,
            request.cache_salt,
            echo,
            request.prompt_only,
            request.embed,
            in_thought,
            self._shown(request.prompt),
            adapter,
        )

    def _matcher(self, grammar: Grammar, prompt: Prompt, in_thought: bool) -> Matcher:
        functions = [(f["name"], f["parameters"]) for f in _functions(prompt)] if grammar.max_calls else []
        return self.grammars.compile(grammar, in_thought=in_thought, functions=functions, dialect=self.tool_dialect)

    def tokenize(self, model: str, prompt: Prompt, *, with_bos: bool, add_generation_prompt: bool) -> list[int]:
        """Raises ModelNotFound, InvalidRequest, or PromptTooLong for what surely is."""
        self.adapters.find(model)
        match prompt:
            case ChatPrompt(messages, tools):
                ids, _ = self._read_chat(messages, tools, add_generation_prompt=add_generation_prompt)
                return ids
            case TextPrompt(text):
                self._check_length_of(text, "prompt")
                return self.tokenizer.encode(text) if with_bos else self.tokenizer.encode_rendered(text)
            case TokenPrompt(token_ids):
                return list(token_ids)

    def detokenize(self, model: str, token_ids: Sequence[int]) -> str:
        """Special tokens have no text. Raises ModelNotFound or InvalidRequest."""
        self.adapters.find(model)
        self._check_vocabulary(token_ids, "tokens")
        detokenizer = self.tokenizer.detokenizer()
        return detokenizer.push(token_ids) + detokenizer.finish()

    def _shown(self, prompt: Prompt) -> tuple[str, ...]:
        if not isinstance(prompt, ChatPrompt):
            return ()
        return (*((THINK, THOUGHT) if self.thinks else ()), *(MARKS[self.tool_dialect] if prompt.tools else ()))

    def _pieces(self, token_ids: tuple[int, ...]) -> tuple[str, ...]:
        """Together the text of the prompt, without special tokens."""
        detokenizer = self.tokenizer.detokenizer()
        pieces = [detokenizer.push((token_id,)) for token_id in token_ids]
        pieces[-1] += detokenizer.finish()
        return tuple(pieces)

    def _check_prompt_logprobs(self, num_top: int | None, num_tokens: int, num_choices: int) -> None:
        """Each answer repeats them."""
        count = 0 if num_top is None else (1 + num_top) * num_tokens * num_choices
        if count > MAX_PROMPT_NUMBERS:
            raise InvalidRequest(
                f"{_tokens(num_tokens)} with {num_top} rivals each are {count:,} log-probabilities in all answers, at "
                f"most {MAX_PROMPT_NUMBERS:,} are possible; ask for fewer rivals or a shorter prompt.",
                param="prompt_logprobs",
            )

    def _token_ids(self, prompt: Prompt) -> tuple[tuple[int, ...], bool]:
        """Also whether the answer begins within a thought."""
        match prompt:
            case TextPrompt(text):
                self._check_length_of(text, "prompt")
                return tuple(self.tokenizer.encode(text)), False
            case ChatPrompt(messages, tools):
                ids, text = self._read_chat(messages, tools)
                return tuple(ids), self.thinks and begins_in_thought(text)
            case TokenPrompt(token_ids):
                return token_ids, False

    def _read_chat(
        self,
        messages: tuple[dict[str, Any], ...],
        tools: tuple[dict[str, Any], ...],
        *,
        add_generation_prompt: bool = True,
    ) -> tuple[list[int], str]:
        """As Tokenizer.read_chat."""
        return self.tokenizer.read_chat(
            messages,
            tools,
            add_generation_prompt=add_generation_prompt,
            with_control_tokens=self.with_control_tokens,
            check=partial(self._check_length_of, param="messages"),
        )

    def _check_length_of(self, text: str, param: str) -> None:
        """Before its tokens are made, which takes seconds for megabytes. Of shorter ones they are counted."""
        if len(text) > SURELY_QUICK_CHARS and (count := self.tokenizer.least(text)) >= self.max_seq_len:
            raise PromptTooLong(
                f"prompt has at least {_tokens(count)}, the context holds {self.max_seq_len:,} with the answer.",
                param=param,
            )

    def _check_prompt(self, token_ids: tuple[int, ...], param: str) -> None:
        if not token_ids:
            raise InvalidRequest("the prompt is empty; the model needs at least one token.", param=param)
        check_prompt_length(len(token_ids), self.max_seq_len, param)
        self._check_vocabulary(token_ids, param)

    def _check_steering(self, sampling: SamplingParams) -> None:
        biased, banned = [token_id for token_id, _ in sampling.logit_bias], sampling.banned_token_ids
        self._check_vocabulary(biased, "logit_bias")
        self._check_vocabulary(banned, "banned_token_ids")
        ends = {*sampling.stop_token_ids, *self.defaults.eos_token_ids} if sampling.min_tokens else set()
        if len({*banned, *ends}) >= self.vocab_size:
            raise InvalidRequest("banned_token_ids leaves no token to choose from.", param="banned_token_ids")

    def _check_vocabulary(self, token_ids: Sequence[int], param: str) -> None:
        for token_id in (min(token_ids), max(token_ids)) if token_ids else ():
            if not 0 <= token_id < self.vocab_size:
                raise InvalidRequest(
                    f"token id {token_id} is outside the vocabulary of {self.vocab_size:,} tokens.", param=param
                )

    def _sampling(self, request: Request, num_prompt_tokens: int) -> SamplingParams:
        room = self.max_seq_len - num_prompt_tokens
        wanted = request.sampling.max_tokens
        if wanted is not None and isinstance(request.prompt, ChatPrompt):
            wanted = min(wanted, room)  # chat clients ask for far more than they expect; a completion is an exact order
        if wanted is not None and wanted > room:
            raise PromptTooLong(
                f"prompt has {_tokens(num_prompt_tokens)} and max_tokens is {wanted:,}, the context holds "
                f"{self.max_seq_len:,} together; ask for at most {room:,}.",
                param="max_tokens",
            )
        return dataclasses.replace(request.sampling, max_tokens=wanted or room, **self._recommended(request.unset))

    def _recommended(self, unset: frozenset[str]) -> dict[str, Any]:
        """What the model's authors advise for the fields that the client left out."""
        advice = {name: getattr(self.defaults, name) for name in unset}
        return {name: value for name, value in advice.items() if value is not None}


def _functions(prompt: Prompt) -> list[dict[str, Any]]:
    """As OpenAI describes them."""
    return [tool["function"] for tool in prompt.tools] if isinstance(prompt, ChatPrompt) else []


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count:,} tokens"
