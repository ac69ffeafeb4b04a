"""vLLM's scheduler alone, as `tests.bench.host` measures ours: schedule, then update with one token for each sequence.

Runs in vLLM's environment, not in podstream's, and imports nothing of it:

    <environment of tests.bench.peers>/bin/python tests/bench/vllm_scheduler.py <its model folder> [sequences ...]

Its figure leaves out what vLLM does beside that on the host: preparing the batch's tensors in the model runner, and the
thread that hands outputs on. Ours has the packed batch in it.
"""

import json
import sys
import time

import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK, CONTEXT, PROMPT = 16, 2_048, 100


def scheduler_of(folder: str, num_running: int) -> Scheduler:
    config = EngineArgs(
        model=folder, dtype="float32", max_model_len=CONTEXT, max_num_seqs=num_running, block_size=BLOCK,
        max_num_batched_tokens=max(2_048, num_running), enable_prefix_caching=True,
    ).create_engine_config()  # fmt: skip
    num_blocks = num_running * CONTEXT // BLOCK + 1
    config.cache_config.num_gpu_blocks = num_blocks
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=3, head_size=64, dtype=torch.float32)
    caches = KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)])
    return Scheduler(config, caches, StructuredOutputManager(config), BLOCK, log_stats=False)


def step(scheduler: Scheduler) -> int:
    plan = scheduler.schedule()
    names = list(plan.num_scheduled_tokens)
    places = {name: place for place, name in enumerate(names)}
    tokens = [[1] if scheduler.requests[name].num_computed_tokens >= PROMPT else [] for name in names]
    scheduler.update_from_output(plan, ModelRunnerOutput(names, places, tokens))
    return sum(map(len, tokens))


def microseconds_per_step(folder: str, num_running: int, num_steps: int = 300) -> float:
    """Median over steps in which all decode."""
    init_none_hash(sha256)
    hasher, scheduler = get_request_block_hasher(BLOCK, sha256), scheduler_of(folder, num_running)
    greedy = SamplingParams(temperature=0.0, max_tokens=CONTEXT - PROMPT - 1, ignore_eos=True)
    for number in range(num_running):
        prompt = [number % 50 + 2] * PROMPT
        scheduler.add_request(Request(str(number), prompt, greedy, None, block_hasher=hasher))
    while step(scheduler) < num_running:
        pass
    times = []
    for _ in range(num_steps):
        started = time.perf_counter()
        step(scheduler)
        times.append(time.perf_counter() - started)
    return round(sorted(times)[len(times) // 2] * 1e6, 1)


if __name__ == "__main__":
    counts = [int(text) for text in sys.argv[2:]] or [8, 64, 256, 1_024]
    print(json.dumps({str(count): microseconds_per_step(sys.argv[1], count) for count in counts}))
