"""vLLM's server in front of a model that emits one token for everyone per step, at a given pace.

Its front end, its scheduler and everything between them are real. Runs in vLLM's environment, without podstream:

    STEP_S=0.025 PYTHONPATH=tests/bench python tests/bench/vllm_scripted.py --model FOLDER --port 8000 ...
"""

import os
import sys
import time
from concurrent.futures import Future

from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.outputs import ModelRunnerOutput

TOKENS = (253, 260, 282, 354, 281)  # some words of SmolLM2


class ScriptedExecutor(UniProcExecutor):
    """Loads the model and never asks it. Prompts must fit in one step."""

    due_s = 0.0
    count = 0

    @classmethod
    def supports_async_scheduling(cls):
        return False

    def execute_model(self, scheduler_output, non_block=False):
        now = time.monotonic()
        self.due_s = max(self.due_s + float(os.environ["STEP_S"]), now)
        time.sleep(self.due_s - now)
        self.count += 1
        names = list(scheduler_output.num_scheduled_tokens)
        token = [TOKENS[self.count % len(TOKENS)]]
        output = ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, [token for _ in names])
        if not non_block:
            return output
        future = Future()
        future.set_result(output)
        return future


if __name__ == "__main__":
    from vllm.entrypoints.launchers.api_server.entry import main

    backend = "vllm_scripted.ScriptedExecutor"  # imported once more, in the engine's process
    sys.argv += ["--distributed-executor-backend", backend, "--no-async-scheduling"]
    main()
