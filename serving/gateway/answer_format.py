"""The fields that ask for a form of the answer: OpenAI's `response_format` and the `guided_` fields of vLLM."""

from typing import Annotated, Any, Literal, Self

import orjson
from pydantic import Field, model_validator

from serving.errors import InvalidRequest
from serving.gateway.at_most import AtMost
from serving.gateway.strict import Strict
from serving.request import MAX_GRAMMAR_BYTES, Grammar, GrammarKind


class JsonSchema(Strict):
    name: str
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None
    """Without effect: a schema is always enforced, and what cannot be is refused."""


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_belongs_to_its_type(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema and the type 'json_schema' need each other")
        return self

    def grammar(self) -> Grammar | None:
        if self.type == "text":
            return None
        if self.json_schema is None or self.json_schema.json_schema is None:
            return Grammar(GrammarKind.JSON_OBJECT)
        return _schema(self.json_schema.json_schema)


class AnswerFormat(Strict):
    """At most one of them may be given."""

    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    """Lark or GBNF."""
    guided_choice: Annotated[list[str], Field(min_length=1), AtMost(MAX_GRAMMAR_BYTES, "choices")] | None = None

    def grammar(self) -> Grammar | None:
        """Raises InvalidRequest for several at once, or one that is too long."""
        asked = {
            "response_format": self.response_format and self.response_format.grammar(),
            "guided_json": None if self.guided_json is None else _schema(self.guided_json, "guided_json"),
            "guided_regex": _grammar(GrammarKind.REGEX, self.guided_regex),
            "guided_grammar": _grammar(GrammarKind.LARK, self.guided_grammar),
            "guided_choice": self.guided_choice
            and Grammar(GrammarKind.CHOICE, orjson.dumps(self.guided_choice).decode()),
        }
        given = [name for name, grammar in asked.items() if grammar]
        if len(given) > 1:
            raise InvalidRequest(f"{' and '.join(given)} cannot be followed at once; give one of them.", param=given[1])
        return asked[given[0]] or None if given else None


def _schema(schema: dict[str, Any] | str, param: str = "") -> Grammar:
    text = schema if isinstance(schema, str) else orjson.dumps(schema).decode()
    return Grammar(GrammarKind.JSON_SCHEMA, text, param)


def _grammar(kind: GrammarKind, source: str | None) -> Grammar | None:
    return None if source is None else Grammar(kind, source)
