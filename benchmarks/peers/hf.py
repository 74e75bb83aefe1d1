"""Hugging Face transformers as a peer, in a process of its own; see `benchmarks/throughput.py`.

python benchmarks/peers/hf.py --model DIR --requests FILE --mode batch1|static|continuous

Loads the model and warms up; then each line on standard input is a run, answered by one JSON line.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.utils import WorkloadHints

sys.path.insert(0, str(Path(__file__).parent.parent))
from peers.protocol import Run, answer_runs, peer_parser, run_waves
from workloads import BenchRequest, full_lengths, load_requests

PAD = 0  # masked, so any id will do
PAGE = 256  # tokens
CACHE_BYTES = 4 << 30
NO_TOKEN = -1  # an end of sequence that never comes


def main() -> None:
    parser = peer_parser(__doc__)
    parser.add_argument("--mode", choices=("batch1", "static", "continuous"), required=True)
    parser.add_argument("--batch", type=int, default=8, help="of static batches")
    answer_runs(parser, make)


@contextlib.contextmanager
def make(args: argparse.Namespace) -> Iterator[Run]:
    """Loads the model."""
    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).eval()
    eos = model.generation_config.eos_token_id if args.stop_at_eos else None
    stops = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if args.mode == "continuous":
        engine = Continuous(model, stops, load_requests(args.requests))
        try:
            yield lambda requests: run_waves(requests, None, engine.generate)
        finally:
            engine.stop()
    else:
        size = 1 if args.mode == "batch1" else args.batch
        yield lambda requests: run_waves(requests, size, lambda batch: static(model, stops, batch))


@torch.no_grad()
def static(model, stops: list[int], batch: list[BenchRequest]) -> list[list[int]]:
    """One batch, padded on the left, until its longest output is done; others are cut to their length."""
    width = max(len(request.prompt_token_ids) for request in batch)
    longest = max(request.output_len for request in batch)
    gaps = [width - len(request.prompt_token_ids) for request in batch]
    ids = torch.tensor([[PAD] * gap + r.prompt_token_ids for gap, r in zip(gaps, batch, strict=True)])
    mask = torch.tensor([[0] * gap + [1] * (width - gap) for gap in gaps])
    out = model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=longest,
        min_new_tokens=None if stops else longest,
        do_sample=False,
        pad_token_id=PAD,
    )
    rows = [row[width:][: request.output_len] for row, request in zip(out.tolist(), batch, strict=True)]
    return [_until(stops, row) for row in rows]


def _until(stops: list[int], ids: list[int]) -> list[int]:
    """The ids up to the first that stops, included."""
    ends = [i for i, token in enumerate(ids) if token in stops]
    return ids[: ends[0] + 1] if ends else ids


class Continuous:
    """transformers' own continuous batching, its memory and thread made once for all runs."""

    def __init__(self, model, stops: list[int], requests: list[BenchRequest]):
        config = GenerationConfig(
            do_sample=False,
            max_new_tokens=max(request.output_len for request in requests),
            eos_token_id=stops or NO_TOKEN,
        )
        hints = WorkloadHints(
            max_prompt_length=max(full_lengths(requests)),
            max_generated_length=config.max_new_tokens,
            num_requests=len(requests),
        )
        # By default the cache takes nine tenths of the free memory, the CPU's included.
        shape = model.config
        token_bytes = 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim
        page_bytes = PAGE * token_bytes * model.dtype.itemsize
        pages = sum(-(-length // PAGE) for length in full_lengths(requests))
        cache = ContinuousBatchingConfig(page_size=PAGE, num_blocks=min(pages, CACHE_BYTES // page_bytes))
        self._manager = model.init_continuous_batching(
            generation_config=config, workload_hints=hints, continuous_batching_config=cache
        )
        self._manager.start()

    def generate(self, batch: list[BenchRequest]) -> list[list[int]]:
        """All requests at once."""
        names = [
            self._manager.add_request(request.prompt_token_ids, max_new_tokens=request.output_len)
            for request in batch
        ]
        done: dict = {}
        while len(done) < len(batch):
            result = self._manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                if result.error is not None:
                    raise RuntimeError(result.error)
                done[result.request_id] = result
            elif result is None and not self._manager.is_running():
                raise RuntimeError("transformers' batching thread ended before its requests did")
        return [done[name].generated_tokens for name in names]

    def stop(self) -> None:
        """Ends its thread."""
        self._manager.stop(block=True, timeout=5)


if __name__ == "__main__":
    main()
