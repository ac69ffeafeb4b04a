"""Fingerprints: what must be equal on all hosts, by name, so that a difference can be named. Imports no JAX.

One is compared as hosts join, before anything is loaded; the other when each has loaded the model.
"""

import dataclasses
import platform
from importlib.metadata import version

import orjson

from model.card import ModelCard
from serving.config import EngineConfig
from serving.revision import digest, revision

Fingerprint = dict[str, str]

LOCAL = ("compile_cache", "crash_folder", "profile_folder")
"""Fields of an EngineConfig that are a host's own business."""
PACKAGES = ("podstream", "jax", "jaxlib", "flax", "numpy", "llguidance")


def of_config(config: EngineConfig) -> Fingerprint:
    """The configuration, and what will carry it out."""
    fields = {f.name: str(getattr(config, f.name)) for f in dataclasses.fields(config) if f.name not in LOCAL}
    versions = {f"version of {name}": version(name) for name in PACKAGES}
    return {**fields, **versions, "version of Python": platform.python_version(), "source code": revision()}


def of_model(card: ModelCard, max_seq_len: int, num_pages: int) -> Fingerprint:
    """What was loaded, and what planning goes by."""
    text = orjson.dumps(card.to_json(), option=orjson.OPT_SORT_KEYS).decode()
    return {"model card": digest(text), "longest sequence": str(max_seq_len), "KV pages": str(num_pages)}


def difference(mine: Fingerprint, theirs: Fingerprint) -> str:
    """The first thing that is not equal; empty when all is."""
    for name in (*mine, *(name for name in theirs if name not in mine)):
        here, there = mine.get(name, "not known"), theirs.get(name, "not known")
        if here != there:
            return f"{name} is {there} there and {here} here"
    return ""
