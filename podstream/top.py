"""Top: what a service is doing right now, in this terminal, from its `/metrics` alone."""

import time
from collections import deque
from collections.abc import Callable

import httpx
from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from model.errors import PodstreamError
from podstream.dashboard import dashboard
from podstream.figures import figures
from podstream.scrape import Scrape

TIMEOUT_S = 3.0
WINDOW_S = 10.0  # rates are of this long: short enough to be now, long enough not to jump
HISTORY = 48  # columns of the curve


class TopFailed(PodstreamError):
    """There is nothing to watch; the message says why."""


class Top:
    """Owns the scrapes of the last `WINDOW_S` seconds and a short history of the token rate."""

    def __init__(
        self,
        url: str,
        console: Console,
        *,
        every_s: float = 1.0,
        transport: httpx.BaseTransport | None = None,
        now: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._console = console
        self._every_s = every_s
        self._now, self._pause = now, pause
        self._client = httpx.Client(timeout=TIMEOUT_S, transport=transport)
        self._scrapes: deque[Scrape] = deque(maxlen=2 + int(WINDOW_S / every_s))
        self._rates: deque[float] = deque(maxlen=HISTORY)

    def run(self) -> None:
        """Draw until Ctrl-C. Raises TopFailed when nothing answers at the start; later it says so and goes on."""
        with self._client:
            self._scrapes.append(self._scrape())
            self._pause(min(1.0, self._every_s))
            try:
                with Live(self._screen(), console=self._console, screen=self._console.is_terminal) as live:
                    while True:
                        self._pause(self._every_s)
                        live.update(self._screen(), refresh=True)
            except KeyboardInterrupt:
                return

    def _screen(self) -> RenderableType:
        try:
            self._scrapes.append(self._scrape())
        except TopFailed as error:
            return Panel(Text(str(error), style="red"), title=self._title())
        now = figures(self._scrapes[0], self._scrapes[-1])
        self._rates.append(now.generated_per_s or 0.0)
        return Panel(dashboard(now, tuple(self._rates)), title=self._title())

    def _title(self) -> str:
        models = self._scrapes[-1].models if self._scrapes else ()
        return f"podstream top · {self._url} · {', '.join(models) or 'no model yet'}"

    def _scrape(self) -> Scrape:
        """Raises TopFailed with the way out."""
        try:
            response = self._client.get(f"{self._url}/metrics")
        except httpx.TransportError as error:
            raise TopFailed(
                f"nothing answers at {self._url} ({error}); start it with `podstream serve` or give --url."
            ) from error
        if response.is_error:
            raise TopFailed(f"{self._url}/metrics answers {response.status_code}; is it a podstream gateway?")
        try:
            return Scrape.read(response.text, self._now())
        except ValueError as error:
            raise TopFailed(f"{self._url}/metrics is not a page of metrics ({error}); give another --url.") from error
