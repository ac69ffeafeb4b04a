"""Tokenizer: text and conversations to token ids, and the way back through a Detokenizer per answer."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tokenizers

from model.card import TextAssets
from model.errors import CheckpointError
from serving.engine.chat_template import ChatTemplate
from serving.engine.control_tokens import ControlTokens
from serving.engine.detokenizer import Detokenizer, new_vocabulary
from serving.engine.stop_strings import StopStrings
from serving.engine.token_bound import token_bound
from serving.errors import InvalidRequest

__all__ = ["Detokenizer", "StopStrings", "Tokenizer"]


class Tokenizer:
    """One model's tokenizer. May be used by many threads; encoding lets go of the interpreter lock."""

    def __init__(self, text: TextAssets) -> None:
        """Slow (a tenth of a second for 50,000 tokens).

        Raises CheckpointError for a broken tokenizer, UnsupportedModel for one that cannot decode token by token.
        """
        self._tokenizer = _load(text.tokenizer_json)
        self._vocabulary = new_vocabulary(self._tokenizer, text.tokenizer_json)
        self._bos = self._bos_ids(text)
        self._bound = token_bound(text.tokenizer_json)
        self._template = _template(text, text.chat_template)
        self._tool_template = _template(text, text.tool_template)
        self._control = ControlTokens(text.tokenizer_json, self._tokenizer.get_added_tokens_decoder())

    @property
    def vocab_size(self) -> int:
        """Tokens that can be written, special ones included; a model's logits may be wider."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str) -> list[int]:
        """Plain text, with the BOS token in front where the model wants it."""
        return self._bos + self._ids(text)

    def least(self, text: str) -> int:
        """The text has so many tokens or more; 0 where that is not known. Quick."""
        return 0 if self._bound is None else self._bound.least(text)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """A conversation without tools, rendered and encoded."""
        return self.read_chat(messages)[0]

    def read_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        add_generation_prompt: bool = True,
        with_control_tokens: bool = False,
        check: Callable[[str], None] = lambda text: None,
    ) -> tuple[list[int], str]:
        """A conversation's token ids, and how the template wrote it. What messages and tools say is text, also where it
        spells a control token, unless `with_control_tokens`. `check` sees the text before it is encoded. Raises what
        that and `render_chat` do."""
        if not with_control_tokens:
            messages, tools = self._control.hide(messages), self._control.hide(tools)
        text = self.render_chat(messages, tools, add_generation_prompt=add_generation_prompt)
        is_marked = self._control.is_marked(text)
        shown = self._control.reveal(text) if is_marked else text
        check(shown)
        return self._control.encode(text) if is_marked else self._ids(text), shown

    def encode_rendered(self, text: str) -> list[int]:
        """What a chat template wrote, BOS included if it wants one."""
        return self._ids(text)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """A conversation as the chat template writes it, or that for tools where there are tools and one for them.

        Raises InvalidRequest when the template refuses the messages, or the model has none.
        """
        template = (self._tool_template if tools else None) or self._template
        if template is None:
            raise InvalidRequest(
                "this model has no chat template; ask for a text completion instead.", param="messages"
            )
        return template.render(messages, tools, add_generation_prompt=add_generation_prompt)

    def detokenizer(self, shown: Sequence[str] = ()) -> Detokenizer:
        """A new one for one answer, with the special tokens that it shows."""
        return self._vocabulary.detokenizer(shown)

    def token_bytes(self, token_id: int) -> bytes:
        """One token's own text in UTF-8, special tokens by their name; b"" for an unknown one."""
        return self._vocabulary.token_bytes(token_id)

    def _ids(self, text: str) -> list[int]:
        """As a batch of one: `encode` itself holds the interpreter lock to its end."""
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        return ids

    def _bos_ids(self, text: TextAssets) -> list[int]:
        if not text.add_bos or text.bos_token is None:
            return []
        token_id = self._tokenizer.token_to_id(text.bos_token)
        if token_id is None:
            raise CheckpointError(f"the model's BOS token {text.bos_token!r} is not in its tokenizer.json.")
        return [token_id]


def _load(tokenizer_json: str) -> tokenizers.Tokenizer:
    """A file may ask for cutting or padding, which suited somebody's training but not prompts."""
    try:
        tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
    except Exception as error:  # the library raises nothing more precise
        raise CheckpointError(f"the model's tokenizer cannot be loaded: {error}.") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _template(text: TextAssets, source: str | None) -> ChatTemplate | None:
    if source is None:
        return None
    tokens = {"bos_token": text.bos_token, "eos_token": text.eos_token, **text.named_tokens}
    return ChatTemplate(source, {name: token for name, token in tokens.items() if token is not None})
