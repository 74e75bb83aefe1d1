"""Checkpoints that are quantized already: values, logits and faults of every layout that is read."""

from __future__ import annotations

import functools
import json
import logging
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from quantized_cases import dequantized

from jpaged.llm import LLM
from jpaged.models.transformer import MATRICES, forward, logits
from jpaged.ops.quantized import QuantizedMatrix
from jpaged.sampling_params import SamplingParams
from jpaged.weights import open_checkpoint

SHAPE = dict(hidden_size=64, intermediate_size=128)
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
DOWN = "model.layers.1.mlp.down_proj"
Q, K = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"


# -- writing: each value put into its place, one after another ------------------------------------


class Integers:
    """A matrix [in, out] of integers, with a scale and a zero point for each group of rows."""

    def __init__(self, rows, columns, *, bits=4, group=-1, symmetric=False, ordered=False, seed=0):
        rng = np.random.default_rng(seed)
        self.bits, self.group = bits, rows if group == -1 else group
        groups = rows // self.group
        self.values = rng.integers(0, 2**bits, (rows, columns))
        self.scale = rng.uniform(0.01, 0.03, (groups, columns)).astype(np.float16)
        middle = np.full((groups, columns), 2 ** (bits - 1))
        self.zero = middle if symmetric else middle + rng.integers(-3, 4, middle.shape)
        self.index = np.repeat(np.arange(groups), self.group)  # the group of each row
        if ordered:  # by the number of rows alone: q, k and v have the same
            np.random.default_rng(rows).shuffle(self.index)

    def floats(self) -> np.ndarray:
        """float32 [out, in]."""
        scale = self.scale.astype(np.float32)
        floats = (self.values - self.zero[self.index]).astype(np.float32) * scale[self.index]
        return np.ascontiguousarray(floats.T)


def pack(values: np.ndarray, bits: int, order=None) -> np.ndarray:
    """int32 words of the last axis; `order`: which of a word's columns comes first, second, .."""
    count = 32 // bits
    words = np.zeros((len(values), values.shape[1] // count), np.uint32)
    for row in range(words.shape[0]):
        for column in range(words.shape[1]):
            word = 0
            for place in range(count):
                source = place if order is None else order[place]
                word |= int(values[row, column * count + source]) << (bits * place)
            words[row, column] = word
    return words.view(np.int32)


def gptq(m: Integers, version: int = 1, ordered: bool = True) -> dict[str, np.ndarray]:
    zeros = pack(m.zero, m.bits)
    if version == 1:  # GPTQModel takes one from every value with one subtraction
        zeros = (zeros.view(np.uint32) - np.uint32(0x11111111 if m.bits == 4 else 0x01010101)).view(np.int32)
    tensors = {"qweight": pack(m.values.T, m.bits).T, "qzeros": zeros, "scales": m.scale}
    return tensors | ({"g_idx": m.index.astype(np.int32)} if ordered else {})


def awq(m: Integers) -> dict[str, np.ndarray]:
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    return {"qweight": pack(m.values, 4, order), "qzeros": pack(m.zero, 4, order), "scales": m.scale}


def compressed(m: Integers, symmetric: bool, index=None) -> dict[str, np.ndarray]:
    tensors = {
        "weight_packed": pack(m.values.T, m.bits),
        "weight_scale": m.scale.T,
        "weight_shape": np.array(m.values.T.shape, np.int64),
    }
    if not symmetric:
        tensors["weight_zero_point"] = pack(m.zero, m.bits).T
    return tensors | ({} if index is None else {"weight_g_idx": index.astype(np.int32)})


def write(lab, path: Path, config: dict, packer, integers: dict, *, family="llama", change=None):
    """A checkpoint with quantized matrices, and the same model in floats.

    Args:
      integers: keywords of `Integers`.
      change: called with the tensors before they are written.

    Returns:
      the directory, and the float model.
    """
    model = lab.tiny(family, **SHAPE)
    tensors, floats = dict(model.tensors), {}
    for seed, name in enumerate(sorted(model.tensors)):
        module = name.removesuffix(".weight")
        if module.endswith(MODULES) and name.endswith(".weight"):
            columns, rows = tensors.pop(name).shape
            matrix = Integers(rows, columns, seed=seed, **integers)
            tensors |= {f"{module}.{part}": value for part, value in packer(matrix).items()}
            floats[name] = matrix.floats()
    if change is not None:
        change(tensors)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(model.config | {"quantization_config": config}))
    arrays = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
    safetensors.numpy.save_file(arrays, path / "model.safetensors")
    return path, model.replace(tensors=floats)


# -- reading --------------------------------------------------------------------------------------


values = functools.partial(dequantized, dtype=np.float32)


def fields(params):
    for index, layer in enumerate(params.layers):
        for field in MATRICES:
            yield f"layers.{index}.{field}", getattr(layer, field)


IDS = jnp.asarray([5, 1, 80, 33, 2, 2, 60, 17, 9, 95], jnp.int32)


def scores(config, params):
    """Logits of `IDS` with plain causal attention."""
    T = len(IDS)

    def attend(layer, qkv):
        del layer
        q, k, v = qkv[:, :, :-2], qkv[:, :, -2], qkv[:, :, -1]
        found = jnp.einsum("tkgd,skd->kgts", q, k) * config.head_dim**-0.5
        found = jnp.where(jnp.tril(jnp.ones((1, 1, T, T), bool)), found, -jnp.inf)
        return jnp.einsum("kgts,skd->tkgd", jax.nn.softmax(found), v).reshape(T, -1, config.head_dim)

    run = jax.jit(lambda p: logits(p, forward(p, config, IDS, jnp.arange(T, dtype=jnp.int32), attend)))
    return np.asarray(run(params))


def check(lab, tmp_path, path, floats):
    """Values equal those of NumPy, logits those of the model in floats; returns the parameters."""
    checkpoint = open_checkpoint(path)
    params = checkpoint.load_params("float32")
    wanted = lab.expected(floats)
    for name, matrix in fields(params):
        assert isinstance(matrix, QuantizedMatrix), name
        np.testing.assert_allclose(values(matrix), wanted[name], rtol=1e-6, atol=1e-9, err_msg=name)
    plain = open_checkpoint(lab.write_hf(tmp_path / "floats", floats))
    assert checkpoint.config == plain.config
    got, want = scores(checkpoint.config, params), scores(plain.config, plain.load_params("float32"))
    assert np.abs(want).max() > 1
    np.testing.assert_allclose(got, want, atol=1e-3, rtol=0)
    return params


@pytest.mark.parametrize(
    ("bits", "group", "desc_act", "sym", "version"),
    [
        (4, 32, False, True, 1),
        (4, 32, True, True, 1),
        (4, 64, True, False, 2),
        (4, 32, False, False, 1),
        (4, -1, False, False, 2),
        (4, -1, True, True, 1),
        (8, 32, True, False, 1),
        (8, -1, False, True, 1),
    ],
)
def test_gptq(lab, tmp_path, bits, group, desc_act, sym, version):
    config = dict(quant_method="gptq", bits=bits, group_size=group, desc_act=desc_act, sym=sym)
    if version == 2:
        config["checkpoint_format"] = "gptq_v2"
    path, floats = write(
        lab,
        tmp_path / "gptq",
        config,
        lambda m: gptq(m, version),
        dict(bits=bits, group=group, symmetric=sym, ordered=desc_act),
    )
    matrix = check(lab, tmp_path, path, floats).layers[0].wqkv
    assert matrix.bits == bits and matrix.scale.dtype == np.float16
    assert matrix.group == (64 if group == -1 else group)
    assert (matrix.order is not None) == (desc_act and group == 32)
    assert (matrix.zero is None) == (bits == 8 and sym)


@pytest.mark.parametrize("stored", ["nothing", "zeros"])
def test_gptq_without_activation_order_may_have_no_group_index(lab, tmp_path, stored):
    def packer(m):
        tensors = gptq(m, ordered=False)
        return tensors | ({"g_idx": np.zeros(len(m.values), np.int32)} if stored == "zeros" else {})

    config = dict(quant_method="gptq", bits=4, group_size=32, desc_act=False, sym=True)
    check(lab, tmp_path, *write(lab, tmp_path / "gptq", config, packer, dict(group=32, symmetric=True)))


def test_a_gptq_zero_point_of_0_borrows_from_its_neighbour_and_gets_it_back(lab, tmp_path):
    def packer(m):
        m.zero[:, ::3] = 0
        return gptq(m)

    config = dict(quant_method="gptq", bits=4, group_size=32, desc_act=False)
    path, _ = write(lab, tmp_path / "gptq", config, packer, dict(group=32))
    zero = np.asarray(open_checkpoint(path).load_params("float32").layers[0].wo.zero)
    assert (zero[:, ::3] == 0).all() and (zero[:, 1::3] >= 5).all()


def test_the_order_of_rows_comes_from_the_group_index(lab, tmp_path):
    config = dict(quant_method="gptq", bits=4, group_size=32, desc_act=True)
    path, _ = write(lab, tmp_path, config, gptq, dict(group=32, ordered=True))
    stored = safetensors.numpy.load_file(path / "model.safetensors")
    layer = open_checkpoint(path).load_params("float32").layers[1]
    for field, module in (
        ("wo", "self_attn.o_proj"),
        ("w_gate_up", "mlp.up_proj"),
        ("w_down", "mlp.down_proj"),
    ):
        order, index = np.asarray(getattr(layer, field).order), stored[f"model.layers.1.{module}.g_idx"]
        assert order.dtype == np.int32 and sorted(order) == list(range(len(index)))
        assert index[order].tolist() == sorted(index.tolist())
        inverse = np.empty_like(order)
        inverse[order] = np.arange(len(order))
        assert (inverse // 32).tolist() == index.tolist()


@pytest.mark.parametrize("group", [32, -1])
def test_awq(lab, tmp_path, group):
    config = dict(quant_method="awq", version="gemm", bits=4, group_size=group, zero_point=True)
    path, floats = write(lab, tmp_path / "awq", config, awq, dict(group=group), family="qwen2")
    assert check(lab, tmp_path, path, floats).layers[0].w_down.order is None


@pytest.mark.parametrize(
    ("bits", "strategy", "symmetric", "order"),
    [
        (4, "group", True, None),
        (4, "group", False, None),
        (4, "channel", True, None),
        (4, "group", True, "stored"),
        (4, "group", True, "not set"),
        (8, "channel", True, None),
    ],
)
def test_compressed_tensors(lab, tmp_path, bits, strategy, symmetric, order):
    group = 32 if strategy == "group" else -1

    def packer(m):
        index = {None: None, "stored": m.index, "not set": np.full(len(m.values), -1)}[order]
        return compressed(m, symmetric, index)

    weights = dict(num_bits=bits, type="int", symmetric=symmetric, strategy=strategy)
    weights |= dict(group_size=group if strategy == "group" else None, actorder=order and "group")
    path, floats = write(
        lab,
        tmp_path / "compressed",
        compressed_config(weights),
        packer,
        dict(bits=bits, group=group, symmetric=symmetric, ordered=order == "stored"),
    )
    params = check(lab, tmp_path, path, floats)
    assert (params.layers[0].w_down.order is not None) == (order == "stored")


def compressed_config(weights, **changes):
    group = dict(targets=["Linear"], weights=weights, input_activations=None, output_activations=None)
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    } | changes


GPTQ = dict(quant_method="gptq", bits=4, group_size=32, desc_act=False, sym=True)
AWQ = dict(quant_method="awq", version="gemm", bits=4, group_size=32, zero_point=True)
INT4 = dict(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)


def test_scales_of_bfloat16_become_float32(lab, tmp_path):
    import ml_dtypes

    def packer(m):
        m.scale = m.scale.astype(ml_dtypes.bfloat16)
        return gptq(m)

    path, floats = write(lab, tmp_path / "gptq", GPTQ, packer, dict(group=32, symmetric=True))
    assert check(lab, tmp_path, path, floats).layers[0].wo.scale.dtype == np.float32


def test_a_matrix_that_was_left_in_floats_stays_so(lab, tmp_path):
    floats = lab.tiny("llama", **SHAPE).tensors[f"{DOWN}.weight"]

    def change(tensors):
        for part in ("qweight", "qzeros", "scales", "g_idx"):
            del tensors[f"{DOWN}.{part}"]
        tensors[f"{DOWN}.weight"] = floats

    path, _ = write(lab, tmp_path, GPTQ, gptq, dict(group=32, symmetric=True), change=change)
    checkpoint = open_checkpoint(path)
    params = checkpoint.load_params("bfloat16")
    assert params.layers[1].w_down.dtype == jnp.bfloat16
    assert isinstance(params.layers[0].w_down, QuantizedMatrix)
    assert params.layers[0].w_down.dtype == "bfloat16"
    assert np.isfinite(scores(checkpoint.config, params)).all()


def test_biases_of_zeros_that_the_model_does_not_have_are_left_out(lab, tmp_path):
    def change(tensors, value=0.0):
        tensors[f"{Q}.bias"] = np.full(64, value, np.float16)

    path, floats = write(lab, tmp_path / "a", GPTQ, gptq, dict(group=32, symmetric=True), change=change)
    check(lab, tmp_path, path, floats)
    other = lambda tensors: change(tensors, 1.0)  # noqa: E731
    path, _ = write(lab, tmp_path / "b", GPTQ, gptq, dict(group=32, symmetric=True), change=other)
    with pytest.raises(ValueError, match=f"1 unexpected: {Q}.bias"):
        open_checkpoint(path).load_params()


def test_an_engine_runs_on_them(lab, tmp_path):
    config = GPTQ | dict(desc_act=True)
    path, floats = write(lab, tmp_path / "gptq", config, gptq, dict(group=32, symmetric=True, ordered=True))
    prompts, greedy = [[5, 6, 7], [9] * 12], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    sizes = dict(dtype="float32", max_num_seqs=4, max_num_batched_tokens=16, num_kv_blocks=32)
    ids = [
        [output.outputs[0].token_ids for output in LLM(model, **sizes).generate(prompts, greedy)]
        for model in (path, lab.write_hf(tmp_path / "floats", floats))
    ]
    assert ids[0] == ids[1]


# -- GGUF -----------------------------------------------------------------------------------------


def gguf_floats(model, types):
    """The model with matrices as the gguf package dequantizes them; `types` by name."""
    gguf = pytest.importorskip("gguf")
    rounded = {}
    for name, kind in types.items():
        number = gguf.GGMLQuantizationType[kind]
        rounded[name] = gguf.quants.dequantize(gguf.quants.quantize(model.tensors[name], number), number)
    return model.replace(tensors=rounded)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_gguf_matrices_stay_as_they_are_stored(lab, tmp_path, family, kind):
    model = lab.tiny(family, **SHAPE)
    for name, value in model.tensors.items():
        if name.endswith("proj.weight"):
            value *= np.float32(0.1)
            value[3, :32] = 0  # blocks without a scale
            value[4, 32:] = 0.25
    path = lab.write_gguf(tmp_path / "model.gguf", model, quantization=kind)
    types = {name: kind for name, value in model.tensors.items() if value.ndim == 2}
    wanted = lab.expected(gguf_floats(model, types))
    checkpoint = open_checkpoint(path)
    params = checkpoint.load_params("float32", "gguf")
    for name, matrix in fields(params):
        assert matrix.group == 32 and matrix.bits == (8 if kind == "Q8_0" else 4)
        if kind == "Q4_1":  # a minimum became a zero point
            largest = np.abs(wanted[name]).max()
            np.testing.assert_allclose(values(matrix), wanted[name], rtol=0, atol=3e-7 * largest)
        else:
            np.testing.assert_array_equal(values(matrix), wanted[name], err_msg=name)
    np.testing.assert_array_equal(params.embed, wanted["embed"])
    got = scores(checkpoint.config, params)
    np.testing.assert_allclose(got, scores(checkpoint.config, checkpoint.load_params("float32")), atol=1e-3)


def test_a_gguf_block_without_a_scale_is_its_minimum_whatever_its_values_say(lab, tmp_path):
    gguf = pytest.importorskip("gguf")
    planted = np.random.default_rng(0).integers(0, 256, (64, 4 * 20), np.uint8).reshape(64, 4, 20)
    planted[..., 0:2] = 0  # d
    planted[..., 2:4] = np.array([-0.375], np.float16).view(np.uint8)  # m

    def plant(writer):
        for tensors in writer.tensors:
            if "blk.0.ffn_down.weight" in tensors:
                tensors["blk.0.ffn_down.weight"].tensor = planted.reshape(64, 80)

    path = lab.write_gguf(tmp_path / "model.gguf", lab.tiny(**SHAPE), quantization="Q4_1", extra=plant)
    assert (gguf.quants.dequantize(planted, gguf.GGMLQuantizationType.Q4_1) == -0.375).all()
    assert (values(open_checkpoint(path).load_params("float32", "gguf").layers[0].w_down) == -0.375).all()


def test_gguf_matrices_of_mixed_types_are_dequantized_and_logged(lab, tmp_path, caplog):
    pytest.importorskip("gguf")
    model = lab.tiny(**SHAPE)
    types = {
        "model.layers.0.self_attn.v_proj.weight": "Q8_0",
        "model.layers.1.mlp.down_proj.weight": "Q5_0",
        "lm_head.weight": "Q8_0",
    }
    path = lab.write_gguf(tmp_path / "model.gguf", model, quantization="Q4_0", types=types)
    checkpoint = open_checkpoint(path)
    with caplog.at_level(logging.INFO, "jpaged.weights.gguf"):
        params = checkpoint.load_params("bfloat16", "gguf")
    floats = [name for name, leaf in fields(params) if not isinstance(leaf, QuantizedMatrix)]
    assert floats == ["layers.0.wqkv", "layers.1.w_down"]
    assert sorted(
        record.getMessage() for record in caplog.records if "dequantized" in record.getMessage()
    ) == [
        "blk.0.attn_k.weight (Q4_0) is dequantized",
        "blk.0.attn_q.weight (Q4_0) is dequantized",
        "blk.0.attn_v.weight (Q8_0) is dequantized",
        "blk.1.ffn_down.weight (Q5_0) is dequantized",
    ]
    plain = checkpoint.load_params("bfloat16")
    np.testing.assert_array_equal(params.layers[0].wqkv, plain.layers[0].wqkv)


def test_a_gguf_file_without_such_matrices_is_refused(lab, tmp_path):
    path = lab.write_gguf(tmp_path / "model.gguf", lab.tiny(), quantization="Q5_1")
    with pytest.raises(ValueError, match="quantization='gguf': no matrix of model.gguf .* its types: Q5_1"):
        open_checkpoint(path).load_params("float32", "gguf")


def test_only_a_gguf_file_is_read_as_one(lab, tmp_path):
    path = lab.write_hf(tmp_path, lab.tiny())
    with pytest.raises(ValueError, match="quantization='gguf' must be one of .*, or 'gguf' for a GGUF file"):
        open_checkpoint(path).load_params("float32", "gguf")


# -- memory ---------------------------------------------------------------------------------------


def test_loading_takes_little_more_than_the_parameters(lab, tmp_path):
    shape = dict(hidden_size=512, head_dim=64, intermediate_size=2048, num_hidden_layers=24)
    path = write_large(tmp_path, lab.tiny("qwen2", num_key_value_heads=2, **shape))
    size, peak = lab.measure_loading(path, "bfloat16")
    assert size > 35e6
    assert peak < 1.3 * size


def write_large(path: Path, model) -> Path:
    """A GPTQ checkpoint of the model's shapes; its values are anything."""
    rng = np.random.default_rng(0)
    tensors = dict(model.tensors)
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        columns, rows = tensors.pop(name).shape
        module = name.removesuffix(".weight")
        for part, shape in (("qweight", (rows // 8, columns)), ("qzeros", (rows // 128, columns // 8))):
            tensors[f"{module}.{part}"] = rng.integers(-(2**31), 2**31, shape).astype(np.int32)
        tensors[f"{module}.scales"] = np.ones((rows // 128, columns), np.float16)
    config = model.config | {"quantization_config": GPTQ | dict(group_size=128)}
    (path / "config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(tensors, path / "model.safetensors")
    return path


# -- faults ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            dict(quant_method="bitsandbytes"),
            "quant_method='bitsandbytes' is not supported; supported: gptq, awq",
        ),
        (dict(quant_method="fp8"), "quant_method='fp8'"),
        (dict(bits=4), "quant_method=None"),
        ("int4", "quantization_config='int4' must be a mapping"),
        (GPTQ | dict(bits=3), "bits=3 is not supported; supported: 4, 8"),
        (GPTQ | dict(group_size=0), "group_size=0 must be at least 1"),
        (GPTQ | dict(group_size=33), "group_size=33 is not supported; supported: even"),
        (GPTQ | dict(group_size=None), "group_size=None must be an int"),
        (GPTQ | dict(checkpoint_format="marlin"), "checkpoint_format='marlin' .* supported: gptq, gptq_v2"),
        (GPTQ | dict(is_marlin_format=True), "is_marlin_format=True"),
        (GPTQ | dict(dynamic={"+:.*mlp.*": {"bits": 8}}), "dynamic=.* supported: one scheme"),
        (GPTQ | dict(dynamic=["-:.*mlp.*"]), "dynamic=.* supported: a mapping"),
        (GPTQ | dict(adapter={"name": "lora", "rank": 64}), "adapter=.* is not supported"),
        (GPTQ | dict(rotation="hadamard"), "rotation='hadamard' is not supported"),
        (GPTQ | dict(desc_act="false"), "desc_act='false' is not supported; supported: true and false"),
        (AWQ | dict(version="gemv"), "version='gemv' is not supported; supported: gemm"),
        (AWQ | dict(bits=8), "bits=8 is not supported; supported: 4"),
        (AWQ | dict(zero_point=False), "zero_point=False"),
        (AWQ | dict(backend="llm-awq"), "backend='llm-awq'"),
        (compressed_config(INT4, format="nvfp4-pack-quantized"), "format='nvfp4-pack-quantized'"),
        (compressed_config(INT4, format="float-quantized"), "format='float-quantized'"),
        (compressed_config(INT4, quantization_status="calibration"), "quantization_status='calibration'"),
        (compressed_config(INT4, kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme="),
        (compressed_config(INT4, config_groups={}), "config_groups="),
        (compressed_config(INT4, sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config.format="),
        (compressed_config(INT4, transform_config={"config_groups": {"R1": 0}}), "transform_config="),
        (compressed_config(INT4, config_groups=[{"weights": INT4}]), "config_groups=.* a mapping"),
        (compressed_config(INT4, config_groups={"group_0": "W4A16"}), "config_groups.group_0='W4A16'"),
        (compressed_config([4]), r"config_groups.group_0.weights=\[4\] is not supported"),
        (compressed_config(INT4, sparsity_config="dense"), "sparsity_config='dense' is not supported"),
        (compressed_config(INT4 | dict(symmetric="false")), "weights.symmetric='false' is not supported"),
        (compressed_config(INT4 | dict(num_bits=3)), "config_groups.group_0.weights.num_bits=3"),
        (compressed_config(INT4 | dict(type="float")), "weights.type='float'"),
        (compressed_config(INT4 | dict(strategy="block")), "weights.strategy='block'"),
        (compressed_config(INT4 | dict(strategy="channel")), "weights.group_size=32 is not supported"),
        (compressed_config(INT4 | dict(group_size=None)), "group_size=None must be an int"),
    ],
)
def test_configurations_that_are_not_read_are_refused_by_name(lab, tmp_path, config, words):
    path = lab.write_hf(tmp_path, lab.tiny(quantization_config=config))
    with pytest.raises(ValueError, match=words):
        open_checkpoint(path)


def test_quantized_activations_are_refused(lab, tmp_path):
    config = compressed_config(INT4)
    config["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "dynamic": True}
    with pytest.raises(ValueError, match="config_groups.group_0.input_activations="):
        open_checkpoint(lab.write_hf(tmp_path, lab.tiny(quantization_config=config)))


def cut(name):
    return lambda tensors: tensors.update({name: tensors[name][..., :-1]})


def recast(name, dtype):
    return lambda tensors: tensors.update({name: tensors[name].astype(dtype)})


@pytest.mark.parametrize(
    ("config", "packer", "change", "words"),
    [
        (GPTQ, gptq, cut(f"{Q}.qweight"), f"tensor {Q}.qweight in model.safetensors has shape (8, 63)"),
        (GPTQ, gptq, cut(f"{Q}.scales"), f"tensor {Q}.scales in model.safetensors has shape (2, 63)"),
        (GPTQ, gptq, cut(f"{Q}.g_idx"), f"tensor {Q}.g_idx in model.safetensors has shape (63,)"),
        (GPTQ, gptq, lambda t: t.pop(f"{Q}.qzeros"), f"tensor {Q}.qzeros is missing"),
        (GPTQ | dict(desc_act=True), gptq, lambda t: t.pop(f"{Q}.g_idx"), f"tensor {Q}.g_idx is missing"),
        (
            GPTQ | dict(desc_act=True),
            gptq,
            lambda t: t.update({f"{DOWN}.g_idx": np.full(128, -1, np.int32)}),
            f"tensor {DOWN}.g_idx in model.safetensors does not put 32 rows into each of 4 groups",
        ),
        (
            GPTQ,
            gptq,
            lambda t: t.update({"model.norm.qweight": np.zeros((8, 8), np.int32)}),
            "1 unexpected: model.norm.qweight",
        ),
        (
            GPTQ,
            gptq,
            lambda t: t.update({f"{Q}.bias": np.zeros((8, 8), np.float16)}),
            f"1 unexpected: {Q}.bias",
        ),
        (GPTQ | dict(group_size=64), gptq, None, "group_size=64 needs (2, "),
        (GPTQ | dict(group_size=48), gptq, None, "has 128 input rows, not a multiple of group_size=48"),
        (GPTQ | dict(bits=8), gptq, None, "with bits=8 and group_size=32 needs (32, "),
        (
            GPTQ,
            gptq,
            recast(f"{Q}.scales", np.int32),
            f"tensor {Q}.scales in model.safetensors has dtype int32",
        ),
        (
            GPTQ,
            gptq,
            recast(f"{Q}.qweight", np.int64),
            f"{Q}.qweight in model.safetensors has dtype int64, must",
        ),
        (
            GPTQ,
            gptq,
            recast("lm_head.weight", np.int32),
            "lm_head.weight in model.safetensors has dtype int32",
        ),
        (AWQ, awq, cut(f"{Q}.qzeros"), f"tensor {Q}.qzeros in model.safetensors has shape (2, 7)"),
        (
            GPTQ | dict(desc_act=True),
            gptq,
            lambda t: t[f"{Q}.g_idx"].fill(1),
            "does not put 32 rows into each",
        ),
        (
            GPTQ | dict(desc_act=True),
            gptq,
            lambda t: t[f"{K}.g_idx"].sort(),
            f"{K}.weight and {Q}.weight are parts of one matrix here, but sort their rows",
        ),
        (GPTQ, gptq, recast(f"{K}.scales", np.float32), "have scales in float32 and float16"),
        (
            GPTQ,
            gptq,
            lambda t: (
                [t.pop(f"{K}.{part}") for part in ("qweight", "qzeros", "scales", "g_idx")]
                and t.update({f"{K}.weight": np.zeros((32, 64), np.float16)})
            ),
            f"is quantized, but {K}.weight is not",
        ),
        (
            GPTQ,
            gptq,
            lambda t: [t.pop("lm_head.weight")] and t.update(head(gptq)),
            "tensor lm_head.weight in model.safetensors is quantized; only",
        ),
        (
            compressed_config(INT4),
            lambda m: compressed(m, True),
            lambda t: t.update({f"{Q}.weight_shape": np.array([64, 65])}),
            f"tensor {Q}.weight_shape in model.safetensors is [64 65], the model needs (64, 64)",
        ),
        (
            compressed_config(INT4 | dict(symmetric=False)),
            lambda m: compressed(m, False),
            cut(f"{Q}.weight_zero_point"),
            f"tensor {Q}.weight_zero_point in model.safetensors has shape (8, 1)",
        ),
        (
            compressed_config(INT4),
            lambda m: compressed(m, False),
            None,
            "14 unexpected",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(lab, tmp_path, config, packer, change, words):
    integers = dict(group=32, symmetric=True, ordered=bool(config.get("desc_act")))
    path, _ = write(lab, tmp_path, config, packer, integers, change=change)
    with pytest.raises(ValueError, match=re.escape(words)):
        open_checkpoint(path).load_params()


def test_a_part_of_a_matrix_in_two_files_is_refused_with_both(lab, tmp_path):
    path, _ = write(lab, tmp_path, GPTQ, gptq, dict(group=32, symmetric=True))
    part = {f"{DOWN}.scales": safetensors.numpy.load_file(path / "model.safetensors")[f"{DOWN}.scales"]}
    safetensors.numpy.save_file(part, path / "old.safetensors")
    words = f"{DOWN}.scales is there more than once: in model.safetensors and old.safetensors"
    with pytest.raises(ValueError, match=words):
        open_checkpoint(path).load_params()


def head(packer):
    return {f"lm_head.{part}": value for part, value in packer(Integers(64, 96, group=32)).items()}


@pytest.mark.parametrize("quantization", ["int8", "int4", "gguf"])
def test_quantized_checkpoints_are_not_quantized_again(lab, tmp_path, quantization):
    path, _ = write(lab, tmp_path, AWQ, awq, dict(group=32))
    with pytest.raises(ValueError, match=f"quantization='{quantization}' is not supported .*'awq'"):
        open_checkpoint(path).load_params("float32", quantization)


def test_they_are_not_saved(lab, tmp_path):
    orbax = pytest.importorskip("jpaged.weights.orbax")
    checkpoint = open_checkpoint(write(lab, tmp_path / "awq", AWQ, awq, dict(group=32))[0])
    with pytest.raises(ValueError, match="params are quantized, which is not saved"):
        orbax.save(tmp_path / "orbax", checkpoint.config, checkpoint.load_params())
