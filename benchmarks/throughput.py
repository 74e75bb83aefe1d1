"""Throughput and latency, ours beside what people would use instead: a table for people, then one JSON line.

python benchmarks/throughput.py --model smollm2-135m-instruct --num-prompts 64 \
    --input-len 32:256 --output-len 32:256 --repeat 3 \
    --engines jpaged,static-contiguous,hf-batch1,hf:64 --baseline-python PATH --baseline-model DIR

Workloads: `random` (--preset nano: 256 requests, prompts and outputs of 100 to 1,024 tokens),
`shared-prefix`, `multi-turn` (a turn's prompt has the answers before it), `lengths` (log-normal, ShareGPT's
means) and `sharegpt --dataset-path FILE`. All requests at once, or `--request-rate` a second (Poisson).

Engines: `jpaged`; `jpaged-no-cache`, its prefix cache off; `static-contiguous`, the same model with every
sequence's longest length reserved ahead, in the same memory; `hf-batch1`, `hf:N` (static batches of N) and
`hf-continuous`, transformers; `vllm` and `vllm-no-cache`. Those of others run in processes of their own on
all cores, from a Hugging Face directory (`benchmarks/peers/export_hf.py` writes one from a GGUF file).

Engines take turns, `--repeat` times. A rate is the median of an engine's runs; `ratio` is the median, over
the turns, of the first engine's output rate divided by this one's, with the extremes beside it.
Every shape is compiled before the clock starts, and a compilation while it runs is an error. Counts come from
the ids that were produced.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import workloads
from serving import Trace, greedy, rates, serve, summarize
from static_batches import StaticEngine
from workloads import parse_range

from jpaged import LLM, Engine
from jpaged.config import DTYPES
from jpaged.engine.metrics import compilations
from jpaged.llm import cpu_dtype
from jpaged.ops.sampling import Variant
from jpaged.weights import Checkpoint, open_checkpoint

PRESETS = {
    "nano": dict(workload="random", num_prompts=256, input_len=(100, 1024), output_len=(100, 1024), seed=0),
}
WORKLOADS = ("random", "shared-prefix", "multi-turn", "lengths", "sharegpt")
OURS = ("jpaged", "jpaged-no-cache", "static-contiguous")
PEERS = re.compile(r"hf-batch1|hf:[1-9]\d*|hf-continuous|vllm|vllm-no-cache")
HERE = Path(__file__).parent
PEER_EXIT_S = 60.0  # a peer that takes longer to end is killed: its figures are there


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    if args.preset:  # what is given beside it still holds
        parser.set_defaults(**PRESETS[args.preset])
        args = parser.parse_args(argv)
    _check(parser, args)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    result, traces = measure(args)
    print(table(result))
    if args.plot:
        from throughput_plot import draw

        draw(result, traces, args.plot)
    print(json.dumps(result))
    compiled = [row["name"] for row in result["engines"] if row.get("compiles_timed")]
    if compiled:
        print(f"error: something compiled while the clock ran: {', '.join(compiled)}", file=sys.stderr)
    return int(bool(compiled))


def measure(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Trace]]:
    """Runs every engine `args.repeat` times in turns: the result, and the last trace of each of ours."""
    checkpoint = open_checkpoint(args.model)
    requests = make_requests(args, checkpoint)
    first = sum(request.after is None for request in requests)
    arrivals = None
    if args.request_rate:
        arrivals = workloads.poisson_arrivals(first, args.request_rate, seed=args.seed)
    longest = args.max_model_len or max(workloads.full_lengths(requests))
    engines: dict[str, Ours | Peer] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "requests.json"
        workloads.save_requests(path, requests)
        try:
            models = Models(args, longest)
            for name in args.engines:
                if name in OURS:
                    engines[name] = Ours(models.engine(name), requests, arrivals, args)
                else:
                    engines[name] = Peer(name, path, args)
            runs: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
            for turn in range(1, args.repeat + 1):
                for name, engine in engines.items():
                    runs[name].append(engine.run())
                    rate = runs[name][-1]["output_tokens_per_s"]
                    print(f"turn {turn} of {args.repeat}: {name} {_text(rate)} output/s", file=sys.stderr)
        finally:
            for engine in engines.values():
                engine.close()
    rows = [row(name, engine.facts, runs[name], runs[args.engines[0]]) for name, engine in engines.items()]
    result = {
        "workload": args.workload,
        "preset": args.preset,
        "requests": len(requests),
        "request_rate": args.request_rate,
        "seed": args.seed,
        "repeat": args.repeat,
        "model": args.model,
        "max_model_len": longest,
        "device": jax.devices()[0].device_kind,
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "jax": jax.__version__,
        "engines": rows,
    }
    return rounded(result), {name: engine.trace for name, engine in engines.items() if engine.trace}


def make_requests(args: argparse.Namespace, checkpoint: Checkpoint) -> list[workloads.BenchRequest]:
    """The workload that was asked for."""
    common = dict(seed=args.seed, vocab_size=checkpoint.config.vocab_size)
    if args.workload == "random":
        return workloads.random_requests(args.num_prompts, args.input_len, args.output_len, **common)
    if args.workload == "lengths":
        return workloads.lengths_requests(args.num_prompts, **common)
    if args.workload == "shared-prefix":
        return workloads.shared_prefix_requests(prefix_len=args.prefix_len, **common)
    if args.workload == "multi-turn":
        return workloads.multi_turn_requests(**common)
    tokenizer = checkpoint.load_tokenizer()
    if tokenizer is None:
        raise SystemExit("error: --workload sharegpt needs a model with a tokenizer")
    return workloads.sharegpt_requests(
        args.dataset_path, args.num_prompts, encode=tokenizer.encode, seed=args.seed
    )


# -- engines ----------------------------------------------------------------------------------


class Models:
    """Our engines, over one copy of the weights."""

    def __init__(self, args: argparse.Namespace, max_model_len: int):
        self._args = args
        self._options = dict(
            max_model_len=max_model_len,
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            deterministic=args.deterministic,
            overlap=not args.no_overlap,
        )
        self._llm: LLM | None = None

    def engine(self, name: str) -> Engine:
        """The engine of that name. All have KV pools of one size."""
        args = self._args
        options = self._options | dict(prefix_cache="radix" if name == "jpaged" else "off")
        if self._llm is None:
            memory = args.kv_cache_memory_bytes
            self._llm = LLM(args.model, dtype=args.dtype, kv_cache_memory_bytes=memory, **options)
            if name != "static-contiguous":
                return self._llm.engine
        first = self._llm.engine
        return (StaticEngine if name == "static-contiguous" else Engine)(
            self._llm.config,
            first.runner.params,
            tokenizer=self._llm.tokenizer,
            num_kv_blocks=first.sizes.num_kv_blocks,
            **options,
        )


class Ours:
    """An engine in this process, warm."""

    def __init__(
        self,
        engine: Engine,
        requests: Sequence[workloads.BenchRequest],
        arrivals: Sequence[float] | None,
        args: argparse.Namespace,
    ):
        self._engine, self._requests, self._arrivals = engine, requests, arrivals
        self._params = functools.partial(greedy, ignore_eos=not args.stop_at_eos)
        self.trace: Trace | None = None
        count, seconds, started = compilations.count, compilations.seconds, time.perf_counter()
        engine.warmup((Variant.GREEDY,), use_tqdm=sys.stderr.isatty())
        self.facts = {
            "dtype": str(engine.runner.params.embed.dtype),
            "kv_bytes": engine.sizes.num_kv_blocks * engine.sizes.kv_block_bytes,
            "warmup_s": time.perf_counter() - started,
            "warmup_compiles": compilations.count - count,
            "warmup_compile_s": compilations.seconds - seconds,
        }

    def run(self) -> dict[str, Any]:
        self.trace = serve(self._engine, self._requests, self._params, self._arrivals)
        return summarize(self.trace) | memory_peak()

    def close(self) -> None:
        """Nothing to do."""


def memory_peak() -> dict[str, Any]:
    """High-water mark of memory, since the process began: the device's, or on a CPU the process's own."""
    stats = jax.devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return {"memory_peak_bytes": stats["peak_bytes_in_use"], "memory_peak_of": "device"}
    return {
        "memory_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "memory_peak_of": "process",
    }


class Peer:
    """Somebody else's engine in a process of its own, which answers a run with a line of JSON."""

    trace = None

    def __init__(self, name: str, requests: Path, args: argparse.Namespace):
        self._name = name
        command = [
            *peer_command(name, args),
            *("--model", args.baseline_model or args.model),
            *("--requests", str(requests)),
            *("--dtype", args.baseline_dtype),
            *(["--stop-at-eos"] if args.stop_at_eos else []),
        ]
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.facts = {"dtype": args.baseline_dtype, **self._answer()}

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"error: {self._name} ended with exit code {self._process.wait()}")
        return json.loads(line)

    def run(self) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write("run\n")
        self._process.stdin.flush()
        found = self._answer()
        return found | rates(found["input_tokens"], found["output_tokens"], found["elapsed_s"])

    def close(self) -> None:
        try:
            self._process.communicate(timeout=PEER_EXIT_S)  # the end of its input ends it
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()


def peer_command(name: str, args: argparse.Namespace) -> list[str]:
    """Interpreter, script and mode of a peer."""
    kind, _, batch = name.partition(":")
    if kind.startswith("vllm"):
        mode = ["--no-prefix-cache"] if kind == "vllm-no-cache" else []
        return [args.baseline_python, str(HERE / "peers" / "vllm_peer.py"), *mode]
    mode = ["static", "--batch", batch] if kind == "hf" else [kind.removeprefix("hf-")]
    return [args.hf_python or args.baseline_python, str(HERE / "peers" / "hf.py"), "--mode", *mode]


# -- results ----------------------------------------------------------------------------------


def row(
    name: str, facts: dict[str, Any], runs: list[dict[str, Any]], first: list[dict[str, Any]]
) -> dict[str, Any]:
    """One engine's line: the run in the middle of its runs, and the ratios of all of them.

    Args:
      runs, first: of this engine and of the first one, turn by turn.
    """
    ordered = sorted(runs, key=lambda run: run["output_tokens_per_s"])
    middle = ordered[(len(ordered) - 1) // 2]
    medians = {
        key: statistics.median(run[key] for run in runs)
        for key in ("output_tokens_per_s", "input_tokens_per_s", "total_tokens_per_s")
    }
    ratios = [
        a["output_tokens_per_s"] / b["output_tokens_per_s"]
        for a, b in zip(first, runs, strict=True)
        if b["output_tokens_per_s"]
    ]
    spread = dict(ratio=None, ratio_low=None, ratio_high=None)
    if ratios:
        spread = dict(ratio=statistics.median(ratios), ratio_low=min(ratios), ratio_high=max(ratios))
    found = {"name": name, **middle, **medians, **spread, **facts}
    if "compiles_timed" in middle:
        found["compiles_timed"] = max(run["compiles_timed"] for run in runs)
    return found


def rounded(value: Any) -> Any:
    """Floats to five digits."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def table(result: dict[str, Any]) -> str:
    """The result for people: the work, a line for each engine, and what is known of ours only, in columns."""
    rows = result["engines"]
    facts = "  ".join(f"{k}={v}" for k, v in result.items() if k != "engines" and v is not None)
    lines = [facts, ""]
    header = ("engine", "dtype", "output/s", "input/s", "total/s", "ratio", "low", "high")
    keys = ("name", "dtype", "output_tokens_per_s", "input_tokens_per_s", "total_tokens_per_s")
    keys += ("ratio", "ratio_low", "ratio_high")
    lines += _columns([header, *(tuple(_text(found[key]) for key in keys) for found in rows)])
    ours = [found for found in rows if "steps" in found]
    if ours:
        detail = [("", *(found["name"] for found in ours))]
        for key in ours[0]:
            if key not in keys:
                detail.append((key, *(_text(found[key]) for found in ours)))
        lines += ["", *_columns(detail)]
    return "\n".join(lines)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{key} {_text(item)}" for key, item in value.items())
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _columns(lines: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines]


# -- arguments --------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    work = parser.add_argument_group("work")
    work.add_argument("--workload", default="random", choices=WORKLOADS)
    work.add_argument("--preset", choices=PRESETS)
    work.add_argument("--num-prompts", type=int, default=64, help="of random, lengths and sharegpt")
    span: dict[str, Any] = dict(type=parse_range, default=(32, 256), metavar="LOW:HIGH", help="of random")
    work.add_argument("--input-len", **span)
    work.add_argument("--output-len", **span)
    work.add_argument("--prefix-len", type=int, default=512, help="of shared-prefix")
    work.add_argument("--dataset-path", type=Path, help="of sharegpt")
    work.add_argument("--request-rate", type=float, help="requests a second (default: all at once)")
    work.add_argument("--stop-at-eos", action="store_true", help="output lengths are limits")
    work.add_argument("--seed", type=int, default=0)
    engine = parser.add_argument_group("our engines")
    engine.add_argument("--dtype", default="auto", choices=("auto", *DTYPES))
    engine.add_argument("--max-model-len", type=int, help="default: what the longest request needs")
    engine.add_argument("--max-num-seqs", type=int)
    engine.add_argument("--max-num-batched-tokens", type=int)
    engine.add_argument("--kv-cache-memory-bytes", type=int)
    engine.add_argument("--deterministic", action="store_true")
    engine.add_argument("--no-overlap", action="store_true", help="wait for each step before the next")
    runs = parser.add_argument_group("engines and runs")
    runs.add_argument("--engines", type=lambda text: text.split(","), default=["jpaged"], metavar="NAME,...")
    runs.add_argument("--repeat", type=int, default=1, help="turns of every engine")
    runs.add_argument("--baseline-python", default=sys.executable, help="interpreter that has the peers")
    runs.add_argument("--hf-python", help="that of transformers, if it is another one")
    runs.add_argument("--baseline-model", help="Hugging Face directory for the peers (default: --model)")
    runs.add_argument("--baseline-dtype", help="of the peers (default: --dtype, or what that means here)")
    runs.add_argument("--plot", type=Path, help="picture: throughput, memory and running sequences over time")
    return parser


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Ends the program if arguments contradict each other; fills in the peers' dtype."""
    unknown = [name for name in args.engines if name not in OURS and not PEERS.fullmatch(name)]
    if unknown or len(set(args.engines)) != len(args.engines):
        parser.error(f"--engines {','.join(args.engines)}: {unknown or 'one is named twice'}")
    peers = [name for name in args.engines if name not in OURS]
    if (args.workload == "sharegpt") != (args.dataset_path is not None):
        parser.error("--workload sharegpt and --dataset-path go together")
    if peers and args.request_rate:
        parser.error(f"--request-rate: {', '.join(peers)} can only be given all requests at once")
    if peers and not (Path(args.baseline_model or args.model) / "config.json").exists():
        parser.error(f"{', '.join(peers)} need --baseline-model: a Hugging Face directory")
    if args.request_rate is not None and not args.request_rate > 0:
        parser.error(f"--request-rate {args.request_rate} must be above 0")
    if args.repeat < 1:
        parser.error(f"--repeat {args.repeat} must be at least 1")
    if args.baseline_dtype is None:
        on_cpu = jax.default_backend() == "cpu"
        args.baseline_dtype = args.dtype if args.dtype != "auto" else cpu_dtype() if on_cpu else "bfloat16"


if __name__ == "__main__":
    sys.exit(main())
