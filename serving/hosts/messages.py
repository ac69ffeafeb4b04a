"""What hosts say to each other, as JSON. Imports no JAX.

    from another host    {"hello": Hello}, {"connected": devices}, {"ready": Fingerprint}, {"digest": number},
                         {"failed": reason}
    from host 0          {"welcome": true} or {"refused": reason}, StepInputs, {"failed": reason}, {"stop": true}

A step's message holds what came in since the last one: some sixty bytes when nothing did.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from serving.engine.api import EngineRequest, Matcher
from serving.engine.inputs import Command, StepInputs
from serving.hosts.fingerprint import Fingerprint
from serving.request import Priority, SamplingParams

RestoreMatcher = Callable[[str], Matcher]
"""Makes the matcher of a grammar's definition, at the start of an answer."""


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of a host."""

    process_id: int
    num_processes: int
    name: str
    """Of the machine, for people."""
    fingerprint: Fingerprint


def hello_from(message: Any) -> Hello:
    """Raises ConnectionError when it is none: somebody else has found the port."""
    try:
        hello = Hello(**message["hello"])
        if not all(isinstance(number, int) for number in (hello.process_id, hello.num_processes)):
            raise TypeError("numbers are expected")
        return Hello(hello.process_id, hello.num_processes, str(hello.name)[:100], dict(hello.fingerprint))
    except (KeyError, TypeError, ValueError) as error:
        raise ConnectionError("sent something else than a greeting") from error


def inputs_to(inputs: StepInputs) -> Any:
    commands = [command if isinstance(command, str) else _request_to(command) for command in inputs.commands]
    return {"commands": commands, "now": inputs.now, "took_s": inputs.took_s}


def inputs_from(message: Any, restore: RestoreMatcher) -> StepInputs:
    return StepInputs(
        tuple(_command_from(command, restore) for command in message["commands"]), message["now"], message["took_s"]
    )


def _request_to(request: EngineRequest) -> Any:
    """Every field by its name; of a grammar, what its matcher was made from."""
    fields = {f.name: getattr(request, f.name) for f in dataclasses.fields(request)}
    return fields | {"matcher": request.matcher and request.matcher.definition}


def _command_from(command: Any, restore: RestoreMatcher) -> Command:
    if isinstance(command, str):
        return command
    fields = {name: _tuples(value) for name, value in command.items()}
    definition, sampling = fields["matcher"], {name: _tuples(value) for name, value in fields["sampling"].items()}
    return EngineRequest(
        **fields
        | {
            "matcher": restore(definition) if definition is not None else None,
            "sampling": SamplingParams(**sampling),
            "priority": Priority(fields["priority"]),
        }
    )


def _tuples(value: Any) -> Any:
    """JSON has lists where all of ours are tuples."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
