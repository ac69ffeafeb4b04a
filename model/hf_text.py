"""The tokenizer and the chat templates of a Hugging Face folder: every file that bears on them is read here.

    tokenizer.json                      the vocabulary, and how text is cut
    tokenizer_config.json               names of special tokens, more added tokens, templates
    special_tokens_map.json             older: names of special tokens; not read beside `added_tokens_decoder`
    added_tokens.json                   older: more added tokens; not read beside `added_tokens_decoder` either
    chat_template.jinja, additional_chat_templates/*.jinja, chat_template.json

Which of them has the last word is what transformers does (5.24, `PreTrainedTokenizerBase._from_pretrained` and
`TokenizersBackend.__init__`), so that ids and prompts are those of its `AutoTokenizer`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import tokenizers

from model.card import TextAssets
from model.errors import CheckpointError
from model.fields import Fields, read_text, shown
from model.foreign import load_tokenizer
from model.hf_llama import as_llama_reads

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
DEFAULT, TOOL_USE = "default", "tool_use"


def text_assets(folder: Path, model_type: str | None = None) -> tuple[TextAssets, list[str]]:
    """Tokenizer and chat templates of a folder, with weights or without, and what an operator should know of them.
    `model_type` is what its config.json says.

    Raises CheckpointError naming the file.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(f"{folder} lacks tokenizer.json; other tokenizer files are not read.")
    text, config = read_text(path), Fields.read(folder / "tokenizer_config.json")
    tokenizer = load_tokenizer(str(path), text)
    if (as_read := as_llama_reads(text, config, model_type)) is not text:
        text, tokenizer = as_read, load_tokenizer(str(path), as_read)
    special = _special_tokens(folder, config)
    said = _added_tokens(folder, config, special)
    if missing := _missing(tokenizer, said, special):
        tokenizer.add_tokens(missing)
        text = tokenizer.to_str()
    templates, bos = _templates(folder, config), special.named.get("bos_token")
    assets = TextAssets(
        tokenizer_json=text,
        chat_template=templates.get(DEFAULT),
        tool_template=templates.get(TOOL_USE),
        bos_token=bos,
        eos_token=special.named.get("eos_token"),
        named_tokens=special.named,
        add_bos=_adds_bos(tokenizer, bos),
    )
    return assets, _other_ids(folder, tokenizer, said)


@dataclass(slots=True)
class _Special:
    """Special tokens as far as files give them a role."""

    named: dict[str, str] = field(default_factory=dict)
    """By names that templates may use: `eos_token`."""
    extra: list[str] = field(default_factory=list)
    made: dict[str, tokenizers.AddedToken] = field(default_factory=dict)
    """Those that are written with all that matters to how they are found in a text."""


def _special_tokens(folder: Path, config: Fields) -> _Special:
    special, files = _Special(), [config]
    if "added_tokens_decoder" not in config:
        files.append(Fields.read(folder / "special_tokens_map.json"))
    for fields in files:
        for name in fields:
            is_other = name.endswith("_token") and isinstance(fields.get(name), str | dict)
            if name in NAMED or is_other:
                _read_named(fields, name, special)
    for fields in files:
        for name in ("extra_special_tokens", "additional_special_tokens"):
            _read_extra(fields, name, special)
    # Those that are new get their ids in this order.
    order = [*NAMED, *(name for name in special.named if name not in NAMED)]
    special.named = {name: special.named[name] for name in order if name in special.named}
    return special


def _read_named(fields: Fields, name: str, special: _Special) -> None:
    if (token := _token(fields, name)) is None:
        special.named.pop(name, None)
        return
    special.named[name] = token.content
    if isinstance(fields.get(name), dict):
        special.made[token.content] = token


def _read_extra(fields: Fields, name: str, special: _Special) -> None:
    """A list of tokens, or an object that gives them names."""
    if isinstance(fields.get(name), dict):
        names = fields.object(name)
        for token_name in names:
            _read_named(names, token_name, special)
        return
    for item in fields.items(name):
        if (token := _token(Fields({name: item}, fields.where), name)) is None:
            raise fields.wrong(name, "a list of tokens")
        special.extra.append(token.content)
        if isinstance(item, dict):
            special.made[token.content] = token


def _token(fields: Fields, name: str) -> tokenizers.AddedToken | None:
    """A special token is written as a string, or as an object with its `content`."""
    if fields.get(name) is None:
        return None
    if isinstance(fields.get(name), str):
        return tokenizers.AddedToken(fields.text(name), special=True)
    return _added_token(fields.object(name), special=True)


def _added_token(fields: Fields, *, special: bool) -> tokenizers.AddedToken:
    if (content := fields.text("content")) is None:
        raise fields.wrong("content", "text")
    # Where the file is silent the library says what holds: other tokens are looked for in normalised text.
    flags = {name: fields.flag(name) for name in ("single_word", "lstrip", "rstrip", "normalized") if name in fields}
    return tokenizers.AddedToken(content, **{"normalized": not special, **flags}, special=special)


def _added_tokens(folder: Path, config: Fields, special: _Special) -> dict[int, tokenizers.AddedToken]:
    """Those that files beside tokenizer.json tell, by the id that they say."""
    if "added_tokens_decoder" in config:
        said = config.object("added_tokens_decoder")
        return {_id(said, name): _added_token(one := said.object(name), special=one.flag("special")) for name in said}
    older = Fields.read(folder / "added_tokens.json")
    roles = {*special.named.values(), *special.extra}
    return {
        older.token_id(name): tokenizers.AddedToken(name, normalized=name not in roles, special=name in roles)
        for name in older
    }


def _id(said: Fields, name: str) -> int:
    if not (name.isascii() and name.isdigit() and len(name) < 10):
        raise CheckpointError(f"{said.where}: {shown(name)} is not a token id.")
    return int(name)


def _missing(
    tokenizer: tokenizers.Tokenizer, said: dict[int, tokenizers.AddedToken], special: _Special
) -> list[tokenizers.AddedToken]:
    """What the tokenizer does not have, or otherwise. The library gives each the id of its text in the vocabulary, or
    the next one that is free."""
    has = tokenizer.get_added_tokens_decoder()
    as_they_are = {repr(token) for token in has.values()}
    by_id = [token for _, token in sorted(said.items()) if repr(token) not in as_they_are]
    contents = {token.content for token in (*has.values(), *by_id)}
    roles = set(special.named.values())
    for token in by_id:
        token.special = token.special or token.content in roles
    told = {token.content: token for token in said.values()}
    others = [
        content for content in dict.fromkeys((*special.named.values(), *special.extra)) if content not in contents
    ]
    return [
        *by_id,
        *(told.get(c) or special.made.get(c) or tokenizers.AddedToken(c, special=True) for c in others),
    ]


def _other_ids(folder: Path, tokenizer: tokenizers.Tokenizer, said: dict[int, tokenizers.AddedToken]) -> list[str]:
    """About tokens that get another id than their file says, as they do in transformers too."""
    ids = {token.content: (said_id, tokenizer.token_to_id(token.content)) for said_id, token in said.items()}
    others = [f"{shown(name)} is said to be {told}, but is {is_}" for name, (told, is_) in ids.items() if told != is_]
    more = f"; and {len(others) - 1:,} more" if len(others) > 1 else ""
    return [f"{folder}: the added token {others[0]}{more}"] if others else []


def _adds_bos(tokenizer: tokenizers.Tokenizer, bos: str | None) -> bool:
    """Asked of the tokenizer itself: the flag in tokenizer_config.json is not what decides."""
    return bos is not None and tokenizer.encode("a", add_special_tokens=True).tokens[:1] == [bos]


def _templates(folder: Path, config: Fields) -> dict[str, str]:
    """By name. Files come before what tokenizer_config.json says, all of it but for the default that they may lack, and
    chat_template.json, in which processors of images keep it, last."""
    files = dict(_template_files(folder))
    written = _written(config)
    others = written if DEFAULT in written else {**_written(Fields.read(folder / "chat_template.json")), **written}
    return {DEFAULT: others[DEFAULT], **files} if files and DEFAULT in others else files or others


def _template_files(folder: Path) -> Iterator[tuple[str, str]]:
    if (folder / "chat_template.jinja").is_file():
        yield DEFAULT, read_text(folder / "chat_template.jinja")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        yield path.stem, read_text(path)


def _written(fields: Fields) -> dict[str, str]:
    """One template, or several with names."""
    if not isinstance(fields.get("chat_template"), list):
        template = fields.text("chat_template")
        return {} if template is None else {DEFAULT: template}
    templates: dict[str, str] = {}
    for entry in fields.objects("chat_template"):
        name, template = entry.text("name"), entry.text("template")
        if name is None or template is None:
            raise fields.wrong("chat_template", "text, or a list of objects with name and template")
        templates[name] = template
    return templates
