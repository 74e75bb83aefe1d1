"""What peers have in common: their arguments, their waves, and the line that answers a run."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from workloads import BenchRequest, load_requests, waves

WARM_UP = BenchRequest([7] * 40, 4)
Generate = Callable[[list[BenchRequest]], list[list[int]]]
Counts = tuple[int, int, float]  # input tokens, output tokens, seconds
Run = Callable[[list[BenchRequest]], Counts]


def peer_parser(doc: str | None) -> argparse.ArgumentParser:
    """The arguments that every peer has."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--model", required=True, help="Hugging Face directory")
    parser.add_argument("--requests", required=True, type=Path, help="JSON of workloads.save_requests")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--stop-at-eos", action="store_true")
    return parser


def run_waves(requests: list[BenchRequest], batch_size: int | None, generate: Generate) -> Counts:
    """Runs requests in waves, each in batches of `batch_size` (all at once without), in the requests' order.

    Args:
      generate: ids that each request of a batch produced, no more than it wants.
    """
    histories: list[list[int]] = [[] for _ in requests]
    inputs = outputs = 0
    started = time.perf_counter()
    for wave in waves(requests):
        size = batch_size or len(wave)
        for start in range(0, len(wave), size):
            chosen = wave[start : start + size]
            batch = []
            for index in chosen:
                request = requests[index]
                before = [] if request.after is None else histories[request.after]
                batch.append(dataclasses.replace(request, prompt_token_ids=before + request.prompt_token_ids))
            for index, request, ids in zip(chosen, batch, generate(batch), strict=True):
                histories[index] = request.prompt_token_ids + ids
                inputs += len(request.prompt_token_ids)
                outputs += len(ids)
    return inputs, outputs, time.perf_counter() - started


def answer_runs(
    parser: argparse.ArgumentParser,
    make: Callable[[argparse.Namespace], AbstractContextManager[Run]],
) -> None:
    """Makes an engine, warms it up on something short, then runs once for every line on standard input.

    Only one line of JSON for the warm-up and one for each run go to standard output; what libraries
    print goes to standard error.

    Args:
      make: loads the model, gives what runs requests, and stops its threads when no more come: the
        interpreter waits for them before it calls what was registered for its end.
    """
    args = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    requests = load_requests(args.requests)
    with make(args) as run:
        started = time.perf_counter()
        run([WARM_UP])
        found: dict[str, float] = dict(warmup_s=time.perf_counter() - started)
        print(json.dumps(found), file=answers, flush=True)
        for _ in sys.stdin:
            inputs, outputs, seconds = run(requests)
            found = dict(input_tokens=inputs, output_tokens=outputs, elapsed_s=seconds)
            print(json.dumps(found), file=answers, flush=True)
