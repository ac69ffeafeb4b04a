"""Counts what XLA compiles in this process, so that a compile in service shows up as a number instead of as a pause."""

import jax

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCount:
    """Listens from its creation on; JAX has no way to stop listening, so make one per process."""

    def __init__(self) -> None:
        self._total = 0
        self._at_ready = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def mark_ready(self) -> None:
        """Everything up to now was start-up."""
        self._at_ready = self._total

    def after_ready(self) -> int:
        return self._total - self._at_ready

    def _on_event(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == _COMPILE_EVENT:
            self._total += 1
