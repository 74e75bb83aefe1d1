"""Hugging Face directories: values, files and index, faults by name."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
import safetensors.numpy

from jpaged.config import ModelConfig
from jpaged.weights import load_model, open_checkpoint

Q0 = "model.layers.0.self_attn.q_proj.weight"


def load(path, dtype=None):
    return open_checkpoint(path).load_params(dtype)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
        ("llama", {"num_key_value_heads": 1}),
        ("mistral", {"sliding_window": 8}),
        ("qwen2", {}),
        ("qwen3", {"tie_word_embeddings": True}),
    ],
)
def test_every_family_is_loaded_to_the_last_element(lab, tmp_path, family, changes):
    model = lab.tiny(family, **changes)
    checkpoint = open_checkpoint(lab.write_hf(tmp_path, model))
    assert checkpoint.config == ModelConfig.from_hf(model.config)
    lab.assert_same(checkpoint.load_params(), lab.expected(model))


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("wanted", ["float32", "float16", "bfloat16"])
def test_values_are_rounded_once_to_the_wanted_dtype(lab, tmp_path, stored, wanted):
    model = lab.tiny()
    path = lab.write_hf(tmp_path, model, dtype=stored)
    kept = {name: safetensors.numpy.load_file(path / "model.safetensors")[name] for name in model.tensors}
    rounded = model.replace(tensors={name: value.astype(np.float32) for name, value in kept.items()})
    lab.assert_same(load(path, wanted), lab.expected(rounded), wanted)


def test_the_default_dtype_is_the_configs(lab, tmp_path):
    model = lab.tiny(dtype="bfloat16")
    path = lab.write_hf(tmp_path, model, dtype="bfloat16")
    lab.assert_same(load(path), lab.expected(model), "bfloat16")
    loaded = load_model(path, "float16")
    assert loaded.config.dtype == "float16" and loaded.tokenizer is None
    assert loaded.params.embed.dtype == np.float16


def test_chunks_of_any_size_give_the_same(lab, tmp_path, monkeypatch):
    model = lab.tiny("qwen2")
    path = lab.write_hf(tmp_path, model)
    for size in (1, 500, 1500):
        monkeypatch.setattr("jpaged.weights.assemble.CHUNK_ELEMENTS", size)
        lab.assert_same(load(path), lab.expected(model))


def test_shards_are_read_by_the_index(lab, tmp_path):
    model = lab.tiny("qwen3")
    path = lab.write_hf(tmp_path, model, shards=3)
    assert len(list(path.glob("*.safetensors"))) == 3
    lab.assert_same(load(path), lab.expected(model))


def test_the_index_decides_which_of_two_copies_counts(lab, tmp_path):
    model = lab.tiny()
    path = lab.write_hf(tmp_path, model, shards=2)
    # The same tensor with other values in a file of the index, and in one the index does not know.
    index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    (other,) = {file for file in index.values()} - {index[Q0]}
    wrong = {Q0: np.zeros_like(model.tensors[Q0])}
    safetensors.numpy.save_file(safetensors.numpy.load_file(path / other) | wrong, path / other)
    safetensors.numpy.save_file(wrong | {"junk": np.zeros(3, np.float32)}, path / "consolidated.safetensors")
    lab.assert_same(load(path), lab.expected(model))


def test_a_tensor_that_is_not_where_the_index_says_is_named(lab, tmp_path):
    model = lab.tiny()
    path = lab.write_hf(tmp_path, model, shards=2)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    there = index["weight_map"][Q0]
    (other,) = set(index["weight_map"].values()) - {there}
    index["weight_map"][Q0] = other
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=f"{other} holds {Q0}; it does not"):
        load(path)


def test_a_file_that_the_index_names_must_be_there(lab, tmp_path):
    path = lab.write_hf(tmp_path, lab.tiny(), shards=2)
    (path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match="model-00002-of-00002.safetensors, which is not there"):
        load(path)


def test_the_index_cannot_reach_outside_the_directory(lab, tmp_path):
    path = lab.write_hf(tmp_path / "model", lab.tiny())
    (tmp_path / "x.safetensors").write_bytes((path / "model.safetensors").read_bytes())
    weight_map = {name: "../x.safetensors" for name in lab.tiny().tensors}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match="plain file name"):
        load(path)


def test_missing_tensors_are_listed(lab, tmp_path):
    model = lab.tiny().replace(tensors={Q0: None, "model.norm.weight": None})
    with pytest.raises(ValueError, match=f"2 missing: {Q0}, model.norm.weight"):
        load(lab.write_hf(tmp_path, model))


def test_an_untied_model_needs_an_output_matrix(lab, tmp_path):
    model = lab.tiny().replace(tensors={"lm_head.weight": None})
    with pytest.raises(ValueError, match="missing: lm_head.weight.*tie_word_embeddings is false"):
        load(lab.write_hf(tmp_path, model))


def test_unexpected_tensors_are_listed(lab, tmp_path):
    bias = "model.layers.1.self_attn.q_proj.bias"
    model = lab.tiny().replace(tensors={bias: np.zeros(64, np.float32)})
    with pytest.raises(ValueError, match=f"1 unexpected: {bias}"):
        load(lab.write_hf(tmp_path, model))


def test_more_layers_than_the_config_says_are_unexpected(lab, tmp_path):
    model = lab.tiny().replace(config={"num_hidden_layers": 1})
    with pytest.raises(ValueError, match=r"9 unexpected: model.layers.1.*and 1 more"):
        load(lab.write_hf(tmp_path, model))


def test_a_tensor_in_two_files_without_an_index_is_listed(lab, tmp_path):
    model = lab.tiny()
    path = lab.write_hf(tmp_path, model)
    safetensors.numpy.save_file({Q0: model.tensors[Q0]}, path / "more.safetensors")
    with pytest.raises(ValueError, match=f"1 there more than once: {Q0}"):
        load(path)


def test_several_files_without_an_index_are_all_read(lab, tmp_path):
    model = lab.tiny()
    path = lab.write_hf(tmp_path, model, shards=2)
    (path / "model.safetensors.index.json").unlink()
    lab.assert_same(load(path), lab.expected(model))


def test_a_wrong_shape_is_named_with_the_wanted_one(lab, tmp_path):
    model = lab.tiny().replace(tensors={Q0: np.zeros((64, 31), np.float32)})
    with pytest.raises(ValueError, match=rf"{Q0} in model.safetensors has shape \(64, 31\), .* \(64, 32\)"):
        load(lab.write_hf(tmp_path, model))


def test_a_transposed_matrix_is_refused(lab, tmp_path):
    name = "model.layers.0.mlp.down_proj.weight"
    model = lab.tiny()
    model = model.replace(tensors={name: np.ascontiguousarray(model.tensors[name].T)})
    with pytest.raises(ValueError, match=r"down_proj.weight.*\(64, 32\).*\(32, 64\)"):
        load(lab.write_hf(tmp_path, model))


def test_stored_rotary_frequencies_are_ignored(lab, tmp_path):
    model = lab.tiny()
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    path = lab.write_hf(tmp_path, model.replace(tensors=extra))
    lab.assert_same(load(path), lab.expected(model))


def test_a_tied_checkpoint_may_repeat_the_embedding_but_not_change_it(lab, tmp_path):
    model = lab.tiny(tie_word_embeddings=True)
    embed = model.tensors["model.embed_tokens.weight"]
    same = model.replace(tensors={"lm_head.weight": embed})
    lab.assert_same(load(lab.write_hf(tmp_path / "same", same)), lab.expected(model))
    changed = embed.copy()
    changed[-1, -1] += 1
    other = model.replace(tensors={"lm_head.weight": changed})
    with pytest.raises(ValueError, match="tie_word_embeddings is true, but lm_head.weight"):
        load(lab.write_hf(tmp_path / "other", other))


def test_a_value_beyond_float16_is_refused_by_name_not_made_infinite(lab, tmp_path):
    model = lab.tiny()
    big = model.tensors[Q0].copy()
    big[3, 3] = 70000.0
    path = lab.write_hf(tmp_path, model.replace(tensors={Q0: big}))
    with pytest.raises(ValueError, match=f"{Q0} has values beyond float16"):
        load(path, "float16")
    assert np.isfinite(np.asarray(load(path, "bfloat16").layers[0].wqkv, np.float32)).all()


def test_a_quantized_dtype_is_refused_by_name(lab, tmp_path):
    path = lab.write_hf(tmp_path, lab.tiny())
    tensors = safetensors.numpy.load_file(path / "model.safetensors")
    tensors[Q0] = tensors[Q0].astype(np.int8)
    safetensors.numpy.save_file(tensors, path / "model.safetensors")
    with pytest.raises(ValueError, match=f"{Q0} in model.safetensors has dtype I8; supported: F64, F32"):
        load(path)


def test_files_that_are_cut_off_or_foreign_are_refused(lab, tmp_path):
    path = lab.write_hf(tmp_path, lab.tiny())
    file = path / "model.safetensors"
    whole = file.read_bytes()
    for content in (whole[:-1], whole[:100], b"", b"PK\x03\x04" + bytes(200), struct.pack("<Q", 3) + b"[1]"):
        file.write_bytes(content)
        with pytest.raises(ValueError, match="model.safetensors"):
            load(path)


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("data_offsets", [-128, 0]),
        ("data_offsets", [256, 128]),
        ("data_offsets", [0.0, 128.0]),
        ("data_offsets", ["0", "128"]),
        ("shape", [-32]),
        ("shape", ["32"]),
    ],
)
def test_offsets_and_shapes_that_cannot_be_are_refused(lab, tmp_path, entry, value):
    file = lab.write_hf(tmp_path, lab.tiny()) / "model.safetensors"
    whole = file.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    header["model.norm.weight"][entry] = value
    changed = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(changed)) + changed + whole[8 + length :])
    with pytest.raises(ValueError, match="broken or cut off at tensor model.norm.weight"):
        load(tmp_path)


def test_pickled_weights_are_never_read(lab, tmp_path):
    path = lab.write_hf(tmp_path, lab.tiny())
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="no \\*.safetensors file"):
        load(path)


def test_eos_ids_are_those_of_both_configs(lab, tmp_path):
    path = lab.write_hf(tmp_path, lab.tiny(eos_token_id=5))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5, 9]}))
    assert open_checkpoint(path).config.eos_token_ids == (5, 7, 9)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 8}))
    assert open_checkpoint(path).config.eos_token_ids == (5, 8)
    (path / "generation_config.json").write_text(json.dumps({"temperature": 0.5}))
    assert open_checkpoint(path).config.eos_token_ids == (5,)


def test_a_broken_config_is_named(lab, tmp_path):
    path = lab.write_hf(tmp_path, lab.tiny())
    (path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json is broken"):
        open_checkpoint(path)
