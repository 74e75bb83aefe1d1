"""vLLM as a peer, in a process and an environment of its own; see `benchmarks/throughput.py`.

python benchmarks/peers/vllm_peer.py --model DIR --requests FILE [--no-prefix-cache]

Loads the model and warms up; then each line on standard input is a run, answered by one JSON line.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from peers.protocol import WARM_UP, Counts, Run, answer_runs, peer_parser, run_waves
from workloads import BenchRequest, full_lengths, load_requests

# Before vLLM is imported: one process, no look at the hub, and log lines that do not bury the answer.
for name, value in {
    "VLLM_CPU_KVCACHE_SPACE": "4",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}.items():
    os.environ.setdefault(name, value)


def main() -> None:
    parser = peer_parser(__doc__)
    parser.add_argument("--no-prefix-cache", action="store_true")
    answer_runs(parser, make)


@contextlib.contextmanager
def make(args: argparse.Namespace) -> Iterator[Run]:
    """Loads the model."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        args.model,
        dtype=args.dtype,
        max_model_len=max(full_lengths([*load_requests(args.requests), WARM_UP])) + 1,
        max_num_seqs=args.max_num_seqs,
        enable_prefix_caching=not args.no_prefix_cache,
    )

    def generate(batch: list[BenchRequest]) -> list[list[int]]:
        params = [
            SamplingParams(temperature=0, ignore_eos=not args.stop_at_eos, max_tokens=request.output_len)
            for request in batch
        ]
        prompts = [{"prompt_token_ids": request.prompt_token_ids} for request in batch]
        return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]

    def run(requests: list[BenchRequest]) -> Counts:
        llm.reset_prefix_cache()
        return run_waves(requests, None, generate)

    yield run


if __name__ == "__main__":
    main()
