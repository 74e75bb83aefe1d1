"""The benchmarks' requests: the same for every engine, and as they are described."""

from __future__ import annotations

import json
import math
import statistics
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import workloads
from workloads import BenchRequest

VOCABULARY = 301


def test_requests_survive_the_way_to_another_process(tmp_path):
    requests = workloads.multi_turn_requests(2, 2, turn_len=3, answer_len=4, seed=1, vocab_size=VOCABULARY)
    workloads.save_requests(tmp_path / "r.json", requests)
    assert workloads.load_requests(tmp_path / "r.json") == requests


def test_random_lengths_span_both_ranges_and_follow_the_seed():
    draw = [
        workloads.random_requests(400, (3, 6), (1, 2), seed=seed, vocab_size=VOCABULARY) for seed in (0, 0, 1)
    ]
    assert draw[0] == draw[1] != draw[2]
    assert {len(r.prompt_token_ids) for r in draw[0]} == {3, 4, 5, 6}
    assert {r.output_len for r in draw[0]} == {1, 2}
    assert all(3 <= token < VOCABULARY for r in draw[0] for token in r.prompt_token_ids)


@pytest.mark.parametrize(("count", "seed"), [(1, 0), (40, 0), (1000, 3)])
def test_lengths_have_sharegpts_means_and_a_long_tail(count, seed):
    requests = workloads.lengths_requests(count, seed=seed, vocab_size=VOCABULARY)
    prompts, outputs = [len(r.prompt_token_ids) for r in requests], [r.output_len for r in requests]
    assert statistics.fmean(prompts) == pytest.approx(161.31, abs=1)
    assert statistics.fmean(outputs) == pytest.approx(337.99, abs=1)
    assert max(workloads.full_lengths(requests)) <= workloads.MAX_TOTAL
    if count == 1000:
        assert statistics.median(prompts) < 130 and max(prompts) > 800  # not uniform
        assert 0.8 < statistics.stdev(map(math.log, prompts)) < 1.2


def test_a_turn_comes_after_the_turn_before_in_the_same_chat():
    requests = workloads.multi_turn_requests(3, 4, turn_len=5, answer_len=2, seed=0, vocab_size=VOCABULARY)
    assert [r.after for r in requests] == [None] * 3 + [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert workloads.waves(requests) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert workloads.full_lengths(requests) == [7] * 3 + [14] * 3 + [21] * 3 + [28] * 3


def test_waves_of_nothing_are_none():
    assert workloads.waves([]) == []


def test_shared_prefixes_are_shared_by_a_group_alone():
    requests = workloads.shared_prefix_requests(3, 4, prefix_len=20, seed=0, vocab_size=VOCABULARY)
    groups: dict[tuple, int] = {}
    for request in requests:
        assert len(request.prompt_token_ids) == 20 + 32 and request.output_len == 32
        key = tuple(request.prompt_token_ids[:20])
        groups[key] = groups.get(key, 0) + 1
    assert list(groups.values()) == [4, 4, 4]


def test_arrivals_are_poissons():
    moments = workloads.poisson_arrivals(4000, 8.0, seed=0)
    gaps = [b - a for a, b in zip([0.0, *moments], moments, strict=False)]
    assert min(gaps) > 0
    assert statistics.fmean(gaps) == pytest.approx(1 / 8, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(1 / 8, rel=0.05)  # as large as the mean


def dump(path: Path, conversations: list) -> Path:
    path.write_text(json.dumps(conversations))
    return path


def conversation(*texts: str) -> dict:
    speakers = ("human", "gpt") * len(texts)
    return {
        "id": "x",
        "conversations": [{"from": s, "value": t} for s, t in zip(speakers, texts, strict=False)],
    }


def encode(text: str) -> list[int]:
    return [ord(char) for char in text]


def test_sharegpt_takes_the_first_question_and_the_length_of_its_answer(tmp_path):
    path = dump(
        tmp_path / "s.json",
        [
            conversation("first", "answer", "second", "more"),
            conversation("nobody answered"),
            conversation(),
            conversation("abc", "too short a question"),
            conversation("question", "abc"),
            conversation("q" * 1025, "too long a question"),
            conversation("q" * 1000, "a" * 1049),
            conversation("q" * 1000, "a" * 1048),
        ],
    )
    requests = workloads.sharegpt_requests(path, 2, encode=encode, seed=0)
    found = sorted(requests, key=lambda request: request.output_len)
    assert found == [BenchRequest(encode("first"), 6), BenchRequest(encode("q" * 1000), 1048)]
    with pytest.raises(ValueError, match="has 2 conversations that fit, 3 are asked for"):
        workloads.sharegpt_requests(path, 3, encode=encode, seed=0)


@pytest.mark.parametrize("broken", [[{"id": "x"}], [{"conversations": [{"from": "human"}]}], ["text"]])
def test_another_layout_than_sharegpts_is_refused(tmp_path, broken):
    with pytest.raises(ValueError, match="is not ShareGPT's layout"):
        workloads.sharegpt_requests(dump(tmp_path / "s.json", broken), 1, encode=encode, seed=0)


def test_ranges_are_two_bounds_or_one():
    assert workloads.parse_range("3:9") == (3, 9) and workloads.parse_range("7") == (7, 7)
    with pytest.raises(ValueError, match="'9:3'"):
        workloads.parse_range("9:3")
