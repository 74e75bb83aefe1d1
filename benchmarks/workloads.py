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


def shared_prefix_requests(
    groups: int,
    per_group: int,
    *,
    prefix_len: int,
    question_len: int,
    output_len: int,
    seed: int,
    vocab_size: int,
) -> list[BenchRequest]:
    """Groups of prompts that share a long prefix, shuffled: the shape of SGLang's generated-shared-prefix."""
    rng = random.Random(seed)

    def ids(count: int) -> list[int]:
        return [rng.randrange(3, vocab_size) for _ in range(count)]

    requests = []
    for _ in range(groups):
        prefix = ids(prefix_len)
        requests += [BenchRequest(prefix + ids(question_len), output_len) for _ in range(per_group)]
    rng.shuffle(requests)
    return requests


class TokenTrie:
    """Every prefix that has been seen, to the token: what a perfect cache would know."""

    def __init__(self) -> None:
        self._root: dict = {}

    def add(self, token_ids: list[int]) -> int:
        """Adds a sequence; returns how many of its tokens were not there yet."""
        node, new = self._root, 0
        for token in token_ids:
            new += token not in node
            node = node.setdefault(token, {})
        return new

    def find(self, token_ids: list[int]) -> int:
        """Length of the longest prefix that is there."""
        node, found = self._root, 0
        for token in token_ids:
            if token not in node:
                break
            node, found = node[token], found + 1
        return found
