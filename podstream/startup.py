"""Startup: watches a service become ready through its own `/ready`, and shows what it is doing meanwhile."""

import asyncio
import json
import shlex

import httpx
from rich.console import Console

POLL_S = 0.2
REQUEST_TIMEOUT_S = 2.0


class Startup:
    """Tells on a terminal with a spinner, elsewhere with a line whenever the phase changes."""

    def __init__(self, base_url: str, console: Console) -> None:
        self._base_url = base_url
        self._console = console

    async def until_ready(self) -> None:
        """Return once a token can be made, having printed the ready line and how to try it."""
        async with httpx.AsyncClient(base_url=self._base_url, timeout=REQUEST_TIMEOUT_S) as client:
            await self._watch(client)
            self._announce(*await _model_and_source(client))

    async def _watch(self, client: httpx.AsyncClient) -> None:
        shown: set[str] = set()
        with self._console.status("starting") as status:
            while (detail := await _missing(client)) is not None:
                if detail not in shown and not self._console.is_terminal:
                    self._console.print(f"starting: {detail}", highlight=False, markup=False)
                status.update(f"starting: {detail}")
                shown.add(detail)
                await asyncio.sleep(POLL_S)

    def _announce(self, model: str, source: str) -> None:
        self._console.print(f"[bold green]ready[/]: {model} at {self._base_url}/v1", highlight=False)
        self._console.print(f"weights: {source}", highlight=False, markup=False, soft_wrap=True)
        self._console.print("try it:", highlight=False)
        self._console.print(example_curl(self._base_url, model), highlight=False, markup=False, soft_wrap=True)


def example_curl(base_url: str, model: str) -> str:
    """To be copied and pasted."""
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    body = json.dumps({"model": model, "messages": messages, "temperature": 0, "stream": True})
    return f"curl -N {base_url}/v1/chat/completions -H 'content-type: application/json' -d {shlex.quote(body)}"


async def _missing(client: httpx.AsyncClient) -> str | None:
    """What the service still waits for; None when it is ready."""
    try:
        response = await client.get("/ready")
    except httpx.TransportError:
        return "the gateway"
    if response.status_code == httpx.codes.OK:
        return None
    body = response.json()
    if body["status"] in ("unavailable", "failed"):  # of its failure the replica says more itself, as its last words
        return "the replica"
    return str(body["detail"]) or "the replica"


async def _model_and_source(client: httpx.AsyncClient) -> tuple[str, str]:
    """What the model is called, and where its weights came from: of a run, with the step."""
    response = await client.get("/v1/models")
    row = response.raise_for_status().json()["data"][0]
    return str(row["id"]), str(row["source"])
