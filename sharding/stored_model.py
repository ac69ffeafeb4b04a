"""StoredModel: a model that lies somewhere, in podstream's own format or in another's, as the engine takes it."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
from etils import epath

from model.card import ModelCard
from model.foreign import ForeignModel
from model.gguf_split import model_name
from model.strangers import refuse_pipes
from model.tree import Names, Params
from sharding import checkpoint
from sharding.checkpoint import PathLike, Progress
from sharding.foreign import foreign_leaves, open_foreign


@dataclass(frozen=True, slots=True)
class StoredModel:
    path: epath.Path
    card: ModelCard
    dtype: str
    """Type of its float numbers: `float32` or `bfloat16`."""
    foreign: ForeignModel | None = None
    """None for podstream's own format."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What an operator should know of how it was read."""
        return () if self.foreign is None else self.foreign.notes

    @classmethod
    def open(cls, path: PathLike, model_files: str | None = None, keys: str | None = None) -> "StoredModel":
        """See `sharding.foreign.open_foreign` for what there is beside podstream's own checkpoints, and the arguments.

        Raises CheckpointError or UnsupportedModel, before any number is read.
        """
        root = checkpoint.absolute(path)
        refuse_pipes(root)
        if checkpoint.is_ours(root):
            return cls(root, checkpoint.read_card(root), checkpoint.saved_dtype(root))
        model = open_foreign(root, model_files, keys)
        name = model_name(Path(root)) if root.suffix == ".gguf" else root.name
        card = ModelCard(name, model.config, model.text, model.generation, source_of(str(root), model))
        return cls(root, card, model.dtype, model)

    def leaves(self, abstract: Params, on_progress: Progress | None = None) -> Iterator[tuple[Names, jax.Array]]:
        """Its parameters as `abstract` describes them, one after another, the largest first.

        `on_progress` counts bytes. Raises CheckpointError when it is incomplete or corrupt.
        """
        if self.foreign is not None:
            return foreign_leaves(self.foreign, abstract, on_progress)
        return checkpoint.load_leaves(self.path, abstract, on_progress=on_progress)


def source_of(label: str, model: ForeignModel) -> str:
    """What a card says of where the weights lie: `label`, and below it the step, if it is a run with several."""
    return f"{label}/{model.below}" if model.below else label
