"""Requests for the benchmarks: the same for every engine, from a seed alone."""

from __future__ import annotations

import dataclasses
import random


@dataclasses.dataclass(frozen=True)
class BenchRequest:
    """A prompt and the number of tokens that it is to produce, end of sequence or not."""

    prompt_token_ids: list[int]
    output_len: int


def parse_range(text: str) -> tuple[int, int]:
    """`LOW:HIGH`, both included, or one number for a fixed length."""
    low, _, high = text.partition(":")
    bounds = int(low), int(high or low)
    if not 1 <= bounds[0] <= bounds[1]:
        raise ValueError(f"range {text!r} must be LOW:HIGH with 1 <= LOW <= HIGH")
    return bounds


def random_requests(
    num_prompts: int, input_len: tuple[int, int], output_len: tuple[int, int], *, seed: int, vocab_size: int
) -> list[BenchRequest]:
    """Prompts of random ids, lengths drawn uniformly."""
    rng = random.Random(seed)
    requests = []
    for _ in range(num_prompts):
        prompt = [rng.randrange(3, vocab_size) for _ in range(rng.randint(*input_len))]
        requests.append(BenchRequest(prompt, rng.randint(*output_len)))
    return requests
