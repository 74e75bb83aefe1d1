"""The same files read by transformers: it must find the weights where the loader finds them."""

from __future__ import annotations

import numpy as np
import pytest

from jpaged.weights import open_checkpoint

torch = pytest.importorskip("torch")


def state(model) -> dict[str, np.ndarray]:
    return {name: value.float().numpy() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_transformers_reads_the_same_weights_from_the_directory(lab, tmp_path, family, tied):
    from transformers import AutoModelForCausalLM

    model = lab.tiny(family, tie_word_embeddings=tied)
    path = lab.write_hf(tmp_path, model)
    theirs, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, dtype=torch.float32)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    tensors = {
        name: value for name, value in state(theirs).items() if not (tied and name == "lm_head.weight")
    }
    assert tensors.keys() == model.tensors.keys()
    lab.assert_same(open_checkpoint(path).load_params(), lab.expected(model.replace(tensors=tensors)))


@pytest.mark.parametrize(("family", "head_dim"), [("llama", 8), ("qwen2", 8), ("qwen3", 128)])
@pytest.mark.parametrize("quantization", ["F32", "Q8_0"])
def test_transformers_reads_the_same_weights_from_gguf(lab, tmp_path, family, head_dim, quantization):
    """transformers takes no notice of a file's key_length, so head_dim is what it assumes."""
    pytest.importorskip("gguf")
    from transformers import AutoModelForCausalLM

    model = lab.tiny(family, head_dim=head_dim)
    path = lab.write_gguf(tmp_path / "model.gguf", model, quantization=quantization, extra=add_vocabulary)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    lab.assert_same(
        open_checkpoint(path).load_params("float32"), lab.expected(model.replace(tensors=state(theirs)))
    )


def add_vocabulary(writer) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(96)])


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
WINDOW = {"use_sliding_window": True, "sliding_window": 8}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": None}),
        ("llama", {"rope_scaling": LLAMA3, "max_position_embeddings": 256}),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
        ("mistral", {"sliding_window": 8}),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": False}),
        ("qwen2", WINDOW | {"max_window_layers": 0}),
        ("qwen2", WINDOW | {"max_window_layers": 1}),
        ("qwen2", WINDOW | {"max_window_layers": 2}),
        ("qwen2", {"rope_scaling": YARN}),
        ("qwen3", {}),
    ],
)
def test_logits_are_those_of_transformers(lab, tmp_path, family, changes):
    """40 tokens through the loaded weights and dense attention, in float32."""
    from transformers import AutoModelForCausalLM

    head_dim = changes.get("head_dim", 16) or 8
    model = lab.tiny(family, **changes | {"head_dim": head_dim}).replace(config=changes)
    scaled = {name: value * (0.2 if value.ndim == 2 else 1.0) for name, value in model.tensors.items()}
    path = lab.write_hf(tmp_path, model.replace(tensors=scaled))
    ids = np.random.default_rng(0).integers(0, 96, 40)
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        wanted = theirs(torch.tensor(ids)[None]).logits[0].numpy()
    got = dense_logits(open_checkpoint(path), ids)
    assert np.abs(wanted).max() > 1
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())


def dense_logits(checkpoint, ids: np.ndarray) -> np.ndarray:
    import jax.numpy as jnp

    from jpaged.models.transformer import forward, logits
    from jpaged.ops.attention import split_qkv

    config, params = checkpoint.config, checkpoint.load_params("float32")
    distance = np.arange(len(ids))[:, None] - np.arange(len(ids))[None, :]

    def attend(layer, qkv):
        q, *kv = split_qkv(qkv)
        window = config.layer_windows[layer] or len(ids)
        seen = (distance >= 0) & (distance < window)
        k, v = (np.repeat(np.asarray(x), config.group_size, axis=1) for x in kv)
        scores = np.einsum("qhd,khd->hqk", np.asarray(q), k) * config.head_dim**-0.5
        scores = np.where(seen, scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        return jnp.asarray(np.einsum("hqk,khd->qhd", weights, v), jnp.float32)

    tokens = jnp.asarray(ids, jnp.int32)
    hidden = forward(params, config, tokens, jnp.arange(len(ids), dtype=jnp.int32), attend)
    return np.asarray(logits(params, hidden))
