"""Tiny random models of every family, written as checkpoints in each format without torch."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@dataclasses.dataclass(frozen=True)
class Tiny:
    """A model as Hugging Face has it: `config` is its config.json, `tensors` float32 by name."""

    family: str
    config: dict[str, Any]
    tensors: dict[str, np.ndarray]

    def replace(self, config: Mapping[str, Any] = {}, tensors: Mapping[str, Any] = {}) -> Tiny:  # noqa: B006
        """A changed copy; a tensor that is set to `None` is left out."""
        merged = {name: value for name, value in (self.tensors | dict(tensors)).items() if value is not None}
        return Tiny(self.family, self.config | dict(config), merged)


def tiny(family: str = "llama", *, seed: int = 0, **changes: Any) -> Tiny:
    """Random weights with 2 layers, 4 query heads, 2 KV heads; head_dim is not the quotient."""
    config = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "sliding_window": None,
        "dtype": "float32",
    } | changes
    E, F, D = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    H, K, V = config["num_attention_heads"], config["num_key_value_heads"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, E), "model.norm.weight": (E,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (V, E)
    outputs = {
        "self_attn.q_proj": (H * D, E, family == "qwen2" or bool(config.get("attention_bias"))),
        "self_attn.k_proj": (K * D, E, family == "qwen2" or bool(config.get("attention_bias"))),
        "self_attn.v_proj": (K * D, E, family == "qwen2" or bool(config.get("attention_bias"))),
        "self_attn.o_proj": (E, H * D, bool(config.get("attention_bias"))),
        "mlp.gate_proj": (F, E, bool(config.get("mlp_bias"))),
        "mlp.up_proj": (F, E, bool(config.get("mlp_bias"))),
        "mlp.down_proj": (E, F, bool(config.get("mlp_bias"))),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (E,)
        shapes[prefix + "post_attention_layernorm.weight"] = (E,)
        if family == "qwen3":
            shapes[prefix + "self_attn.q_norm.weight"] = (D,)
            shapes[prefix + "self_attn.k_norm.weight"] = (D,)
        for name, (rows, columns, bias) in outputs.items():
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
    rng = np.random.default_rng(seed)
    tensors = {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
    return Tiny(family, config, tensors)


def write_hf(path: Path, model: Tiny, *, dtype: str = "float32", shards: int = 1) -> Path:
    """Writes a Hugging Face directory, with an index where there is more than one file."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(model.config))
    tensors = {name: value.astype(DTYPES[dtype]) for name, value in model.tensors.items()}
    if shards == 1:
        safetensors.numpy.save_file(tensors, path / "model.safetensors")
        return path
    weight_map = {
        name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(tensors)
    }
    for file in set(weight_map.values()):
        part = {name: value for name, value in tensors.items() if weight_map[name] == file}
        safetensors.numpy.save_file(part, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{GGUF_NAMES[part]}.{kind}"
    return f"{GGUF_NAMES[stem]}.{kind}"


def interleave(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """The row order that llama.cpp's converter gives q and k, written out row by row."""
    half = head_dim // 2
    order = [
        start + pair + part * half
        for start in range(0, len(rows), head_dim)
        for pair in range(half)
        for part in range(2)
    ]
    return rows[order]


def write_gguf(
    path: Path,
    model: Tiny,
    *,
    quantization: str = "F32",
    types: Mapping[str, str] = {},  # noqa: B006
    metadata: Mapping[str, Any] = {},  # noqa: B006
    extra: Callable[[Any], None] | None = None,
) -> Path:
    """Writes a GGUF file: matrices in `quantization`, vectors in F32, as llama.cpp's tools do.

    Args:
      types: of some matrices, by Hugging Face name, instead of `quantization`.
      metadata: integers, floats or strings under the architecture's prefix, added or replaced.
      extra: called with the writer before it writes, to add anything else.
    """
    gguf = pytest.importorskip("gguf")
    arch = "llama" if model.family == "mistral" else model.family
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    values = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "rope.freq_base": float(config["rope_theta"]),
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
    } | dict(metadata)
    for key, value in values.items():
        add = {
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            list: writer.add_array,
        }
        if value is not None:
            add[type(value)](f"{arch}.{key}", value)
    for name, tensor in model.tensors.items():
        kind = gguf.GGMLQuantizationType[types.get(name, quantization)]
        if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
            tensor = interleave(tensor, config["head_dim"])
        if tensor.ndim == 1 or kind.name == "F32":
            writer.add_tensor(gguf_name(name), tensor)
        else:
            packed = gguf.quants.quantize(tensor, kind)
            writer.add_tensor(gguf_name(name), packed, raw_dtype=kind)
    if extra is not None:
        extra(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def expected(model: Tiny) -> dict[str, np.ndarray]:
    """The leaves by path, put together head by head: plain to read, not fast."""
    t, c = model.tensors, model.config
    D, K, G = c["head_dim"], c["num_key_value_heads"], c["num_attention_heads"] // c["num_key_value_heads"]
    leaves = {"embed": t["model.embed_tokens.weight"], "final_norm": t["model.norm.weight"]}
    if not c["tie_word_embeddings"]:
        leaves["lm_head"] = t["lm_head.weight"]
    fields = {
        "attn_norm": "input_layernorm.weight",
        "mlp_norm": "post_attention_layernorm.weight",
        "q_norm": "self_attn.q_norm.weight",
        "k_norm": "self_attn.k_norm.weight",
        "wo": "self_attn.o_proj.weight",
        "bo": "self_attn.o_proj.bias",
        "w_down": "mlp.down_proj.weight",
        "b_down": "mlp.down_proj.bias",
    }
    for layer in range(c["num_hidden_layers"]):
        here = {
            name.removeprefix(f"model.layers.{layer}."): value
            for name, value in t.items()
            if name.startswith(f"model.layers.{layer}.")
        }
        for field, name in fields.items():
            if name in here:
                leaves[f"layers.{layer}.{field}"] = here[name].T
        for field, kind in (("wqkv", "weight"), ("bqkv", "bias")):
            if f"self_attn.q_proj.{kind}" not in here:
                continue
            q, k, v = (here[f"self_attn.{part}_proj.{kind}"] for part in "qkv")
            heads = []
            for group in range(K):
                heads += [q[(group * G + g) * D : (group * G + g + 1) * D] for g in range(G)]
                heads += [k[group * D : (group + 1) * D], v[group * D : (group + 1) * D]]
            leaves[f"layers.{layer}.{field}"] = np.concatenate(heads).T
        for field, kind in (("w_gate_up", "weight"), ("b_gate_up", "bias")):
            if f"mlp.gate_proj.{kind}" in here:
                both = [here[f"mlp.gate_proj.{kind}"], here[f"mlp.up_proj.{kind}"]]
                leaves[f"layers.{layer}.{field}"] = np.concatenate(both).T
    return leaves


def leaves(params: Any) -> dict[str, np.ndarray]:
    """The leaves of a tree by path, as numpy arrays."""
    import jax

    flat, _ = jax.tree_util.tree_flatten_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf) for path, leaf in flat}


def assert_same(params: Any, wanted: Mapping[str, np.ndarray], dtype: str = "float32") -> None:
    """Same leaves, same dtype, every element equal to the wanted one rounded to `dtype`."""
    got = leaves(params)
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert got[name].dtype == DTYPES[dtype], name
        np.testing.assert_array_equal(got[name].astype(np.float32), value.astype(DTYPES[dtype]), err_msg=name)


MEASURE = """
import sys, jax, jax.numpy as jnp
import orbax.checkpoint
from jpaged.weights import open_checkpoint

def peak():
    (line,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024

jax.block_until_ready(jnp.zeros(8) + 1)
path, *arguments = sys.argv[1:]
checkpoint = open_checkpoint(path)
if path.endswith(".gguf"):
    from jpaged.weights.gguf import tensors
    tensors(checkpoint.file)
before = peak()
params = checkpoint.load_params(*arguments)
size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
print(size, peak() - before)
"""


def measure_loading(path: Path, *arguments: str) -> tuple[int, int]:
    """Bytes of the parameters, and by how much a fresh process's peak memory grows as they are loaded.

    Args:
      arguments: of `load_params`.
    """
    if not Path("/proc/self/status").exists():
        pytest.skip("the peak of a process's memory is read from /proc")
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", MEASURE, str(path), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    size, peak = map(int, done.stdout.split())
    return size, peak


@pytest.fixture(scope="session")
def lab() -> Any:
    """The functions of this file, for the tests beside it."""
    import types

    return types.SimpleNamespace(
        tiny=tiny,
        write_hf=write_hf,
        write_gguf=write_gguf,
        expected=expected,
        leaves=leaves,
        assert_same=assert_same,
        interleave=interleave,
        measure_loading=measure_loading,
    )
