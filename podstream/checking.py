"""`podstream check`: a deployment, compiled for a slice that is not here, as a budget that a person can read."""

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from podstream.columns import columns
from podstream.options import replica_arguments
from serving.config import ReplicaConfig
from serving.errors import ConfigError
from tpu_configs.catalog import ad_hoc, deployment, deployments, models
from tpu_configs.deployment import Deployment
from tpu_configs.schema import nearest

Say = Callable[[str], None]


def check(
    what: str,
    slice_name: str | None,
    changes: Mapping[str, Any],
    say: Say,
    note: Say,
    *,
    save: str | None,
    as_json: bool,
) -> None:
    """`what` is a deployment, or a model with `slice_name`; `changes` are keys of deployments, None where not given.
    `note` tells how far it is; programs are saved at the URL `save`."""
    chosen = choose(what, slice_name, changes)
    from tpu_configs.budget import Budget
    from tpu_configs.check import Ahead, compile_steps

    ahead = Ahead.of(chosen)
    note(f"compiling {len(ahead.shapes)} programs of {chosen.name} for {chosen.slice.name}")
    steps = compile_steps(ahead, ahead.shapes, note, save)
    if save is not None:
        arguments = replica_arguments(replace(ahead.engine, checkpoint="PATH", compile_cache=save), ReplicaConfig())
        note(f"saved for replicas that are started as\n  podstream {shlex.join(arguments)}")
    budget = Budget.of(chosen, ahead.weight_bytes, ahead.state_bytes, ahead.page_bytes, steps)
    if as_json:
        say(json.dumps(budget.to_json(), indent=2))
    else:
        _say(budget, say)


def choose(what: str, slice_name: str | None, changes: Mapping[str, Any]) -> Deployment:
    """Raises ConfigError for names that are not known, and for what does not fit together."""
    if slice_name is not None:
        return ad_hoc(what, slice_name, **changes)
    if what in models():
        raise ConfigError(f"{what} is a model: say on which slice, such as --slice v6e-8.")
    if given := sorted(key for key, value in changes.items() if value is not None):
        raise ConfigError(f"{', '.join(given)} of a deployment stand in its file; give a model and --slice instead.")
    if what not in deployments() and not what.endswith(".toml"):
        known = [*deployments(), *models()]
        raise ConfigError(f"{what!r} is neither a deployment nor a model; {nearest(what, known)}")
    return deployment(what)


def _say(budget: Any, say: Say) -> None:
    from tpu_configs.budget import CONTEXT, core_lines, memory_rows, step_rows
    from tpu_configs.roofline import ASSUMED

    chosen = budget.deployment
    replicas = f", {chosen.replicas} replicas on the slice" if chosen.replicas > 1 else ""
    say(f"{chosen.name}: {chosen.settings.model} on {chosen.slice.name}, mesh {chosen.mesh}{replicas}\n")
    for text in columns(memory_rows(budget), right=[1]):
        say(text)
    say("")
    for text in core_lines(budget):
        say(text)
    say(f"\ndecode steps, {CONTEXT:,} tokens of context, predicted")
    header, *rows = step_rows(budget)
    for text in columns([header, *rows], right=range(len(header))):
        say(f"  {text}")
    for step in budget.steps:
        for kind, (count, size) in step.collectives.items():
            say(f"  {step.rows} rows: {count:,} {kind}, {size / 1e6:,.2f} MB")
    say(f"\nfirst token of a prompt of 1,024 tokens on an idle replica, predicted: {budget.ttft_s * 1e3:,.0f} ms")
    for case in budget.published():
        say(f"\npublished: {case['published']:,g} {case['unit']} ({case['workload']}; {case['source']})")
        say(f"predicted: {case['predicted']:,.4g} {case['unit']}")
    say("\nassumed")
    for assumption in ASSUMED.lines():
        say(f"  {assumption}")
    say(f"\ncompiled {len(budget.programs)} programs, {budget.compile_s:,.0f} s one after the other")
