"""What the host costs, without a device: matching, evicting, and planning steps; one JSON line last.

python benchmarks/scheduler.py
"""

from __future__ import annotations

import json
import random
import sys
import time

from jpaged.request import Request
from jpaged.sampling_params import SamplingParams
from jpaged.scheduling.block_pool import BlockPool
from jpaged.scheduling.kv_manager import KVManager
from jpaged.scheduling.radix_cache import RadixCache
from jpaged.scheduling.scheduler import Scheduler

BLOCK = 16


def main() -> int:
    result = {
        "match_4096_ms": round(match_ms(), 4),
        "evict_us": round(evict_us(), 3),
        **{f"step_{n}_ms": round(step_ms(n), 4) for n in (1, 64, 256)},
    }
    for key, value in result.items():
        print(f"{key:16s} {value}")
    print(json.dumps(result))
    return 0


def _filled_cache(num_tokens: int, rng: random.Random) -> tuple[BlockPool, RadixCache, list[list[int]]]:
    """A tree of prompts of 4,096 tokens that share stems of many lengths."""
    pool = BlockPool(num_tokens // BLOCK * 2)
    cache = RadixCache(pool, BLOCK)
    prompts: list[list[int]] = []
    while cache.num_cached * BLOCK < num_tokens:
        stem = rng.choice(prompts)[: rng.randrange(4096)] if prompts else []
        prompt = stem + rng.choices(range(50_000), k=4096 - len(stem))
        match = cache.match(prompt, len(prompt))
        own = pool.allocate(4096 // BLOCK - len(match.block_ids))
        assert own is not None
        cache.insert(prompt, [*match.block_ids, *own])
        for block in own:
            pool.decref(block)
        cache.unreferenced(own)
        prompts.append(prompt)
    return pool, cache, prompts


def match_ms() -> float:
    """Milliseconds to match a 4,096-token prompt in a tree of 100,000 tokens: the worst of many."""
    _, cache, prompts = _filled_cache(100_000, random.Random(0))
    worst = 0.0
    for prompt in prompts:
        best = min(_time(lambda prompt=prompt: cache.match(prompt, 4095)) for _ in range(20))
        worst = max(worst, best)
    return worst * 1e3


def evict_us() -> float:
    """Microseconds per block to evict a tree of 100,000 tokens, sixteen blocks at a time."""
    _, cache, _ = _filled_cache(100_000, random.Random(0))
    count = cache.num_evictable
    return _time(lambda: [cache.evict(16) for _ in range(count // 16 + 1)]) / count * 1e6


def step_ms(num_seqs: int, steps: int = 200) -> float:
    """Milliseconds of `schedule` and `update` for running sequences that decode, the mean of many steps."""
    kv = KVManager(num_seqs * 128, BLOCK, prefix_cache="radix")
    scheduler = Scheduler(kv, max_num_seqs=num_seqs, max_num_batched_tokens=max(2048, num_seqs))
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    rng = random.Random(0)
    for i in range(num_seqs):
        prompt = rng.choices(range(50_000), k=rng.randint(100, 1024))
        scheduler.add(Request(f"r{i}", prompt, params, arrival=i))
    while any(request.num_output_tokens < 2 for request in scheduler.requests()):
        _step(scheduler, rng)
    return _time(lambda: [_step(scheduler, rng) for _ in range(steps)]) / steps * 1e3


def _step(scheduler: Scheduler, rng: random.Random) -> None:
    step = scheduler.schedule()
    assert step is not None
    token = rng.randrange(50_000)
    scheduler.update(step, {s.request_id: token for s in step.sequences if s.samples}, {})


def _time(function) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
