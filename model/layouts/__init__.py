"""Layouts: how libraries that train in JAX name and shape what they save. A new one is a file here and a test.

maxtext    MaxText's decoders, scanned or not        gemma    the library google-deepmind/gemma

Any other Flax tree is read with a key table in a file (`model.key_table`).
"""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from model.config import ModelConfig
from model.errors import CheckpointError
from model.families import read_config
from model.fields import Json
from model.foreign import LazyTensor
from model.hf_config import text_fields
from model.key_table import KeyTable
from model.keys import Key
from model.layouts import gemma, maxtext
from model.layouts.sizes import sizes_of

Tensors = Mapping[str, LazyTensor]
NORMALIZES = "normalize_embedding_logits"  # as MaxText calls it

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Layout:
    anchor: str
    """The name of its token vectors, by which it is known."""
    keys: Callable[[Json, Tensors], tuple[Key, ...]]
    """Its rows for a model with these fields of `config.json`."""
    guess: Callable[[Tensors], dict[str, Any]]
    """Fields of `config.json` that tensors tell beside their sizes, which are few."""
    adapt: Callable[[ModelConfig, Json], ModelConfig]
    """What the library does otherwise than the config says."""
    ignored: tuple[str, ...] = ()
    """Beginnings of names of tensors that have nothing to do with text."""
    normalizes_logits: Callable[[ModelConfig], bool] = lambda config: False
    """Whether logits of tied token vectors are divided by the root of their width where `[model]` does not say."""


LAYOUTS = {
    "maxtext": Layout(
        maxtext.ANCHOR,
        maxtext.keys,
        lambda tensors: {},
        maxtext.adapt,
        normalizes_logits=maxtext.normalizes_logits,
    ),
    "gemma": Layout(gemma.ANCHOR, gemma.keys, gemma.guess, lambda config, fields: config, gemma.IGNORED),
}


@dataclass(frozen=True, slots=True)
class Arranged:
    """The model among the tensors of a checkpoint."""

    config: ModelConfig
    keys: tuple[Key, ...]
    tensors: Tensors
    """By the names that `keys` say; without those that lie elsewhere, such as an optimizer's."""


def arrange(tensors: Tensors, config_json: Json, table: KeyTable, where: str = "config.json") -> Arranged:
    """Find the model among `tensors`, whose names are joined by dots. `config_json`, which messages
    call `where`, may lack what their shapes tell.

    Raises CheckpointError or UnsupportedModel when the layout or the model is not known.
    """
    layout = _layout(tensors, table)
    prefix = _prefix(tensors, table, layout)
    found = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    if layout is None:
        fields = {**table.model, **text_fields(config_json, where)}
        fields = {**sizes_of(table.keys, found), **fields}
        return Arranged(_with_logits_scale(read_config(fields, where)[1], fields, usual=False), table.keys, found)
    found = {name: tensor for name, tensor in found.items() if not name.startswith(layout.ignored)}
    fields = {**layout.guess(found), **table.model, **text_fields(config_json, where)}
    fields = {**sizes_of(layout.keys(fields, found), found), **fields}
    config = read_config(fields, where)[1]
    config = _with_logits_scale(config, fields, usual=layout.normalizes_logits(config))
    config = layout.adapt(config, fields)
    keys = layout.keys({**fields, "num_hidden_layers": config.num_layers}, found)
    keys = tuple(key for key in keys if len(range(config.num_layers)[key.layers]))
    return Arranged(config, keys, found)


def _with_logits_scale(config: ModelConfig, fields: Json, *, usual: bool) -> ModelConfig:
    """Nobody can tell from weights whether a run divided the logits, so what is taken for granted is said."""
    said = fields.get(NORMALIZES)
    if not isinstance(said, bool | None):
        raise CheckpointError(f"{NORMALIZES} must be true or false, got {said!r}.")
    if not config.tie_embeddings or not (usual if said is None else said):
        return config
    if said is None and not config.scale_embeddings:  # of Gemma everybody knows
        logger.warning(
            "logits are divided by the root of the width, %d, as this layout does by default where token vectors are "
            "the head, too; if the run did not, say %s = false in [model] of podstream.toml or of a --keys file",
            config.embed_dim, NORMALIZES,
        )  # fmt: skip
    return replace(config, logits_scale=1 / math.sqrt(config.embed_dim))


def _layout(tensors: Tensors, table: KeyTable) -> Layout | None:
    if table.keys:
        return None
    if table.layout is not None:
        if table.layout not in LAYOUTS:
            raise CheckpointError(f"{table.where}: layout {table.layout!r} is not one of {', '.join(LAYOUTS)}.")
        return LAYOUTS[table.layout]
    for layout in LAYOUTS.values():
        if any(_ends_in(name, layout.anchor) for name in tensors):
            return layout
    some = ", ".join(sorted(tensors)[:3])
    raise CheckpointError(
        f"the tensors are in no layout that is known ({', '.join(LAYOUTS)}), they are called {some}...; "
        "say with --keys FILE where they go."
    )


def _ends_in(name: str, end: str) -> bool:
    return name == end or name.endswith("." + end)


def _prefix(tensors: Tensors, table: KeyTable, layout: Layout | None) -> str:
    """What stands before all names of the model. An optimizer has tensors of the same names, elsewhere."""
    if table.prefix is not None:
        return table.prefix + "." if table.prefix else ""
    anchor = layout.anchor if layout else next((key.source for key in table.keys if key.path[0] == "embed"), "")
    prefixes = sorted((name.removesuffix(anchor) for name in tensors if _ends_in(name, anchor)), key=len)
    likely = [prefix for prefix in prefixes if prefix == "" or prefix.split(".")[0] in ("params", "transformer")]
    if len(prefixes) == 1 or likely:
        return (likely or prefixes)[0]
    if not prefixes:
        raise CheckpointError(f"{table.where or 'the layout'}: there is no tensor {anchor}, which holds token vectors.")
    raise CheckpointError(
        f"the model may lie at {' or '.join(prefixes[:3])}; say with `prefix` in a --keys file which it is."
    )
