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
import sys

from serving import serve, summarize
from workloads import (
    BenchRequest,
    TokenTrie,
    multi_turn_requests,
    random_requests,
    shared_prefix_requests,
)

from jpaged import LLM
from jpaged.ops.sampling import Variant


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    llms = {}
    for kind in ("off", args.prefix_cache):
        llm = LLM(args.model, dtype=args.dtype, max_model_len=1024, prefix_cache=kind)
        llm.warmup((Variant.GREEDY,), use_tqdm=sys.stderr.isatty())
        llms[kind] = llm
    requests = _requests(args, llms["off"].config.vocab_size)
    runs: dict[str, list[dict]] = {kind: [] for kind in llms}
    for _ in range(args.repeat):
        for kind, llm in llms.items():
            runs[kind].append(_run(llm, requests))
    off, on = (min(runs[kind], key=lambda run: run["elapsed_s"]) for kind in llms)
    rate = _prefill_rate(llms["off"])
    result = _compare(args, off, on, rate)
    for key, value in result.items():
        print(f"{key:26s} {value}")
    print(json.dumps(result))
    return 0


def _requests(args: argparse.Namespace, vocab_size: int) -> list[BenchRequest]:
    common = dict(seed=args.seed, vocab_size=vocab_size)
    if args.workload == "shared-prefix":
        return shared_prefix_requests(prefix_len=args.prefix_len, **common)
    if args.workload == "unique":
        return random_requests(64, (541, 541), (32, 32), **common)
    return multi_turn_requests(**common)


def _run(llm: LLM, requests: list[BenchRequest]) -> dict:
    """Runs all requests on an empty cache, and counts what a perfect cache would find."""
    trace = serve(llm.engine, requests)
    if trace.compiles:
        raise SystemExit("error: something compiled while the clock ran")
    trie, best_hits, unique = TokenTrie(), 0, 0
    histories: list[list[int]] = []
    for request, done in zip(requests, trace.requests, strict=True):
        before = [] if request.after is None else histories[request.after]
        prompt = before + request.prompt_token_ids
        best_hits += min(trie.find(prompt), len(prompt) - 1)
        unique += trie.add(prompt)
        histories.append(prompt + done.outputs[0])
        trie.add(histories[-1][:-1])  # the last token is sampled, never computed
    figures = summarize(trace)
    host = trace.stats["host_seconds"]
    return {
        "elapsed_s": trace.elapsed,
        "prompt_tokens": figures["input_tokens"],
        "output_tokens": figures["output_tokens"],
        "hit_tokens": figures["hit_tokens"],
        "best_hit_tokens": best_hits,
        "unique_prompt_tokens": unique,
        "host_s": host["schedule"] + host["update"],
        "copies": trace.stats["prefix_cache_copies"],
    }


def _prefill_rate(llm: LLM) -> float:
    """Prompt tokens per second of prompts alone, without a cache."""
    requests = random_requests(16, (512, 512), (1, 1), seed=1, vocab_size=llm.config.vocab_size)
    return 16 * 512 / serve(llm.engine, requests).elapsed


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
