"""Beam search against a search that computes every hypothesis from scratch."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import tiny_config, tiny_params

from jpaged import LLM, SamplingParams


@pytest.fixture(scope="module")
def llm():
    config = tiny_config(eos_token_ids=(2, 7, 40, 41, 42, 43))
    params = tiny_params(config, seed=3)
    return LLM(config=config, params=params, max_model_len=160, max_num_seqs=8, max_num_batched_tokens=64)


def naive(llm: LLM, prompt: list[int], width: int, max_tokens: int, penalty: float) -> list[tuple]:
    """(ids, score) of the best hypotheses; each step runs every live one anew."""
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=2 * width, ignore_eos=True)
    live, finished = [([], 0.0)], []
    for _ in range(max_tokens):
        outputs = llm.generate([prompt + ids for ids, _ in live], params, use_tqdm=False)
        grown = [
            (ids + [token], total + entry.logprob)
            for (ids, total), output in zip(live, outputs, strict=True)
            for token, entry in output.outputs[0].logprobs[0].items()
        ]
        grown.sort(key=lambda beam: -beam[1])
        grown = grown[: 2 * width]
        finished += [beam for beam in grown if beam[0][-1] in llm.config.eos_token_ids]
        live = [beam for beam in grown if beam[0][-1] not in llm.config.eos_token_ids][:width]
    finished += live
    scored = [(ids, total / len(ids) ** penalty) for ids, total in finished]
    return sorted(scored, key=lambda beam: -beam[1])[:width]


SEARCHES = [(1, 6, 1.0), (3, 12, 1.0), (4, 20, 0.5), (8, 9, 2.0)]


@pytest.mark.parametrize(("width", "max_tokens", "penalty"), SEARCHES)
def test_beams_are_those_of_a_search_from_scratch(llm, width, max_tokens, penalty):
    prompts = [np.random.default_rng(seed).integers(3, 301, 5 + 14 * seed).tolist() for seed in range(3)]
    outputs = llm.beam_search(prompts, beam_width=width, max_tokens=max_tokens, length_penalty=penalty)
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = naive(llm, prompt, width, max_tokens, penalty)
        assert [beam.token_ids for beam in output.beams] == [ids for ids, _ in expected]
        scores = [score for _, score in expected]
        np.testing.assert_allclose([beam.score for beam in output.beams], scores, atol=1e-4)
    assert llm.engine.stats()["kv_blocks_active"] == 0 and not llm.engine.has_unfinished()


def test_the_ends_of_hypotheses_are_told_apart(llm):
    beams = llm.beam_search([[5, 6, 8]], beam_width=8, max_tokens=12)[0].beams
    for beam in beams:
        ended = beam.token_ids[-1] in llm.config.eos_token_ids
        assert beam.finish_reason == ("stop" if ended else "length")
        assert ended or len(beam.token_ids) == 12
    assert {beam.finish_reason for beam in beams} == {"stop", "length"}


def test_a_small_pool_preempts_beams_and_changes_nothing():
    config = tiny_config()
    params = tiny_params(config, seed=3)
    sizes = dict(max_model_len=160, max_num_seqs=8, max_num_batched_tokens=64)
    prompts = [np.random.default_rng(seed).integers(3, 301, 30).tolist() for seed in range(3)]
    search = dict(beam_width=4, max_tokens=24)
    large = LLM(config=config, params=params, **sizes).beam_search(prompts, **search)
    small_llm = LLM(config=config, params=params, num_kv_blocks=14, **sizes)
    small = small_llm.beam_search(prompts, **search)
    assert [[b.token_ids for b in o.beams] for o in small] == [[b.token_ids for b in o.beams] for o in large]
    assert small_llm.engine.stats()["num_preemptions"] > 0


def test_one_bad_prompt_leaves_the_others_alone(llm):
    outputs = llm.beam_search([[5, 6], [999], [7, 8]], beam_width=2, max_tokens=3)
    assert [len(output.beams) for output in outputs] == [2, 0, 2]
    assert "999" in outputs[1].error


@pytest.mark.parametrize("width", [0, 11, True, 1.5])
def test_a_width_out_of_range_is_refused(llm, width):
    with pytest.raises(ValueError, match="beam_width="):
        llm.beam_search([[5]], beam_width=width, max_tokens=3)
