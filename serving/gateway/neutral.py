"""Fields that clients send but that are not served yet: harmless at a value that changes nothing, refused otherwise.
Null, false, `{}` and `[]` never ask for anything.

Silence would be a lie (a client that asks for tools must not get an answer without), and refusing the default would
break clients that always send it.
"""

from collections.abc import Mapping
from typing import Any

from serving.errors import InvalidRequest
from serving.gateway.strict import says_nothing

Neutral = Mapping[str, tuple[Any, ...]]

COMMON: Neutral = {
    "store": (),
    "best_of": (1,),
    "length_penalty": (1,),
    "bad_words": (),
    "allowed_token_ids": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (),
    "structured_outputs": (),
    "moderation": (),
}
CHAT: Neutral = {
    **COMMON,
    "echo": (),
    "functions": (),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    "chat_template": (),
    "chat_template_kwargs": (),
    "documents": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (),
    "add_special_tokens": (),
}
COMPLETION: Neutral = {**COMMON, "suffix": ("",), "add_special_tokens": (True,)}
MESSAGE: Neutral = {
    "audio": (),
    "function_call": (),
}


def drop_neutral(fields: Mapping[str, Any], neutral: Neutral) -> dict[str, Any]:
    """The fields that are served. Raises InvalidRequest for one that asks for something this version cannot do."""
    for name in fields.keys() & neutral.keys():
        if not says_nothing(fields[name]) and fields[name] not in neutral[name]:
            raise InvalidRequest(f"{name} is not supported yet; leave it out{_or_values(neutral[name])}.", param=name)
    return {name: value for name, value in fields.items() if name not in neutral}


def _or_values(values: tuple[Any, ...]) -> str:
    return f" or set it to {' or '.join(map(repr, values))}" if values else ""
