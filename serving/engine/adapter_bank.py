"""AdapterBank: the matrices of all adapters on the device, and the one program that writes an adapter into its place.

An adapter is read and put on the device by whoever wants it, in a thread of its own; the engine's thread only
dispatches the write between two steps. A step that was dispatched before sees the old numbers, one after it the new.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from model.config import ModelConfig
from model.peft import adapter_arrays, read_adapter
from model.tree import Params
from serving.engine.device_arrays import compile_empty
from serving.engine.executables import Executables
from sharding.adapters import abstract_adapters, put_adapter, write_adapter
from sharding.checkpoint import absolute
from sharding.rules import ShardingRules
from sharding.sizes import device_bytes


@dataclass(frozen=True, slots=True)
class AdapterForm:
    """How many adapters a model has room for, and where they lie."""

    saved: ModelConfig
    """The model as it was saved, which adapters were trained for."""
    mesh: Mesh
    rules: ShardingRules
    dtype: str
    num_adapters: int
    rank: int

    def abstract(self, num_adapters: int) -> Params:
        """Of so many adapters."""
        served = self.rules.served(self.saved)
        return abstract_adapters(served, self.mesh, self.rules, self.dtype, num_adapters, self.rank)

    @property
    def num_bytes(self) -> int:
        """Of all adapters and one that is about to be written, on one device."""
        return device_bytes(self.abstract(self.num_adapters + 1))

    def check(self, path: str) -> None:
        """Raises what `read_adapter` raises, without keeping anything."""
        read_adapter(absolute(path), self.saved, self.rank)

    def load(self, path: str) -> Params:
        """An adapter's arrays, on the mesh; to be called in any thread. Raises PodstreamError."""
        adapter = read_adapter(absolute(path), self.saved, self.rank)
        arrays = adapter_arrays(adapter, self.rules.served(self.saved), self.dtype, self.rank, self.rules.kv_copies)
        return jax.block_until_ready(put_adapter(arrays, self.abstract(1)))


class AdapterBank:
    """Owned by the engine's thread, but for `form`."""

    def __init__(self, form: AdapterForm, executables: Executables) -> None:
        self.form = form
        self._executables = executables
        self.layers: Params = compile_empty(form.abstract(form.num_adapters), executables)()
        """`a` and `b` of every place, as steps take them."""
        self._write: jax.stages.Compiled | None = None

    def compile(self) -> None:
        """Before ready, as everything."""
        form = self.form
        whole = NamedSharding(form.mesh, PartitionSpec())
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.layers)
        jitted = jax.jit(partial(write_adapter, rank=form.rank), donate_argnums=0, out_shardings=shardings)
        args = self.layers, form.abstract(1), jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)
        self._write = self._executables.compiled(jitted, args, "write_adapter", form.rank)

    def write(self, place: int, adapter: Params) -> None:
        """Dispatch the writing of what `AdapterForm.load` gave; steps that run after it see it."""
        assert self._write is not None, "compile() comes first"
        self.layers = self._write(self.layers, adapter, np.int32(place))
