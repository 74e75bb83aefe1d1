"""Weights that are quantized while they are loaded: values, the engine on top, and the memory it takes."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

from jpaged.config import QUANTIZATIONS
from jpaged.engine.engine import Engine
from jpaged.engine.runner import cast_params
from jpaged.llm import LLM
from jpaged.models.transformer import MATRICES, abstract_params
from jpaged.ops.quantized import QuantizedMatrix, quantize_matrix
from jpaged.sampling_params import SamplingParams
from jpaged.weights import load_model, open_checkpoint

ROOT = Path(__file__).parents[2]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [[5, 6, 7], [9] * 12, list(range(1, 30))]


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("kind", ["hf", "gguf"])
def test_matrices_are_rounded_and_all_else_is_kept(lab, tmp_path, kind, quantization):
    model = lab.tiny("qwen2")
    path = (
        lab.write_hf(tmp_path, model)
        if kind == "hf"
        else lab.write_gguf(tmp_path / "m.gguf", model, quantization="F32")
    )
    wanted = dict(lab.expected(model))
    for name in list(wanted):
        if name.split(".")[-1] in MATRICES:
            matrix = quantize_matrix(np.ascontiguousarray(wanted.pop(name)), quantization)
            wanted |= {f"{name}.{part}": leaf for part, leaf in lab.leaves(matrix).items()}
    loaded = load_model(path, "float32", quantization)
    found = lab.leaves(loaded.params)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    declared = abstract_params(loaded.config, "float32", quantization)
    shapes = [jax.tree.map(lambda x: (x.shape, x.dtype), tree) for tree in (declared, loaded.params)]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_an_engine_gives_the_ids_of_the_dequantized_weights(lab, tmp_path, quantization):
    checkpoint = open_checkpoint(lab.write_hf(tmp_path, lab.tiny()))
    quantized = checkpoint.load_params("float32", quantization)
    is_matrix = lambda x: isinstance(x, QuantizedMatrix)  # noqa: E731
    plain = jax.tree.map(lambda x: values(x) if is_matrix(x) else x, quantized, is_leaf=is_matrix)
    assert generate(checkpoint.config, quantized) == generate(checkpoint.config, plain)


def values(w: QuantizedMatrix) -> np.ndarray:
    """float32 [E, X]."""
    data, scale = np.asarray(w.data), np.asarray(w.scale)
    if w.bits == 8:
        return data * scale
    groups = data.reshape(-1, w.group // 2, data.shape[1])
    q = np.concatenate([groups & 15, groups >> 4], axis=1).astype(np.float32)
    return ((q - np.asarray(w.zero)[:, None]) * scale[:, None]).reshape(-1, data.shape[1])


def generate(config, params, **options):
    engine = Engine(config, params, max_num_seqs=4, max_num_batched_tokens=16, num_kv_blocks=32, **options)
    names = [engine.add_request(prompt, GREEDY, stream=False) for prompt in PROMPTS]
    done = {}
    while engine.has_unfinished():
        done |= {output.request_id: output.outputs[0].token_ids for output in engine.step()}
    return [done[name] for name in names]


def test_llm_takes_it_and_weights_can_be_exchanged(lab, tmp_path):
    path = lab.write_hf(tmp_path, lab.tiny())
    sizes = dict(max_num_seqs=4, max_num_batched_tokens=16, num_kv_blocks=32)
    llm = LLM(path, dtype="float32", quantization="int4", **sizes)
    checkpoint = open_checkpoint(path)
    params = checkpoint.load_params("float32", "int4")
    wanted = generate(checkpoint.config, params)
    assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY)] == wanted
    runner = llm.engine.runner
    runner.update_params(params)
    for other in (checkpoint.load_params("float32"), checkpoint.load_params("float32", "int8")):
        with pytest.raises(ValueError, match="differ from the old ones"):
            runner.update_params(other)


def test_a_cast_changes_the_operands_and_not_the_integers(lab, tmp_path):
    params = open_checkpoint(lab.write_hf(tmp_path, lab.tiny())).load_params("float32", "int4")
    cast = cast_params(params, "bfloat16")
    before, after = params.layers[0].wo, cast.layers[0].wo
    assert after.dtype == "bfloat16" and after.data is before.data and after.scale is before.scale
    assert cast.embed.dtype == "bfloat16" and cast.layers[0].attn_norm.dtype == "bfloat16"


def test_faults_are_told_by_name(lab, tmp_path):
    path = lab.write_hf(tmp_path, lab.tiny(intermediate_size=48))
    checkpoint = open_checkpoint(path)
    with pytest.raises(ValueError, match="multiple of 32, this one has 48"):
        checkpoint.load_params("float32", "int4")
    with pytest.raises(ValueError, match="quantization='int3' must be one of"):
        checkpoint.load_params("float32", "int3")
    with pytest.raises(ValueError, match="quantization='int8' needs model"):
        LLM(config=checkpoint.config, params=checkpoint.load_params(), quantization="int8")


def test_a_converted_checkpoint_is_not_quantized(lab, tmp_path):
    orbax = pytest.importorskip("jpaged.weights.orbax")
    pytest.importorskip("orbax.checkpoint")
    checkpoint = open_checkpoint(lab.write_hf(tmp_path / "hf", lab.tiny()))
    orbax.save(tmp_path / "orbax", checkpoint.config, checkpoint.load_params())
    with pytest.raises(ValueError, match="quantization='int8' is not supported for a converted checkpoint"):
        load_model(tmp_path / "orbax", quantization="int8")


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_loading_30_layers_takes_less_than_1_3_times_their_bfloat16_size(lab, tmp_path, quantization):
    shape = dict(hidden_size=256, head_dim=64, intermediate_size=1024, num_hidden_layers=30)
    model = lab.tiny(num_key_value_heads=2, dtype="bfloat16", **shape)
    path = lab.write_hf(tmp_path, model, dtype="bfloat16")
    specs = jax.tree.leaves(abstract_params(open_checkpoint(path).config, "bfloat16"))
    size = sum(2 * spec.size for spec in specs)
    _, peak = lab.measure_loading(path, "bfloat16", quantization)
    assert size > 50e6
    assert peak < 1.3 * size


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_values_that_are_not_finite_are_refused_with_the_tensors_that_hold_them(lab, tmp_path, quantization):
    model = lab.tiny()
    model.tensors["model.layers.1.mlp.up_proj.weight"][3, 3] = np.nan
    path = lab.write_hf(tmp_path, model)
    with pytest.raises(ValueError, match=r"layers.1.mlp.up_proj.weight in model.safetensors.* not finite"):
        open_checkpoint(path).load_params("float32", quantization)
