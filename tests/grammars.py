"""A small real tokenizer for grammar tests, walks under the mask, and a JSON schema check of its own."""

import json
import re
from functools import cache

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from serving.engine.grammar import GrammarCompiler, MaskWriter
from serving.engine.masks import ALL_TOKENS, num_words
from serving.request import Grammar, GrammarKind

CORPUS = [json.dumps({"name": "value", "count": 12, "list": [1.5, True, None, {"a": "b"}]}, indent=i) for i in range(4)]
EOS_ID = 0
WIDTH = 333  # of the logits: more than the tokenizer has, and no multiple of 32
CLOSERS = set('"}],')


@cache
def tokenizer():
    """Byte-level BPE with merges, so that tokens reach across the borders of a grammar."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(CORPUS * 10, trainer)
    return made


@cache
def compiler():
    return GrammarCompiler(tokenizer().to_str(), WIDTH, [EOS_ID])


def schema_grammar(schema):
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


def allowed(matcher):
    """Token ids that the mask lets through."""
    masks_RW = np.full((1, num_words(WIDTH)), ALL_TOKENS, np.int32)
    MaskWriter(1).write([(matcher, 0)], masks_RW)
    return np.flatnonzero(np.unpackbits(masks_RW.view(np.uint8), bitorder="little")).tolist()


def walk(matcher, random, max_tokens=400):
    """A random answer under the mask, leaning towards what closes things; None when it does not end."""
    token_ids = []
    while not matcher.is_stopped:
        if len(token_ids) == max_tokens:
            return None
        choices = allowed(matcher)
        closing = [i for i in choices if i == EOS_ID or set(tokenizer().decode([i])) & CLOSERS]
        token_id = random.choice(closing if closing and random.random() < 0.4 else choices)
        assert matcher.accept(token_id), "the mask allowed what the matcher refuses"
        token_ids.append(token_id)
    assert not matcher.error
    return tokenizer().decode([i for i in token_ids if i != EOS_ID])


TYPES = {
    "object": dict, "array": list, "string": str, "boolean": bool, "null": type(None), "integer": int,
    "number": (int, float),
}  # fmt: skip


def is_valid(schema, value):
    """For the keywords that the tests use."""
    kind = schema.get("type")
    return (
        ("enum" not in schema or value in schema["enum"])
        and ("const" not in schema or value == schema["const"])
        and ("anyOf" not in schema or any(is_valid(inner, value) for inner in schema["anyOf"]))
        and (kind is None or (isinstance(value, TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))))
        and _is_valid_inside(schema, value)
    )


def _is_valid_inside(schema, value):
    match value:
        case dict():
            properties = schema.get("properties", {})
            extra_allowed = schema.get("additionalProperties", True)
            known = all(is_valid(inner, value[name]) for name, inner in properties.items() if name in value)
            return (
                known
                and (extra_allowed or value.keys() <= properties.keys())
                and all(name in value for name in schema.get("required", []))
            )
        case list():
            fits = schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))
            return fits and all(is_valid(schema.get("items", {}), item) for item in value)
        case str():
            fits = schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))
            return fits and re.search(schema.get("pattern", ""), value) is not None
        case bool() | None:
            return True
        case _:
            return schema.get("minimum", value) <= value <= schema.get("maximum", value)
