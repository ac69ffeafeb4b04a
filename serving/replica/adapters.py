"""AdapterTable: which adapters a replica has, by the names that clients ask for. Lives on the event loop.

A name is refused from the moment that its adapter is unloaded; answers that are being written with it end as if nothing
had happened, and only then its place is free. A name that comes back, even from the same path, is another adapter:
nothing that was cached for the old one is found again.
"""

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Callable
from functools import partial

from serving.engine.api import EngineLoop, LoadedAdapter
from serving.errors import InvalidRequest, ModelNotFound, Overloaded
from serving.replica.adapter_load import AdapterLoad

logger = logging.getLogger(__name__)

MAX_NAME_CHARS = 256
LOAD_S = 240.0
"""Seconds after which a load is given up: less than a gateway waits."""
MAX_LOADS = 8
"""At once, those that were given up and have not ended yet included."""


class AdapterTable:
    def __init__(self, model: str, engine: EngineLoop, *, is_fixed: bool = True) -> None:
        """`model` is the name without an adapter. Of a fixed table nothing can be loaded or unloaded while serving."""
        self.model = model
        self.is_fixed = is_fixed
        self.on_change: Callable[[], None] = lambda: None
        """Called when there are others than before."""
        self._engine = engine
        self._by_name: dict[str, LoadedAdapter] = {}
        self._loading: dict[str, AdapterLoad] = {}
        self._left_behind: list[AdapterLoad] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._free = list(range(engine.num_adapters - 1, -1, -1))
        self._numbers = itertools.count(1)
        self._in_use: Counter[LoadedAdapter] = Counter()

    @property
    def loaded(self) -> tuple[LoadedAdapter, ...]:
        """In the order in which they came."""
        return tuple(self._by_name.values())

    def find(self, model: str) -> LoadedAdapter | None:
        """None for the model itself. May be called in any thread. Raises ModelNotFound."""
        if model == self.model:
            return None
        if (adapter := self._by_name.get(model)) is None:
            served = ", ".join(map(repr, (self.model, *self._by_name)))
            raise ModelNotFound(
                f"the model {model!r} is not served here, {served} {'are' if self._by_name else 'is'}.", param="model"
            )
        return adapter

    def load_now(self, name: str, path: str) -> None:
        """Before anything is served. Blocks, and raises as `load` does."""
        place = self._take_place(name)
        self._engine.load_adapter(place, path)
        self._by_name[name] = LoadedAdapter(name, path, place, next(self._numbers))

    async def load(self, name: str, path: str) -> None:
        """Raises InvalidRequest for a name that is taken or an adapter that does not fit, ModelNotFound where there is
        no adapter or it cannot be read in LOAD_S, Overloaded, EngineFailed."""
        self._check_may_change()
        self._left_behind = [load for load in self._left_behind if load.thread.is_alive()]
        if (count := len(self._loading) + len(self._left_behind)) >= MAX_LOADS:
            raise Overloaded(f"{count} adapters are being read already, the limit; try again later.", retry_after_s=10)
        place = self._take_place(name)
        self._loading[name] = AdapterLoad(name, partial(self._engine.load_adapter, place, path))
        task = asyncio.create_task(self._load(name, path, place))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await asyncio.shield(task)  # goes on when nobody waits any more: the place must not be given away meanwhile

    def unload(self, name: str) -> None:
        """One that is still being read is given up. Raises ModelNotFound, and InvalidRequest where nothing may be
        unloaded."""
        self._check_may_change()
        if name in self._loading and self._loading[name].give_up():
            return
        if name not in self._by_name:
            raise ModelNotFound(f"there is no adapter {name!r}.", param="lora_name")
        adapter = self._by_name.pop(name)
        logger.info("adapter %s is unloaded; %d answers go on with it", name, self._in_use[adapter])
        if not self._in_use[adapter]:
            self._free.append(adapter.place)
        self.on_change()

    def enter(self, adapter: LoadedAdapter | None) -> None:
        """An answer begins. Raises ModelNotFound when the adapter was unloaded since it was found."""
        if adapter is None:
            return
        if self._by_name.get(adapter.name) != adapter:
            raise ModelNotFound(f"the adapter {adapter.name!r} was just unloaded.", param="model")
        self._in_use[adapter] += 1

    def leave(self, adapter: LoadedAdapter | None) -> None:
        """An answer has ended."""
        if adapter is None:
            return
        self._in_use[adapter] -= 1
        if not self._in_use[adapter]:
            del self._in_use[adapter]
            if self._by_name.get(adapter.name) != adapter:
                self._free.append(adapter.place)

    @property
    def is_reading(self) -> bool:
        """Whether a thread still does that, or waits for what it reads from."""
        return any(load.thread.is_alive() for load in (*self._loading.values(), *self._left_behind))

    def close(self) -> None:
        for load in self._loading.values():
            load.give_up()

    async def _load(self, name: str, path: str, place: int) -> None:
        load = self._loading[name]
        try:
            await load.wait(LOAD_S)
        except TimeoutError as error:
            self._free.append(place)
            self._left_behind.append(load)
            raise ModelNotFound(
                f"the adapter {name!r} was given up while {path} was read, after {LOAD_S:g} s at most; can it be "
                "reached?",
                param="lora_path",
            ) from error
        except BaseException:
            self._free.append(place)
            raise
        finally:
            del self._loading[name]
        self._by_name[name] = LoadedAdapter(name, path, place, next(self._numbers))
        logger.info("adapter %s is loaded from %s", name, path)
        self.on_change()

    def _check_may_change(self) -> None:
        if self.is_fixed:
            raise InvalidRequest(
                "adapters are not loaded or unloaded here; start with --max-loras N to have room for N of them.",
                param="lora_name",
            )

    def _take_place(self, name: str) -> int:
        if not (0 < len(name) <= MAX_NAME_CHARS and name.isprintable()):
            raise InvalidRequest(
                f"an adapter's name must have 1 to {MAX_NAME_CHARS} printable characters.", param="lora_name"
            )
        if name == self.model or name in self._by_name or name in self._loading:
            raise InvalidRequest(
                f"the name {name!r} is taken; unload it first, or choose another one.", param="lora_name"
            )
        if not self._free:
            raise InvalidRequest(
                f"all {self._engine.num_adapters} places for adapters are taken; unload one, or raise --max-loras.",
                param="lora_name",
            )
        return self._free.pop()
