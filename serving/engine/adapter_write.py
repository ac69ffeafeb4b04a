"""AdapterWrite: an adapter on its way from whoever read it to the engine's thread, which writes it between steps."""

import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from model.errors import PodstreamError
from model.peft import NoSuchAdapter
from model.tree import Params
from serving.engine.adapter_bank import AdapterForm
from serving.errors import EngineFailed, InvalidRequest, ModelNotFound, ServiceError

logger = logging.getLogger(__name__)

TIMEOUT_S = 60.0
"""As long as a step may take before it counts as stuck."""


@dataclass(frozen=True, slots=True, eq=False)
class AdapterWrite:
    """An inbox message."""

    place: int
    path: str
    arrays: Params
    _done: "Future[None]" = field(default_factory=Future)

    @classmethod
    def read(cls, form: AdapterForm, place: int, path: str, may_write: Callable[[], bool]) -> "AdapterWrite":
        """Raises ModelNotFound or InvalidRequest, since it was a request that named the path, and when it was given up
        meanwhile."""
        assert 0 <= place < form.num_adapters, f"there is no place {place} for an adapter"
        try:
            arrays = form.load(path)
            if not may_write():
                raise InvalidRequest(f"the load of {path} was given up.", param="lora_path")
            return cls(place, path, arrays)
        except NoSuchAdapter as error:
            raise ModelNotFound(str(error), param="lora_path") from error
        except PodstreamError as error:
            raise InvalidRequest(str(error), param="lora_path") from error

    def run(self, write: Callable[[int, Params], None]) -> None:
        """On the engine's thread. A step that comes later finds out if the device has lost the others, too."""
        try:
            write(self.place, self.arrays)
        except Exception as error:
            logger.exception("the adapter %s cannot be written to the device", self.path)
            why = f"the adapter {self.path} cannot be written to the device ({type(error).__name__}: {error})."
            self.refuse(EngineFailed(why))
        else:
            self._done.set_result(None)

    def refuse(self, error: ServiceError) -> None:
        self._done.set_exception(error)

    def wait(self) -> None:
        """Until it is dispatched. Raises EngineFailed."""
        try:
            self._done.result(TIMEOUT_S)
        except TimeoutError as error:
            raise EngineFailed(f"the engine did not take the adapter {self.path} in {TIMEOUT_S:g} s.") from error
