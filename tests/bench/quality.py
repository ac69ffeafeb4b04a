"""What quantised weights and caches cost in quality and save in bytes, on the demo model: a table and a JSON line.

    make bench-quality

Perplexity is over the first chapter of "Alice's Adventures in Wonderland" (Carroll 1865), in windows of 256 tokens.
Agreement is the share of greedy tokens that stay: each format reads the answers of float32 and tells each next token.
Everything goes through the paged attention of the service, so that a cache's type counts.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from kv.cache import KVCache, abstract_cache, make_cache
from kv.paged_attention import PagedView, TileGroup, paged_attention
from model.card import ModelCard
from podstream.home import home
from podstream.importing import ensure_demo_model
from serving.config import EngineConfig
from serving.engine.loaded_model import load_weights
from serving.engine.tokenizer import Tokenizer
from sharding.checkpoint import read_card
from sharding.mesh import make_mesh
from sharding.params import bind
from sharding.rules import choose_rules
from sharding.sizes import device_bytes, num_bytes
from sharding.spec import MeshSpec
from sharding.stored_model import StoredModel

TEXT = Path(__file__).parent / "data" / "alice.txt"
WINDOW, TILE, PAGE, WINDOWS_PER_CALL = 256, 64, 16, 2
ANSWER = 48
QUESTIONS = (
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Explain how a bicycle stays upright.",
    "List five things to pack for a hike.",
    "Who wrote Romeo and Juliet, and when?",
    "Write a Python function that reverses a string.",
    "Why is the sky blue?",
    "Give me a recipe for pancakes.",
)


@dataclass(frozen=True)
class Format:
    """Type of floats, quantised weights, type of the cache."""

    dtype: str
    quantize: str | None = None
    kv: str | None = None

    @property
    def name(self) -> str:
        weights = self.dtype if self.quantize is None else f"{self.quantize} ({self.dtype} scales)"
        return f"{weights}, cache {self.kv or self.dtype}"


FORMATS = (
    Format("float32"),
    Format("bfloat16"),
    Format("float32", "int8"),
    Format("float32", "int4"),
    Format("float32", "int4:64"),
    Format("float32", None, "int8"),
    Format("float32", None, "fp8"),
    Format("float32", "int8", "int8"),
    Format("bfloat16", "int8", "int8"),
    Format("bfloat16", "int4", "fp8"),
)


@dataclass(frozen=True)
class Row:
    format: str
    perplexity: float
    times_float32: float
    agreement: float
    bits_per_weight: float
    weights_mib: float
    kv_bytes_per_token: int


class Model:
    """The demo model in one format, and the pages that its calls share."""

    def __init__(self, path: Path, card: ModelCard, form: Format) -> None:
        mesh, rules = make_mesh(MeshSpec()), choose_rules(card.config, MeshSpec())
        config = EngineConfig(str(path), dtype=form.dtype, quantize=form.quantize, kv_dtype=form.kv)
        self.weights = load_weights(config, StoredModel.open(path), mesh, rules, form.dtype, lambda _: None)
        num_pages = 1 + len(QUESTIONS) * WINDOW // PAGE
        kv = form.kv or form.dtype
        pages = abstract_cache(card.config, num_pages, PAGE, kv, mesh, rules, widened=form.dtype)
        self.kv_bytes_per_token = device_bytes(pages) // (num_pages * PAGE)
        self._cache = make_cache(pages)
        self._leaves, treedef = jax.tree.flatten(self.weights)

        def forward(
            leaves: list[jax.Array], cache: KVCache, tokens_SQ: jax.Array, group: TileGroup, next_T: jax.Array
        ) -> tuple[jax.Array, jax.Array, KVCache]:
            decoder = bind(card.config, jax.tree.unflatten(treedef, leaves))
            positions_T = jnp.maximum(group.positions_SQ.reshape(-1), 0)
            attend = paged_attention(PagedView((group,)))
            logits_TV, cache = decoder(tokens_SQ.reshape(-1), positions_T, attend, cache)
            logprobs_TV = jax.nn.log_softmax(logits_TV)
            told_T = jnp.take_along_axis(logprobs_TV, next_T[:, None], axis=1)[:, 0]
            return jnp.argmax(logits_TV, axis=-1), told_T, cache

        self._forward = jax.jit(forward, donate_argnums=1)

    def read(
        self, windows: list[list[int]], first: int = 0
    ) -> tuple[list[NDArray[np.int32]], list[NDArray[np.float32]]]:
        """For each window the greedy token after each of its tokens, and the log-probability of the one that follows.

        Keys and values of window i stay in the pages of number `first` + i.
        """
        greedy, told = [], []
        for start in range(0, len(windows), WINDOWS_PER_CALL):
            part = windows[start : start + WINDOWS_PER_CALL]
            tokens = np.zeros((WINDOWS_PER_CALL, WINDOW), np.int32)
            positions = np.full((WINDOWS_PER_CALL, WINDOW), -1, np.int32)
            for i, window in enumerate(part):
                tokens[i, : len(window)], positions[i, : len(window)] = window, range(len(window))
            numbers = first + start + np.arange(WINDOWS_PER_CALL)
            pages = np.repeat(_pages(numbers), WINDOW // TILE, axis=0)
            group = TileGroup(jnp.asarray(pages), jnp.asarray(positions.reshape(-1, TILE)))
            best, likely = self._call(tokens.reshape(-1, TILE), group, np.roll(tokens, -1, axis=1).reshape(-1))
            greedy += [best.reshape(tokens.shape)[i, : len(window)] for i, window in enumerate(part)]
            told += [likely.reshape(tokens.shape)[i, : len(window) - 1] for i, window in enumerate(part)]
        return greedy, told

    def answer(self, prompts: list[list[int]]) -> list[list[int]]:
        """`ANSWER` greedy tokens after each prompt, decoded together."""
        newest = np.asarray([best[-1] for best in self.read(prompts)[0]])
        lengths = np.asarray([len(prompt) for prompt in prompts])
        answers = [newest]
        pages = jnp.asarray(_pages(np.arange(len(prompts))))
        for i in range(ANSWER - 1):
            group = TileGroup(pages, jnp.asarray(lengths[:, None] + i, jnp.int32))
            newest, _ = self._call(newest[:, None], group, newest)
            answers.append(newest)
        return np.stack(answers, axis=1).tolist()

    def _call(
        self, tokens_SQ: NDArray[np.int32], group: TileGroup, next_T: NDArray[np.int32]
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        best, told, self._cache = self._forward(self._leaves, self._cache, jnp.asarray(tokens_SQ), group, next_T)
        return np.asarray(best), np.asarray(told)


def _pages(numbers: NDArray[np.int64]) -> NDArray[np.int32]:
    """The page rows of some windows; page 0 is the null page."""
    per_window = WINDOW // PAGE
    return (1 + (numbers[:, None] % len(QUESTIONS)) * per_window + np.arange(per_window)).astype(np.int32)


def measure(path: Path, card: ModelCard) -> Iterator[Row]:
    """A row per format, float32 first."""
    tokenizer = Tokenizer(card.text)
    text = tokenizer.encode(TEXT.read_text("utf-8"))
    windows = [text[i : i + WINDOW] for i in range(0, len(text) - WINDOW + 1, WINDOW)]
    prompts = [tokenizer.encode_chat([{"role": "user", "content": question}]) for question in QUESTIONS]
    answers: list[list[int]] = []
    base = 0.0
    for form in FORMATS:
        model = Model(path, card, form)
        answers = answers or model.answer(prompts)
        whole = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        perplexity = float(np.exp(-np.concatenate(model.read(windows)[1]).mean()))
        base = base or perplexity
        same = [best[-ANSWER - 1 : -1] == np.asarray(whole[i][-ANSWER:]) for i, best in enumerate(model.read(whole)[0])]
        yield Row(
            form.name,
            round(perplexity, 3),
            round(perplexity / base, 4),
            round(float(np.mean(same)), 4),
            round(8 * num_bytes(model.weights) / _num_weights(card), 2),
            round(num_bytes(model.weights) / 2**20, 1),
            model.kv_bytes_per_token,
        )


def _num_weights(card: ModelCard) -> int:
    c = card.config
    layer = (
        c.embed_dim * c.head_dim * 2 * (c.num_heads + c.num_kv_heads) + 3 * c.embed_dim * c.mlp_dim + 2 * c.embed_dim
    )
    return c.num_layers * layer + c.embed_dim + c.vocab_size * c.embed_dim * (1 if c.tie_embeddings else 2)


def main() -> None:
    console = Console(stderr=True)
    path = ensure_demo_model(home(), console)
    card = read_card(path)
    rows = []
    for row in measure(path, card):
        console.print(row)
        rows.append(row)
    table = Table(
        "format", "perplexity", "x float32", "greedy tokens kept", "bits/weight", "weights MiB", "KV bytes/token"
    )
    for row in rows:
        table.add_row(*(f"{value}" for value in asdict(row).values()))
    Console(width=140).print(table)
    json.dump([asdict(row) for row in rows], sys.stdout)
    print()


if __name__ == "__main__":
    main()
