"""A supervisor process for tests that kill it: prints the pids of replica and gateway once all is ready."""

import asyncio
import tempfile
from pathlib import Path

from serving.gateway.listener import listen
from tests.podstream.test_supervisor import Service
from tests.services import until


async def main():
    with tempfile.TemporaryDirectory(prefix="pod-") as folder, listen("127.0.0.1", 0) as listener:
        service = Service(Path(folder), listener)
        running = asyncio.create_task(service.run())
        await until(lambda: service.supervisor._was_ready, 15)
        for name in ("replica", "gateway"):
            print(service.pid(name), flush=True)
        await running


if __name__ == "__main__":
    asyncio.run(main())
