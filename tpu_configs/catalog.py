"""Catalog: the chips, slices, models and deployments that lie in this folder, and those of a user's own files."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from model.config import ModelConfig
from model.families import read_config
from serving.errors import ConfigError
from tpu_configs.chip import Chip
from tpu_configs.deployment import MAX_SEQ_LEN, Deployment, Settings, split_sizes
from tpu_configs.schema import nearest, read_table, read_toml
from tpu_configs.slice import Slice

FOLDER = Path(__file__).parent
NO_PRICES: Mapping[str, float] = {}


@dataclass(frozen=True, slots=True)
class _SliceTable:
    """A table of `slices.toml`."""

    chip: str
    topology: str
    hosts: int


@cache
def chips() -> Mapping[str, Chip]:
    path = FOLDER / "chips.toml"
    return {
        name: read_table(Chip, table, f"{path.name} [{name}]", name=name) for name, table in read_toml(path).items()
    }


@cache
def slices() -> Mapping[str, Slice]:
    path, found = FOLDER / "slices.toml", {}
    for name, table in read_toml(path).items():
        keys = read_table(_SliceTable, table, f"{path.name} [{name}]")
        found[name] = Slice(name, chips()[known("chip", keys.chip, chips())], keys.topology, keys.hosts)
    return found


def models() -> tuple[str, ...]:
    return _stems("models", ".json")


def deployments() -> tuple[str, ...]:
    return _stems("deployments", ".toml")


def model_config(name: str) -> ModelConfig:
    """Of a model in `models/`, or of a `config.json` or the folder that holds one."""
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    elif path.suffix != ".json":
        path = FOLDER / "models" / f"{known('model', name, models())}.json"
    try:
        return read_config(json.loads(path.read_text()))[1]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not the config of a model: {error}.") from error


def deployment(name: str, prices: Mapping[str, float] = NO_PRICES) -> Deployment:
    """Of a file in `deployments/`, or of a user's own TOML file. `prices` are of chips by name, for an hour."""
    path = Path(name)
    if path.suffix != ".toml":
        path = FOLDER / "deployments" / f"{known('deployment', name, deployments())}.toml"
    return _of(path.stem, read_table(Settings, read_toml(path), path.name), prices)


def ad_hoc(model: str, slice_name: str, **settings: Any) -> Deployment:
    """A model on a slice that no file describes. `settings` are keys of such a file, None where not given; without a
    mesh as many devices work together as divide the model."""
    config, held = model_config(model), slices()[known("slice", slice_name, slices())]
    sizes = (held.num_devices, *split_sizes(config).values())
    tensor = max(n for n in range(1, held.num_devices + 1) if all(size % n == 0 for size in sizes))
    defaults = {"mesh": f"data=1,tensor={tensor}", "max_seq_len": min(MAX_SEQ_LEN, config.max_seq_len)}
    given = {key: value for key, value in settings.items() if value is not None}
    name = f"{model if model in models() else Path(model).resolve().stem} on {slice_name}"
    return _of(name, Settings(**{"model": model, "slice": slice_name, **defaults, **given}), NO_PRICES)


def _of(name: str, settings: Settings, prices: Mapping[str, float]) -> Deployment:
    for chip in prices:
        known("chip", chip, chips())
    held = slices()[known("slice", settings.slice, slices())]
    if held.chip.name in prices:
        held = replace(held, chip=replace(held.chip, price_per_hour=prices[held.chip.name]))
    return Deployment(name, settings, model_config(settings.model), held)


def known(kind: str, name: str, among: Mapping[str, Any] | tuple[str, ...]) -> str:
    """`name` itself. Raises ConfigError with the nearest one when it is not among them."""
    if name not in among:
        raise ConfigError(f"{kind} {name!r} is not known; {nearest(name, list(among))}")
    return name


def _stems(folder: str, suffix: str) -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in (FOLDER / folder).glob(f"*{suffix}")))
