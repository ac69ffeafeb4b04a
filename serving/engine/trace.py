"""An XProf trace of what this process does on host and devices. Read it with `xprof` or TensorBoard's profile page."""

from contextlib import AbstractContextManager

import jax

from serving.errors import InvalidRequest


def start_trace(folder: str) -> None:
    """Takes up to a second. Raises InvalidRequest when there can be no trace."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # tracing every Python call would slow the host by more than it shows
    try:
        jax.profiler.start_trace(folder, profiler_options=options)
    except (RuntimeError, OSError) as error:
        raise InvalidRequest(f"no trace can be started: {error}.", param="folder") from error


def stop_trace() -> None:
    """Writes the files; takes seconds. Raises InvalidRequest when they cannot be written."""
    try:
        jax.profiler.stop_trace()
    except (RuntimeError, OSError) as error:
        raise InvalidRequest(f"the trace cannot be written: {error}.", param="folder") from error


def traced_step(number: int) -> AbstractContextManager[None]:
    """Names what happens inside as one step of the trace."""
    return jax.profiler.StepTraceAnnotation("engine step", step_num=number)
