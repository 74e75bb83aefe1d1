"""Runs a JSONL file of requests through a model and writes a record for each as it finishes.

python scripts/generate_batch.py --model smollm2-135m-instruct --input scripts/prompts.jsonl \
    --output out/answers.jsonl --print

`jpaged/offline.py` describes both files. Exit code: 0, 1 if any record is an error, 2 if the job could
not start, 130 after Ctrl-C; after that, or after a kill, the same command with --resume continues.
"""

from __future__ import annotations

import argparse
import logging
import sys

from tqdm import tqdm

from jpaged import LLM
from jpaged.config import AS_STORED, DTYPES, LARGEST, QUANTIZATIONS
from jpaged.engine.metrics import since_process_start
from jpaged.offline import Record, check_batch, run_batch


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    job = dict(seed=args.seed, resume=args.resume, max_tokens=args.max_tokens)
    try:
        check_batch(args.input, args.output, **job)
        llm = _load(args)
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        summary = run_batch(
            llm,
            args.input,
            args.output,
            **job,
            use_tqdm=sys.stderr.isatty(),
            on_record=_print_record if args.print else None,
        )
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: --resume continues where it stopped", file=sys.stderr)
        return 130
    print(summary.describe())
    moment = llm.engine.stats().get("first_token_time")
    if moment is not None and (seconds := since_process_start(moment)) is not None:
        print(f"first token      {seconds:.2f} s after the process started")
    return summary.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--model", required=True, help="a directory, a .gguf file, a short name, or owner/name"
    )
    parser.add_argument("--input", required=True, help="JSONL file of requests")
    parser.add_argument("--output", required=True, help="JSONL file of records; its directory is made")
    parser.add_argument(
        "--resume", action="store_true", help="continue an earlier run: skip what it has done"
    )
    parser.add_argument("--print", action="store_true", help="print each answer as it finishes")
    parser.add_argument("--seed", type=int, default=0, help="where requests without a seed take theirs from")
    parser.add_argument(
        "--max-tokens", type=int, help="for requests that do not say (default: 16, chats no limit)"
    )
    engine = parser.add_argument_group("engine", "what is not given is derived from the model and the device")
    engine.add_argument("--dtype", default="auto", choices=("auto", *DTYPES))
    engine.add_argument(
        "--kv-cache-dtype",
        default="auto",
        choices=("auto", *DTYPES, *LARGEST),
        help="default: that of --dtype",
    )
    engine.add_argument(
        "--quantization",
        choices=(*QUANTIZATIONS, AS_STORED),
        help="rounds the layers' matrices at load, or keeps those of a GGUF file (default: none)",
    )
    engine.add_argument("--max-model-len", type=int, help="longest sequence in tokens, prompt and output")
    engine.add_argument("--max-num-seqs", type=int, help="most sequences that run at once")
    engine.add_argument("--max-num-batched-tokens", type=int, help="most tokens computed in one step")
    engine.add_argument("--kv-cache-memory-bytes", type=int, help="size of the KV cache")
    engine.add_argument(
        "--deterministic", action="store_true", help="bitwise equal results whatever runs beside a request"
    )
    return parser


def _load(args: argparse.Namespace) -> LLM:
    return LLM(
        args.model,
        dtype=args.dtype,
        quantization=args.quantization,
        kv_cache_dtype=args.kv_cache_dtype,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        kv_cache_memory_bytes=args.kv_cache_memory_bytes,
        deterministic=args.deterministic,
        seed=args.seed,
    )


def _print_record(record: Record) -> None:
    if record["error"] is not None:
        tqdm.write(f"[{record['id']}] error: {record['error']['message']}\n")
        return
    for choice in record["response"]["body"]["choices"]:
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        tqdm.write(f"[{record['id']}] {text.strip()}\n")


if __name__ == "__main__":
    sys.exit(main())
