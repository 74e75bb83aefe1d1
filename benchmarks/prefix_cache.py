"""What the prefix cache saves: the same work with the cache off and on, then one JSON line.

python benchmarks/prefix_cache.py --model smollm2-135m-instruct --workload shared-prefix --prefix-len 509

Workloads: `shared-prefix` (8 groups x 8 prompts, a question of 32 tokens after the prefix, 32 output
tokens), `multi-turn` (16 chats x 6 turns; what was generated is hit, too), `unique` (nothing to reuse:
what the cache costs). Best possible hits are those of a cache that knows every token of everything
computed before, one prompt at a time. Shapes are compiled before the clock starts.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
import time

from workloads import BenchRequest, TokenTrie, random_requests, shared_prefix_requests

from jpaged import LLM, SamplingParams
from jpaged.engine.metrics import compilations
from jpaged.ops.sampling import Variant

CHATS, TURNS, TURN_LEN, ANSWER_LEN = 16, 6, 48, 32


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    llms = {}
    for kind in ("off", args.prefix_cache):
        llm = LLM(args.model, dtype=args.dtype, max_model_len=1024, prefix_cache=kind)
        llm.warmup((Variant.GREEDY,), use_tqdm=sys.stderr.isatty())
        llms[kind] = llm
    rounds = _rounds(args, llms["off"].config.vocab_size)
    runs: dict[str, list[dict]] = {kind: [] for kind in llms}
    for _ in range(args.repeat):
        for kind, llm in llms.items():
            runs[kind].append(_run(llm, rounds))
    off, on = (min(runs[kind], key=lambda run: run["elapsed_s"]) for kind in llms)
    rate = _prefill_rate(llms["off"], args)
    result = _compare(args, off, on, rate)
    for key, value in result.items():
        print(f"{key:26s} {value}")
    print(json.dumps(result))
    return 0


def _rounds(args: argparse.Namespace, vocab_size: int) -> list[list[BenchRequest]]:
    """Requests in rounds: a round starts when the one before has ended, after its answers."""
    if args.workload == "shared-prefix":
        shape = dict(prefix_len=args.prefix_len, question_len=32, output_len=32)
        return [shared_prefix_requests(8, 8, **shape, seed=args.seed, vocab_size=vocab_size)]
    if args.workload == "unique":
        return [random_requests(64, (541, 541), (32, 32), seed=args.seed, vocab_size=vocab_size)]
    rng = random.Random(args.seed)
    return [
        [
            BenchRequest([rng.randrange(3, vocab_size) for _ in range(TURN_LEN)], ANSWER_LEN)
            for _ in range(CHATS)
        ]
        for _ in range(TURNS)
    ]


def _run(llm: LLM, rounds: list[list[BenchRequest]]) -> dict:
    """Runs all rounds on an empty cache; each round's prompts continue the conversations before it."""
    llm.engine.reset_prefix_cache()
    llm.engine.reset_stats()
    trie, best_hits, unique, prompt_tokens, output_tokens, elapsed = TokenTrie(), 0, 0, 0, 0, 0.0
    histories: list[list[int]] = [[] for _ in rounds[0]]
    compiled = compilations.count
    host = _HostTime(llm)
    for requests in rounds:
        prompts = [h + r.prompt_token_ids for h, r in zip(histories, requests, strict=True)]
        params = [SamplingParams(temperature=0, ignore_eos=True, max_tokens=r.output_len) for r in requests]
        started = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        elapsed += time.perf_counter() - started
        for prompt in prompts:
            best_hits += min(trie.find(prompt), len(prompt) - 1)
            unique += trie.add(prompt)
        answers = [output.outputs[0].token_ids for output in outputs]
        for prompt, answer in zip(prompts, answers, strict=True):
            trie.add(prompt + answer[:-1])  # the last token is sampled, never computed
        histories = [p + a for p, a in zip(prompts, answers, strict=True)]
        prompt_tokens += sum(map(len, prompts))
        output_tokens += sum(map(len, answers))
    if compilations.count != compiled:
        raise SystemExit("error: something compiled while the clock ran")
    stats = llm.engine.stats()
    return {
        "elapsed_s": elapsed,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "hit_tokens": stats["prefix_cache_hits"],
        "best_hit_tokens": best_hits,
        "unique_prompt_tokens": unique,
        "host_s": host.stop(),
        "copies": stats["prefix_cache_copies"],
    }


class _HostTime:
    """Seconds spent planning and taking in steps."""

    def __init__(self, llm: LLM):
        self._scheduler = llm.engine.scheduler
        self._seconds = 0.0
        self._names = ("schedule", "update")
        for name in self._names:
            setattr(self._scheduler, name, self._timed(getattr(self._scheduler, name)))

    def _timed(self, function):
        def call(*args):
            started = time.perf_counter()
            try:
                return function(*args)
            finally:
                self._seconds += time.perf_counter() - started

        return call

    def stop(self) -> float:
        for name in self._names:
            delattr(self._scheduler, name)
        return self._seconds


def _prefill_rate(llm: LLM, args: argparse.Namespace) -> float:
    """Prompt tokens per second of prompts alone, without a cache."""
    requests = random_requests(16, (512, 512), (1, 1), seed=1, vocab_size=llm.config.vocab_size)
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=1)
    started = time.perf_counter()
    llm.generate([request.prompt_token_ids for request in requests], params, use_tqdm=False)
    return 16 * 512 / (time.perf_counter() - started)


def _compare(args: argparse.Namespace, off: dict, on: dict, rate: float) -> dict:
    computed = on["prompt_tokens"] - on["hit_tokens"]
    saved_s = off["elapsed_s"] - on["elapsed_s"]
    return {
        "workload": args.workload,
        "prefix_cache": args.prefix_cache,
        "prefix_len": args.prefix_len if args.workload == "shared-prefix" else None,
        "elapsed_s_off": round(off["elapsed_s"], 3),
        "elapsed_s": round(on["elapsed_s"], 3),
        "speedup": round(off["elapsed_s"] / on["elapsed_s"], 3),
        "output_tokens_per_s_off": round(off["output_tokens"] / off["elapsed_s"], 2),
        "output_tokens_per_s": round(on["output_tokens"] / on["elapsed_s"], 2),
        "prompt_tokens": on["prompt_tokens"],
        "hit_tokens": on["hit_tokens"],
        "best_hit_tokens": on["best_hit_tokens"],
        "computed_prompt_tokens": computed,
        "unique_prompt_tokens": on["unique_prompt_tokens"],
        "copies": on["copies"],
        "prefill_tokens_per_s": round(rate, 1),
        "saved_of_expected": round(saved_s / (on["hit_tokens"] / rate), 3) if on["hit_tokens"] else None,
        "host_share_off": round(off["host_s"] / off["elapsed_s"], 5),
        "host_share": round(on["host_s"] / on["elapsed_s"], 5),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument(
        "--workload", default="shared-prefix", choices=("shared-prefix", "multi-turn", "unique")
    )
    parser.add_argument("--prefix-cache", default="radix", choices=("radix", "hash"))
    parser.add_argument("--prefix-len", type=int, default=509)
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    parser.add_argument("--repeat", type=int, default=1, help="alternations; the fastest run of each counts")
    parser.add_argument("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    sys.exit(main())
