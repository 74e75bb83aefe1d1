"""GGUF files: values equal to the same weights in safetensors, metadata, faults by name."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from jpaged.config import ModelConfig, RopeConfig
from jpaged.ops.layers import rope_frequencies
from jpaged.weights import open_checkpoint

gguf = pytest.importorskip("gguf")


def load(path, dtype="float32"):
    return open_checkpoint(path).load_params(dtype)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("mistral", {}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {}),
    ],
)
def test_every_family_equals_its_safetensors_form(lab, tmp_path, family, changes):
    model = lab.tiny(family, **changes)
    from_gguf = load(lab.write_gguf(tmp_path / "model.gguf", model))
    from_hf = load(lab.write_hf(tmp_path / "hf", model))
    lab.assert_same(from_gguf, lab.leaves(from_hf))
    lab.assert_same(from_gguf, lab.expected(model))


def test_only_the_llama_architecture_has_interleaved_rows(lab, tmp_path):
    """The check above would miss it if the test's writer and the loader shared one mistake."""
    rows = np.arange(16, dtype=np.float32)[:, None]
    assert lab.interleave(rows, 8)[:, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]
    head = np.repeat(np.arange(16, dtype=np.float32)[:, None], 32, axis=1)
    name = "model.layers.0.self_attn.k_proj.weight"
    for family, order in (
        ("llama", list(range(0, 16, 2)) + list(range(1, 16, 2))),
        ("qwen2", list(range(16))),
    ):
        model = lab.tiny(family, num_key_value_heads=1, num_attention_heads=1)

        def plant(writer, family=family):
            for tensors in writer.tensors:
                for key in tensors:
                    if key == "blk.0.attn_k.weight":
                        tensors[key].tensor = head

        key = load(
            lab.write_gguf(tmp_path / f"{family}.gguf", model.replace(tensors={name: head}), extra=plant)
        )
        assert np.asarray(key.layers[0].wqkv)[0, 16:32].tolist() == order


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantized_types_are_dequantized_exactly(lab, tmp_path, kind):
    model = lab.tiny()
    number = gguf.GGMLQuantizationType[kind]
    rounded = {
        name: gguf.quants.dequantize(gguf.quants.quantize(value, number), number).astype(np.float32)
        for name, value in model.tensors.items()
        if value.ndim == 2
    }
    assert any((rounded[name] != model.tensors[name]).any() for name in rounded)
    path = lab.write_gguf(tmp_path / "model.gguf", model, quantization=kind)
    lab.assert_same(load(path), lab.expected(model.replace(tensors=rounded)))


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_k_quants_are_dequantized_row_by_row(lab, tmp_path, monkeypatch, kind):
    """The package cannot write them, so any bytes with finite scales do; rows of 256."""
    monkeypatch.setattr("jpaged.weights.assemble.CHUNK_ELEMENTS", 700)
    number = gguf.GGMLQuantizationType[kind]
    model = lab.tiny(hidden_size=256)
    _, size = gguf.GGML_QUANT_SIZES[number]
    raw = np.random.default_rng(1).integers(0, 60, (96, size), dtype=np.uint8)
    embed = gguf.quants.dequantize(raw, number).astype(np.float32)
    assert np.isfinite(embed).all() and len(np.unique(embed)) > 100

    def plant(writer):
        info = writer.tensors[0].pop("token_embd.weight")
        assert info is not None
        writer.add_tensor("token_embd.weight", raw, raw_dtype=number)

    path = lab.write_gguf(tmp_path / "model.gguf", model, extra=plant)
    lab.assert_same(load(path), lab.expected(model.replace(tensors={"model.embed_tokens.weight": embed})))


@pytest.mark.parametrize("kind", ["TQ1_0", "MXFP4"])
def test_other_types_are_refused_by_name(lab, tmp_path, kind):
    number = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[number]
    model = lab.tiny(hidden_size=256)

    def plant(writer):
        writer.tensors[0].pop("token_embd.weight")
        raw = np.zeros((96, 256 // block * size), np.uint8)
        writer.add_tensor("token_embd.weight", raw, raw_dtype=number)

    path = lab.write_gguf(tmp_path / "model.gguf", model, extra=plant)
    with pytest.raises(ValueError, match=f"token_embd.weight has type {kind}; supported: F32, F16"):
        load(path)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_the_config_is_that_of_the_safetensors_form(lab, tmp_path, family):
    model = lab.tiny(family, eos_token_id=None, bos_token_id=None, rope_theta=5e5)
    config = open_checkpoint(lab.write_gguf(tmp_path / "model.gguf", model)).config
    wanted = ModelConfig.from_hf(model.config)
    eps = float(np.float32(wanted.rms_norm_eps))
    assert config == wanted.replace(dtype="bfloat16", rms_norm_eps=eps)


def test_head_dim_without_key_length_is_the_quotient(lab, tmp_path):
    absent = {"attention.key_length": None, "attention.value_length": None}
    path = lab.write_gguf(tmp_path / "model.gguf", lab.tiny(head_dim=8), metadata=absent)
    assert open_checkpoint(path).config.head_dim == 8


def test_kv_heads_may_be_listed_for_each_layer_if_all_are_the_same(lab, tmp_path):
    listed = {"attention.head_count_kv": [2, 2]}
    path = lab.write_gguf(tmp_path / "same.gguf", lab.tiny(), metadata=listed)
    assert open_checkpoint(path).config.num_kv_heads == 2
    path = lab.write_gguf(tmp_path / "mixed.gguf", lab.tiny(), metadata={"attention.head_count_kv": [2, 4]})
    with pytest.raises(ValueError, match=r"llama.attention.head_count_kv=\[2, 4\] is not supported"):
        open_checkpoint(path)


def test_eos_ids_include_the_end_of_a_turn_and_of_a_message(lab, tmp_path):
    def ids(writer):
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_eot_token_id(7)
        writer.add_uint32("tokenizer.ggml.eom_token_id", 2)

    config = open_checkpoint(lab.write_gguf(tmp_path / "model.gguf", lab.tiny(), extra=ids)).config
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2, 7))


def test_linear_and_yarn_rope_are_read_from_metadata(lab, tmp_path):
    def rope(name, **metadata):
        keys = {f"rope.scaling.{key}": value for key, value in metadata.items()}
        path = lab.write_gguf(tmp_path / f"{name}.gguf", lab.tiny("qwen2"), metadata=keys)
        return open_checkpoint(path).config.rope

    assert rope("linear", type="linear", factor=4.0) == RopeConfig(
        kind="linear", factor=4.0, original_max_position=64
    )
    yarn = RopeConfig(kind="yarn", factor=4.0, original_max_position=16)
    assert rope("yarn", type="yarn", factor=4.0, original_context_length=16) == yarn
    tuned = rope(
        "tuned", type="yarn", factor=4.0, original_context_length=16, attn_factor=2.0, yarn_beta_fast=8.0
    )
    assert tuned.beta_fast == 8.0
    assert tuned.attention_factor == pytest.approx(2 * (0.1 * np.log(4.0) + 1))


def add_divisors(divisors):
    return lambda writer: writer.add_tensor("rope_freqs.weight", np.asarray(divisors, np.float32))


def llama3_divisors(factor, original, theta, head_dim):
    """As llama.cpp's converter computes them from a Llama 3.1 config."""
    found = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * theta ** (i / head_dim)
        if wavelength < original / 4.0:
            found.append(1.0)
        elif wavelength > original / 1.0:
            found.append(factor)
        else:
            smooth = (original / wavelength - 1.0) / (4.0 - 1.0)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return found


@pytest.mark.parametrize(("factor", "original"), [(8.0, 8192), (32.0, 8192), (4.0, 1024)])
def test_stored_rope_divisors_become_the_llama3_rope_they_came_from(lab, tmp_path, factor, original):
    model = lab.tiny(head_dim=64, rope_theta=5e5, max_position_embeddings=131072)
    divisors = llama3_divisors(factor, original, 5e5, 64)
    path = lab.write_gguf(tmp_path / "model.gguf", model, extra=add_divisors(divisors))
    checkpoint = open_checkpoint(path)
    rope = checkpoint.config.rope
    assert (rope.kind, rope.theta, rope.factor, rope.original_max_position) == (
        "llama3",
        5e5,
        factor,
        original,
    )
    plain, _ = rope_frequencies(RopeConfig(theta=5e5), 64)
    np.testing.assert_allclose(rope_frequencies(rope, 64)[0], plain / divisors, rtol=1e-5)
    lab.assert_same(checkpoint.load_params("float32"), lab.expected(model))


def test_rope_divisors_of_one_change_nothing_and_unknown_ones_are_refused(lab, tmp_path):
    model = lab.tiny()
    path = lab.write_gguf(tmp_path / "ones.gguf", model, extra=add_divisors(np.ones(8)))
    assert open_checkpoint(path).config.rope.kind == "default"
    for name, divisors in (("other", np.linspace(1, 8, 8)), ("short", np.ones(4))):
        path = lab.write_gguf(tmp_path / f"{name}.gguf", model, extra=add_divisors(divisors))
        with pytest.raises(ValueError, match="rope_freqs.weight is not a llama3 rope scaling"):
            open_checkpoint(path)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"rope.dimension_count": 8}, "llama.rope.dimension_count=8"),
        ({"attention.value_length": 8}, "llama.attention.value_length=8"),
        ({"expert_count": 8}, "llama.expert_count=8"),
        ({"attention.sliding_window": 32}, "llama.attention.sliding_window=32"),
        ({"rope.scaling.type": "longrope"}, "llama.rope.scaling.type='longrope'"),
        ({"rope.scaling.type": "linear"}, "'linear' needs a factor above 0"),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0, "rope.scaling.yarn_ext_factor": 0.5},
         "yarn_ext_factor=0.5"),
        ({"rope.scaling.factor": 2.0}, "llama.rope.scaling.factor=2.0"),
        ({"attention.clamp_kqv": 8.0}, "llama.attention.clamp_kqv is not supported"),
        ({"context_length": None}, "no llama.context_length"),
        ({"attention.head_count": 0}, "model.gguf: llama.attention.head_count=0 must be at least 1"),
        ({"attention.head_count_kv": ["2", "2"]}, r"head_count_kv\[0\]='2' must be an int"),
        ({"embedding_length": "x"}, "model.gguf: llama.embedding_length='x' must be an int"),
        ({"rope.freq_base": "x"}, "model.gguf: llama.rope.freq_base='x' must be a finite number"),
    ],
)  # fmt: skip
def test_metadata_that_is_not_supported_is_refused_by_name(lab, tmp_path, metadata, words):
    path = lab.write_gguf(tmp_path / "model.gguf", lab.tiny(), metadata=metadata)
    with pytest.raises(ValueError, match=words):
        open_checkpoint(path)


def test_other_architectures_are_refused_by_name(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "gemma2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match="'gemma2' is not supported; supported: llama, qwen2, qwen3"):
        open_checkpoint(tmp_path / "model.gguf")


def test_the_alignment_is_the_files(lab, tmp_path):
    model = lab.tiny("qwen2")
    path = lab.write_gguf(tmp_path / "model.gguf", model, extra=lambda w: w.add_custom_alignment(8192))
    lab.assert_same(load(path), lab.expected(model))


def test_missing_and_unexpected_tensors_are_listed_by_their_gguf_names(lab, tmp_path):
    model = lab.tiny().replace(tensors={"model.layers.1.mlp.up_proj.weight": None})
    with pytest.raises(ValueError, match="1 missing: blk.1.ffn_up.weight"):
        load(lab.write_gguf(tmp_path / "a.gguf", model))
    path = lab.write_gguf(
        tmp_path / "b.gguf",
        lab.tiny(),
        extra=lambda w: w.add_tensor("blk.0.attn_sinks", np.ones(4, np.float32)),
    )
    with pytest.raises(ValueError, match="1 unexpected: blk.0.attn_sinks"):
        load(path)


def test_files_that_are_cut_off_or_foreign_are_refused(lab, tmp_path):
    whole = lab.write_gguf(tmp_path / "model.gguf", lab.tiny()).read_bytes()
    broken = tmp_path / "broken.gguf"
    for content, words in (
        (whole[:-300], "cut off: tensor"),
        (whole[:200], "cut off"),
        (b"PK" + whole, "is not a GGUF file"),
        (whole[:4] + b"\0\0\0\3" + whole[8:], "version 50331648"),
    ):
        broken.write_bytes(content)
        with pytest.raises(ValueError, match=words):
            load(broken)


def entry(key, type_id, content):
    """A key of the metadata, as the file has it."""
    return struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", type_id) + content


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (entry("general.alignment", 4, struct.pack("<I", 0)), "general.alignment=0 must be at least 1"),
        (entry("general.alignment", 8, struct.pack("<Q", 1) + b"x"), "general.alignment='x' must be an int"),
        (entry("split.count", 8, struct.pack("<Q", 1) + b"2"), "split.count='2' must be an int"),
        (
            struct.pack("<Q", 2**63),
            "at the key after its start: .*9223372036854775808 bytes are needed, 0 are left",
        ),
        (entry("a", 8, struct.pack("<Q", 2**40)), "at a: .*1099511627776 bytes are needed"),
        (entry("a", 9, struct.pack("<IQ", 4, 2**62)), f"at a: .*{2**64} bytes are needed"),
        (entry("a", 9, struct.pack("<IQ", 8, 2**64 - 1)), "at a: .*8 bytes are needed"),
        (entry("a", 9, struct.pack("<IQ", 9, 1) * 5000), "at a: .*arrays are nested deeper than 8"),
        (entry("a", 99, b""), "at a: KeyError"),
        (
            entry("general.architecture", 9, struct.pack("<IQ", 4, 0)),
            r"general.architecture=\[\] is not supported",
        ),
    ],
)
def test_a_broken_head_is_refused_with_the_file_and_the_key(tmp_path, content, words):
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + content)
    with pytest.raises(ValueError, match=f"bad.gguf.*{words}"):
        open_checkpoint(tmp_path / "bad.gguf")


@pytest.mark.parametrize("axes", [0, 5, 2**32 - 1])
def test_a_tensor_has_one_to_four_axes(tmp_path, axes):
    tensor = struct.pack("<Q", 1) + b"t" + struct.pack("<I", axes) + bytes(64)
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + tensor)
    with pytest.raises(ValueError, match=f"bad.gguf is broken .*tensor t has {axes} axes"):
        open_checkpoint(tmp_path / "bad.gguf")


def test_without_the_gguf_package_the_error_says_how_to_install_it(lab, tmp_path, monkeypatch):
    import sys

    from jpaged.weights import gguf as module

    path = lab.write_gguf(tmp_path / "model.gguf", lab.tiny())
    module._package.cache_clear()
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r'pip install "jpaged\[gguf\]"'):
        open_checkpoint(path)


def test_the_head_is_what_the_gguf_package_reads(lab, tmp_path):
    from jpaged.weights.gguf import read_file

    def more(writer):
        writer.add_array("x.strings", ["a", "ü", ""])
        writer.add_array("x.ints", [1, -2, 3])
        writer.add_bool("x.flag", True)
        writer.add_float64("x.double", 0.1)
        writer.add_int64("x.long", -(2**40))

    path = lab.write_gguf(tmp_path / "model.gguf", lab.tiny(), quantization="Q8_0", extra=more)
    file, reader = read_file(path), gguf.GGUFReader(path)
    theirs = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert file.metadata == theirs
    assert {t.name: (t.shape, t.type_id, t.offset) for t in file.tensors.values()} == {
        t.name: (tuple(t.shape.tolist()[::-1]), int(t.tensor_type), t.data_offset) for t in reader.tensors
    }
