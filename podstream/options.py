"""Commands that take the fields of configurations as their flags, and flags written again for child processes."""

import inspect
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from typing import Annotated, Any, TypeVar, get_args, get_origin

import typer
from typer.models import OptionInfo

from serving.config import EngineConfig, GatewayConfig, ReplicaConfig
from serving.flags import SIZE, changed_fields, flags_of

CommandT = TypeVar("CommandT", bound=Callable[..., None])
SectionT = TypeVar("SectionT")

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_bytes(text: str) -> int:
    """`8GiB`, `500MB` or a plain number as bytes; `i` means powers of 1024."""
    if not (match := _SIZE.fullmatch(text.strip())):
        raise typer.BadParameter(f"{text!r} is not a size; write it like 8GiB or 500MB.")
    unit = (match[2] or "").lower()
    return int(float(match[1]) * (1024 if unit.endswith("i") else 1000) ** _POWERS[unit[:1]])


def with_flags(*sections: type, without: Collection[str] = ()) -> Callable[[CommandT], CommandT]:
    """For a command that ends in `**flags`: the command line has a flag for each field of the sections, but for those
    in `without`. Fields that several sections have share one."""

    def decorate(command: CommandT) -> CommandT:
        own = [each for each in inspect.signature(command).parameters.values() if each.kind is not each.VAR_KEYWORD]
        flags = {name: _parameter(section, name) for section in sections for name in flags_of(section)}
        kept = [flag for name, flag in flags.items() if name not in without]
        every = [each.replace(kind=each.KEYWORD_ONLY) for each in (*kept, *own)]
        command.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
        return command

    return decorate


def read(section: type[SectionT], flags: Mapping[str, Any], **more: Any) -> SectionT:
    """A configuration from the flags of its command. Raises ConfigError."""
    values = {name: flags[name] for name in flags_of(section) if name in flags}
    lists = {name: tuple(value or ()) for name, value in values.items() if _is_list(section, name)}
    return section(**values | lists | more)


def option(section: type, name: str) -> OptionInfo:
    """The flag of one field, for a command that has nothing else of its section."""
    flag = flags_of(section)[name]
    is_switch = _type_of(section, name) in (bool, bool | None)
    decl = "/".join(_switch(flag.name, on) for on in (True, False)) if is_switch else flag.name
    parser = parse_bytes if flag.metavar == SIZE else None
    info: OptionInfo = typer.Option(decl, help=flag.help, metavar=flag.metavar, parser=parser)
    return info


def replica_arguments(engine: EngineConfig, replica: ReplicaConfig) -> list[str]:
    """`podstream replica` arguments that read back as the same configs."""
    return ["replica", engine.checkpoint, *_written(engine), *_written(replica)]


def gateway_arguments(gateway: GatewayConfig) -> list[str]:
    """`podstream gateway` arguments that read back as the same config."""
    return ["gateway", *_written(gateway)]


def _parameter(section: type, name: str) -> inspect.Parameter:
    kind, default = _type_of(section, name), {field.name: field.default for field in fields(section)}[name]
    if _is_list(section, name):
        kind, default = list[str] | None, default or None
    annotation = Annotated[kind, option(section, name)]  # type: ignore[valid-type]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _type_of(section: type, name: str) -> Any:
    (kind,) = [get_args(field.type)[0] for field in fields(section) if field.name == name]
    return kind


def _is_list(section: type, name: str) -> bool:
    return get_origin(_type_of(section, name)) is tuple


def _written(section: EngineConfig | ReplicaConfig | GatewayConfig) -> list[str]:
    written: list[str] = []
    flags = flags_of(section)
    for field, value in changed_fields(section).items():
        for each in value if isinstance(value, tuple) else (value,):
            written += [_switch(flags[field].name, each)] if isinstance(each, bool) else [flags[field].name, str(each)]
    return written


def _switch(flag: str, on: bool) -> str:
    return flag if on else flag.replace("--", "--no-", 1)
