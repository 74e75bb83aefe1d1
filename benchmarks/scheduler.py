"""What the host costs, without a device: matching, evicting, and steps by part; one JSON line last.

python benchmarks/scheduler.py [--tokenizer smollm2-135m-instruct]

A step is the engine's own: it is planned (`schedule`), packed into arrays (`pack`), its ids are taken in
(`update`) and reported (`outputs`). `stream` is the same with every text detokenized at every step.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
import time
from typing import Any

from jpaged import Engine, SamplingParams
from jpaged.engine.packing import PackedStep, Packer, declare_buckets
from jpaged.engine.runner import StepResult
from jpaged.presets import preset
from jpaged.scheduling.block_pool import BlockPool
from jpaged.scheduling.radix_cache import RadixCache
from jpaged.scheduling.scheduler import ScheduledStep
from jpaged.weights import open_checkpoint

BLOCK = 16


def main() -> int:
    args = _parser().parse_args()
    result = {"match_4096_ms": round(match_ms(), 4), "evict_us": round(evict_us(), 3)}
    tokenizer = open_checkpoint(args.tokenizer).load_tokenizer() if args.tokenizer else None
    for name, streamed in (("step", None), *((("stream", tokenizer),) if tokenizer else ())):
        for count in (1, 64, 256):
            for part, value in step_ms(count, streamed).items():
                result[f"{name}_{count}_{part}_ms"] = round(value, 4)
    for key, value in result.items():
        print(f"{key:24s} {value}")
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


class HostRunner:
    """What the host does for a device, without one: packs each step, and makes an id up."""

    def __init__(self, engine_sizes: dict[str, int], vocab_size: int):
        seqs, tokens = engine_sizes["max_num_seqs"], engine_sizes["max_num_batched_tokens"]
        self._rng, self._vocab_size = random.Random(0), vocab_size
        self._packer = Packer(
            declare_buckets(
                max_num_seqs=seqs, max_num_batched_tokens=tokens, min_decode=1, deterministic=False
            ),
            max_num_seqs=seqs,
            table_width=engine_sizes["max_model_len"] // BLOCK,
            block_size=BLOCK,
            vocab_size=vocab_size,
        )

    def run(self, step: ScheduledStep) -> HostHandle:
        return HostHandle(self._packer.pack(step), self._rng.randrange(3, self._vocab_size))

    def register(self, request_id: str, bad_words: list[list[int]]) -> None: ...

    def forget(self, request_id: str) -> None: ...

    def reset(self) -> None: ...


@dataclasses.dataclass(frozen=True)
class HostHandle:
    """A step that is done."""

    packed: PackedStep
    token: int

    def result(self) -> StepResult:
        return StepResult({owner: self.token for _, owner in self.packed.owners}, {}, {}, {})

    def ready(self) -> bool:
        return True


def step_ms(num_seqs: int, tokenizer: Any = None, *, steps: int = 200) -> dict[str, float]:
    """Milliseconds that the host takes for a step of decoding sequences, by part, the mean of many steps.

    Args:
      tokenizer: with one, every sequence's text goes out with every step.
    """
    config = preset("smollm2-135m")
    sizes = dict(max_num_seqs=num_seqs, max_num_batched_tokens=max(2048, num_seqs), max_model_len=2048)
    engine = Engine(
        config,
        None,
        runner=HostRunner(sizes, config.vocab_size),
        tokenizer=tokenizer,
        num_kv_blocks=num_seqs * 128,
        **sizes,
    )
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    rng = random.Random(0)
    for _ in range(num_seqs):
        prompt = rng.choices(range(3, config.vocab_size), k=rng.randint(100, 1024))
        engine.add_request(prompt, params, stream=tokenizer is not None)
    while any(request.num_output_tokens < 2 for request in engine.scheduler.requests()):
        engine.step()
    engine.reset_stats()
    seconds = _time(lambda: [engine.step() for _ in range(steps)])
    parts = engine.stats()["host_seconds"]
    parts["pack"] = parts.pop("dispatch")
    named = {name: value / steps * 1e3 for name, value in parts.items()}
    return {"total": seconds / steps * 1e3, **named}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--tokenizer", metavar="MODEL", help="measure streamed texts, too, with its tokenizer"
    )
    return parser


def _time(function) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
