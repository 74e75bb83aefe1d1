"""Offline throughput on random prompts: a table for people, then one JSON line.

python benchmarks/throughput.py --model smollm2-135m-instruct --num-prompts 64 \
    --input-len 32:256 --output-len 32:256 --seed 0

Every shape is compiled before the clock starts, and a compilation while it runs is an error. Counts
come from the ids that were produced.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import sys
import time

import jax
from workloads import parse_range, random_requests

from jpaged import LLM, SamplingParams
from jpaged.engine.metrics import compilations
from jpaged.ops.sampling import Variant


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    longest = args.input_len[1] + args.output_len[1]
    llm = LLM(
        args.model,
        dtype=args.dtype,
        max_model_len=args.max_model_len or longest,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        deterministic=args.deterministic,
    )
    started = time.perf_counter()
    llm.warmup((Variant.GREEDY,), use_tqdm=sys.stderr.isatty())
    warmup_s = time.perf_counter() - started
    requests = random_requests(
        args.num_prompts, args.input_len, args.output_len, seed=args.seed, vocab_size=llm.config.vocab_size
    )
    result = run(llm, requests)
    result |= {
        "model": args.model,
        "dtype": str(llm.engine.runner.params.embed.dtype),
        "device": jax.devices()[0].device_kind,
        "machine": platform.processor() or platform.machine(),
        "jax": jax.__version__,
        "warmup_s": round(warmup_s, 2),
    }
    for key, value in result.items():
        print(f"{key:24s} {value}")
    print(json.dumps(result))
    if result["compiles_timed"]:
        print("error: something compiled while the clock ran", file=sys.stderr)
        return 1
    return 0


def run(llm: LLM, requests: list) -> dict:
    """Generates every request's tokens, greedily, and counts."""
    params = [
        SamplingParams(temperature=0, ignore_eos=True, max_tokens=request.output_len) for request in requests
    ]
    llm.engine.reset_stats()
    compiled = compilations.count
    started = time.perf_counter()
    outputs = llm.generate([r.prompt_token_ids for r in requests], params, use_tqdm=False)
    elapsed = time.perf_counter() - started
    failed = [output for output in outputs if output.error is not None]
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs if output.error is None)
    output_tokens = sum(len(c.token_ids) for output in outputs for c in output.outputs)
    stats = llm.engine.stats()
    return {
        "requests": len(outputs),
        "failed": len(failed),
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "elapsed_s": round(elapsed, 3),
        "output_tokens_per_s": round(output_tokens / elapsed, 2),
        "total_tokens_per_s": round((prompt_tokens + output_tokens) / elapsed, 2),
        "kv_waste": round(stats["kv_waste"], 5),
        "kv_blocks_peak": stats["kv_blocks_peak"],
        "preemptions": stats["num_preemptions"],
        "steps": stats["num_steps"],
        "compiles_timed": compilations.count - compiled,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--input-len", type=parse_range, default=(32, 256), metavar="LOW:HIGH")
    parser.add_argument("--output-len", type=parse_range, default=(32, 256), metavar="LOW:HIGH")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    parser.add_argument("--max-model-len", type=int, help="default: what the longest request needs")
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--max-num-batched-tokens", type=int)
    parser.add_argument("--deterministic", action="store_true")
    return parser


if __name__ == "__main__":
    sys.exit(main())
