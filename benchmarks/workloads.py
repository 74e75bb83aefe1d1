"""Requests for the benchmarks: the same for every engine, from a seed alone. Needs no package."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path

SHAREGPT_MEANS = (161.31, 337.99)  # prompt and output tokens of ShareGPT in the paper on PagedAttention
MAX_PROMPT, MAX_TOTAL = 1024, 2048  # tokens of a ShareGPT request, longer ones are left out


@dataclasses.dataclass(frozen=True)
class BenchRequest:
    """A prompt and the number of tokens that it is to produce.

    Attributes:
      after: index of the request, earlier in the list, whose prompt and answer come before this prompt: the
        turn before in a chat. It is sent when that one has been answered.
    """

    prompt_token_ids: list[int]
    output_len: int
    after: int | None = None


def save_requests(path: Path, requests: Sequence[BenchRequest]) -> None:
    """Writes requests for an engine in another process."""
    path.write_text(json.dumps([dataclasses.astuple(request) for request in requests]))


def load_requests(path: Path) -> list[BenchRequest]:
    """Reads what `save_requests` wrote."""
    return [BenchRequest(*fields) for fields in json.loads(path.read_text())]


def waves(requests: Sequence[BenchRequest]) -> list[list[int]]:
    """Indices of requests that can run at once: first turns, then those after them, and so on."""
    depth: list[int] = []
    for request in requests:
        depth.append(0 if request.after is None else depth[request.after] + 1)
    return [[i for i, d in enumerate(depth) if d == level] for level in range(max(depth, default=-1) + 1)]


def full_lengths(requests: Sequence[BenchRequest]) -> list[int]:
    """Prompt and output tokens of each request, the turns before it included."""
    lengths: list[int] = []
    for request in requests:
        before = 0 if request.after is None else lengths[request.after]
        lengths.append(before + len(request.prompt_token_ids) + request.output_len)
    return lengths


def poisson_arrivals(count: int, rate: float, *, seed: int) -> list[float]:
    """Seconds at which `count` requests arrive, `rate` of them in a second on average."""
    rng = random.Random(seed)
    moments, now = [], 0.0
    for _ in range(count):
        now += rng.expovariate(rate)
        moments.append(now)
    return moments


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
    groups: int = 8,
    per_group: int = 8,
    *,
    prefix_len: int,
    question_len: int = 32,
    output_len: int = 32,
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


def multi_turn_requests(
    chats: int = 16, turns: int = 6, *, turn_len: int = 48, answer_len: int = 32, seed: int, vocab_size: int
) -> list[BenchRequest]:
    """Chats of several turns: a turn's prompt is all that was said before, answers included, and more."""
    rng = random.Random(seed)
    return [
        BenchRequest(
            [rng.randrange(3, vocab_size) for _ in range(turn_len)],
            answer_len,
            after=None if turn == 0 else (turn - 1) * chats + chat,
        )
        for turn in range(turns)
        for chat in range(chats)
    ]


def lengths_requests(
    num_prompts: int, *, seed: int, vocab_size: int, sigma: float = 1.0
) -> list[BenchRequest]:
    """Prompts of random ids, prompt and output lengths log-normal with ShareGPT's means.

    Each list of lengths has its mean to the token, whatever the seed: what is cut off at the limits is made
    up for in the median. `sigma` is the standard deviation of a length's logarithm.
    """
    rng = random.Random(seed)
    limits = MAX_PROMPT, MAX_TOTAL - MAX_PROMPT
    prompts, outputs = (
        _log_normal([rng.gauss(0, sigma) for _ in range(num_prompts)], mean, limit)
        for mean, limit in zip(SHAREGPT_MEANS, limits, strict=True)
    )
    return [
        BenchRequest([rng.randrange(3, vocab_size) for _ in range(prompt)], output)
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def _log_normal(normals: list[float], mean: float, limit: int) -> list[int]:
    """exp(median + normal) in [1, limit], with the median's logarithm chosen such that the mean is right."""

    def lengths(log_median: float) -> list[int]:
        return [min(limit, max(1, round(math.exp(log_median + z)))) for z in normals]

    low, high = -max(normals), math.log(limit) - min(normals)
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(lengths(middle)) < mean * len(normals) else (low, middle)
    return lengths(high)


def sharegpt_requests(
    path: Path, num_prompts: int, *, encode: Callable[[str], list[int]], seed: int
) -> list[BenchRequest]:
    """The first question of conversations, and as many tokens as the first answer has.

    Args:
      path: a JSON list of `{"conversations": [{"from": ..., "value": ...}, ...]}`.
      encode: text to ids.

    Raises:
      ValueError: the file has another layout, or fewer than `num_prompts` conversations that fit.
    """
    conversations = json.loads(path.read_text(encoding="utf-8"))
    try:
        pairs = [[turn["value"] for turn in c["conversations"][:2]] for c in conversations]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is not ShareGPT's layout: no {error} where there should be") from error
    random.Random(seed).shuffle(pairs)
    requests: list[BenchRequest] = []
    for pair in pairs:
        if len(requests) == num_prompts:
            break
        if len(pair) < 2:
            continue
        prompt, output = encode(pair[0]), len(encode(pair[1]))
        if 4 <= len(prompt) <= MAX_PROMPT and 4 <= output <= MAX_TOTAL - len(prompt):
            requests.append(BenchRequest(prompt, output))
    if len(requests) < num_prompts:
        raise ValueError(f"{path} has {len(requests)} conversations that fit, {num_prompts} are asked for")
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
