"""An engine whose weights were quantized at load: batches, chunks and determinism change no id."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import tiny_config, tiny_params

from jpaged.engine.engine import Engine
from jpaged.models.transformer import MATRICES
from jpaged.ops.quantized import quantize_matrix
from jpaged.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [np.random.default_rng(i).integers(3, 301, 5 + 9 * i).tolist() for i in range(4)]
CONFIG = tiny_config(hidden_size=64, intermediate_size=96, num_heads=4)


def quantized(quantization: str, config=CONFIG):
    params = tiny_params(config)
    layers = [
        layer.replace(**{f: quantize_matrix(np.asarray(getattr(layer, f)), quantization) for f in MATRICES})
        for layer in params.layers
    ]
    return params.replace(layers=tuple(layers))


def engine(params, config=CONFIG, **options) -> Engine:
    sizes = dict(max_model_len=96, max_num_seqs=4, max_num_batched_tokens=64, num_kv_blocks=32)
    return Engine(config, params, **(sizes | options))


def run(engine: Engine, prompts=PROMPTS) -> list[list[int]]:
    names = [engine.add_request(prompt, GREEDY, stream=False) for prompt in prompts]
    done = {}
    while engine.has_unfinished():
        done |= {output.request_id: output for output in engine.step()}
    return [done[name].outputs[0].token_ids for name in names]


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_batches_chunks_and_determinism_give_the_ids_of_one_request_alone(quantization):
    params = quantized(quantization)
    alone = engine(params, max_num_seqs=1, prefix_cache="off")
    want = [run(alone, [prompt])[0] for prompt in PROMPTS]
    assert run(engine(params)) == want
    assert run(engine(params, max_num_batched_tokens=5)) == want
    assert run(engine(params, deterministic=True)) == want


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_kernels_give_the_ids_of_xla(quantization):
    config = CONFIG.replace(head_dim=64, num_layers=1, layer_windows=())
    params = quantized(quantization, config)
    sizes = dict(max_num_seqs=2, max_num_batched_tokens=16)
    want, got = (
        run(engine(params, config, attention_backend=backend, **sizes), PROMPTS[:2])
        for backend in ("xla", "pallas_interpret")
    )
    assert got == want
