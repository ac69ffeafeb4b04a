"""ServedModel: a loaded model with everything that answering needs; created once, when loading is done."""

import time
from dataclasses import dataclass, field

from model.card import ModelCard
from serving.config import EngineConfig
from serving.dialect import THINK, ToolDialect, choose_tool_dialect, thinks
from serving.engine.api import EngineLoop
from serving.engine.grammar import GrammarCompiler
from serving.engine.tokenizer import StopStrings, Tokenizer
from serving.replica.adapters import AdapterTable
from serving.replica.answer import Answer
from serving.replica.prompt_echo import PromptEcho
from serving.replica.prompts import PromptReader, ReadPrompt
from serving.replica.thought_count import ThoughtCount


@dataclass(frozen=True, slots=True)
class ServedModel:
    name: str
    engine: EngineLoop
    adapters: AdapterTable
    reader: PromptReader
    eos_ids: frozenset[int]
    capacity: int
    """Most requests at once, running and waiting together."""
    source: str
    """Where the weights came from."""
    created_unix_s: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def build(cls, config: EngineConfig, engine: EngineLoop, card: ModelCard) -> "ServedModel":
        """Slow: the tokenizer is built and the first adapters are loaded here. Raises ServiceError for one that cannot
        be."""
        name = config.name or card.name
        adapters = AdapterTable(name, engine, is_fixed=config.max_loras is None)
        for lora, path in config.lora_paths.items():
            adapters.load_now(lora, path)
        eos_ids = frozenset(card.generation.eos_token_ids)
        grammars = GrammarCompiler(card.text.tokenizer_json, engine.vocab_size, eos_ids)
        templates = (card.text.tool_template, card.text.chat_template)
        reader = PromptReader(
            adapters,
            Tokenizer(card.text),
            grammars,
            card.generation,
            engine.max_seq_len,
            engine.vocab_size,
            ToolDialect(config.tool_dialect)
            if config.tool_dialect
            else choose_tool_dialect(templates[0] or templates[1]),
            any(map(thinks, templates)) if config.reasoning is None else config.reasoning,
            config.embeddings is not None,
            config.control_tokens,
        )
        capacity = config.num_slots + config.max_waiting
        return cls(name, engine, adapters, reader, eos_ids, capacity, card.source)

    def new_answer(self, prompt: ReadPrompt) -> Answer:
        return Answer(
            self.reader.tokenizer.detokenizer(prompt.shown),
            StopStrings(prompt.sampling.stop),
            self.eos_ids.union(prompt.sampling.stop_token_ids),
            len(prompt.token_ids),
            min_tokens=prompt.sampling.min_tokens,
            token_bytes=self.reader.tokenizer.token_bytes,
            num_echoed=sum(map(len, prompt.echo)),
            prompt_only=prompt.prompt_only,
            thoughts=ThoughtCount(in_thought=prompt.in_thought) if THINK in prompt.shown else None,
        )

    def new_echo(self, prompt: ReadPrompt) -> PromptEcho | None:
        """None if nothing of the prompt is to be told."""
        with_logprobs = prompt.sampling.prompt_logprobs is not None
        if not (with_logprobs or prompt.echo):
            return None
        token_bytes = self.reader.tokenizer.token_bytes
        return PromptEcho(prompt.token_ids, prompt.echo, with_logprobs=with_logprobs, token_bytes=token_bytes)
