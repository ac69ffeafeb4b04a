"""Grammars: what an answer may look like, as a mask over the vocabulary for each next token. Done by llguidance.

1. `GrammarCompiler.compile` turns a `Grammar` into a Matcher at the door, in a thread, under limits of size and work.
2. The engine asks a `MaskWriter` for the masks of a step's rows, and tells each Matcher which token was chosen.
3. A Matcher that is stopped has its answer complete. One that ran into a limit accepts nothing more.
"""

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import llguidance
import numpy as np
import orjson
from llguidance.gbnf_to_lark import any_to_lark
from numpy.typing import NDArray

from serving.call_schema import Function
from serving.dialect import THOUGHT, ToolDialect
from serving.engine import api
from serving.engine.call_grammar import Rules, call_rules
from serving.engine.json_schema import enforced_schema
from serving.errors import InvalidRequest
from serving.request import Grammar, GrammarKind

WHITESPACE = r"[ \n\r\t]{1,16}"  # a model that is stuck in blanks would otherwise never leave them
FORM = "@form"
THOUGHT_FIRST = ("start: thought /[ \\n]{0,8}/ answer", f'thought[suffix="{THOUGHT}"]: /(?s:.*)/')
ANY_OBJECT = '{"type": "object"}'
MAX_REASON = 160  # characters of a line: it may repeat what was sent


def _limits() -> llguidance.LLParserLimits:
    """Tenths of a second for a compilation, few milliseconds for a mask, some megabytes for either."""
    return llguidance.LLParserLimits(
        initial_lexer_fuel=500_000,
        step_lexer_fuel=50_000,
        step_max_items=50_000,
        max_items_in_row=4_000,
        max_lexer_states=20_000,
        max_grammar_size=50_000,
        verbose_errors=False,
    )


class Matcher:
    """Implements `serving.engine.api.Matcher`."""

    def __init__(self, native: llguidance.LLMatcher, definition: str) -> None:
        self.native = native
        self.definition = definition

    @property
    def is_stopped(self) -> bool:
        return self.native.is_stopped()

    @property
    def error(self) -> str:
        return self.native.get_error().splitlines()[0] if self.native.is_error() else ""

    def accept(self, token_id: int) -> bool:
        return self.native.consume_token(token_id)

    def copy(self) -> "Matcher":
        return Matcher(self.native.deep_copy(), self.definition)


class MaskWriter:
    """Computes the masks of a step's rows in parallel, without the interpreter lock."""

    def __init__(self, num_threads: int | None = None) -> None:
        self._executor = llguidance.LLExecutor(num_threads)

    def write(self, matchers: Iterable[tuple[api.Matcher, int]], masks_RW: NDArray[np.int32]) -> None:
        """Overwrite the rows that have a matcher; `masks_RW` is contiguous, W = `num_words`."""
        rows, words = masks_RW.shape
        pairs = [(matcher.native, row) for matcher, row in matchers]
        self._executor.unsafe_compute_mask_ptr(pairs, masks_RW.ctypes.data, words * masks_RW.itemsize, rows)


class GrammarCompiler:
    """Compiles for one model's vocabulary. May be used by many threads."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        """`vocab_size` is the width of the model's logits; tokens beyond the tokenizer's are never allowed."""
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos = sorted(set(eos_token_ids))
        self._lock = threading.Lock()
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._added_tokens: dict[str, int] | None = None

    def compile(
        self,
        grammar: Grammar,
        *,
        in_thought: bool = False,
        functions: Sequence[Function] = (),
        dialect: ToolDialect = ToolDialect.NONE,
    ) -> Matcher:
        """At the start of an answer, or `in_thought`: then the answer proper follows what the model thinks. Where the
        grammar leaves room for calls, these are of `functions`, as the model writes them. Slow.

        Raises InvalidRequest with what is wrong or too large.
        """
        try:
            definition = _definition(grammar)
            calls = call_rules(dialect, functions, grammar.max_calls, self._added()) if grammar.max_calls else None
            if in_thought or calls is not None:
                definition = _around(definition, calls, in_thought=in_thought)
            native = self._native(definition)
        except ValueError as error:
            raise _refuse(grammar, str(error)) from error
        if not native.is_error():
            native.compute_bitmask()  # some grammars fail only here
        if native.is_error():
            raise _refuse(grammar, native.get_error())
        return Matcher(native, definition)

    def restore(self, definition: str) -> Matcher:
        """A matcher of the same definition as one that was compiled, at the start of an answer."""
        return Matcher(self._native(definition), definition)

    def _native(self, definition: str) -> llguidance.LLMatcher:
        return llguidance.LLMatcher(self._tokens(), definition, log_level=0, limits=_limits())

    def _tokens(self) -> llguidance.LLTokenizer:
        """Built by the first who needs it (a tenth of a second or more): most services never do."""
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = self._read_vocabulary()
            return self._vocabulary

    def _added(self) -> dict[str, int]:
        """Ids of tokens that were added to the vocabulary, special or not, by their text."""
        if self._added_tokens is None:
            added = orjson.loads(self._tokenizer_json).get("added_tokens") or ()
            self._added_tokens = {token["content"]: token["id"] for token in added}
        return self._added_tokens

    def _read_vocabulary(self) -> llguidance.LLTokenizer:
        if not self._eos:
            raise InvalidRequest("this model has no token that ends an answer, so it cannot follow a grammar.")
        try:
            return llguidance.LLTokenizer(self._tokenizer_json, n_vocab=self._vocab_size, eos_token=self._eos)
        except ValueError as error:
            raise InvalidRequest(f"this model's tokenizer cannot follow a grammar: {error}.") from error


def _definition(grammar: Grammar) -> str:
    """As llguidance reads it. Raises ValueError or InvalidRequest."""
    match grammar.kind:
        case GrammarKind.JSON_OBJECT:
            return _json(ANY_OBJECT)
        case GrammarKind.JSON_SCHEMA:
            return _json(enforced_schema(grammar.source, grammar.field))
        case GrammarKind.REGEX:
            return llguidance.LLMatcher.grammar_from_regex(grammar.source)
        case GrammarKind.LARK:
            return llguidance.LLMatcher.grammar_from_lark(_lark(grammar.source))
        case GrammarKind.CHOICE:
            return llguidance.LLMatcher.grammar_from_regex(_choice(orjson.loads(grammar.source)))


def _around(definition: str, calls: Rules | None, *, in_thought: bool) -> str:
    """What the definition says, or calls instead; behind any text until the thought's end, and white space."""
    rules, schemas = calls or ([], {})
    answer = f"{FORM} | calls" if calls else FORM
    lines = [*(THOUGHT_FIRST if in_thought else ("start: answer",)), f"answer: {answer}", *rules]
    named = {FORM.removeprefix("@"): definition} | {name: _json(schema) for name, schema in schemas.items()}
    inner = [{**_first_grammar(text), "name": name} for name, text in named.items()]
    return orjson.dumps({"grammars": [{"lark_grammar": "\n".join(lines)}, *inner]}).decode()


def _first_grammar(definition: str) -> dict[str, Any]:
    grammar: dict[str, Any] = (
        orjson.loads(definition)["grammars"][0] if definition.startswith("{") else {"lark_grammar": definition}
    )
    return grammar


def _json(schema: str) -> str:
    return llguidance.LLMatcher.grammar_from_json_schema(
        schema, overrides={"whitespace_pattern": WHITESPACE, "lenient": False}
    )


def _lark(source: str) -> str:
    try:
        return any_to_lark(source)
    except Exception as error:  # the library raises nothing more precise
        raise ValueError(str(error)) from error


def _choice(texts: Any) -> str:
    if not (isinstance(texts, list) and texts and all(isinstance(text, str) for text in texts)):
        raise ValueError("a choice needs a list of one or more texts")
    return "|".join("".join(f"\\x{{{ord(letter):x}}}" for letter in text) for text in texts)


def _refuse(grammar: Grammar, reason: str) -> InvalidRequest:
    """The first line of a reason says it, or one that begins with `error:`; the rest points into generated text."""
    lines = [line[:MAX_REASON] for line in reason.splitlines() if line.strip()] or ["no reason given"]
    errors = [line.removeprefix("error: ") for line in lines[1:] if line.startswith("error: ")]
    sentence = " ".join([lines[0], *errors]).rstrip(".")
    return InvalidRequest(f"the answer's form cannot be enforced: {sentence}.", param=grammar.field)
