"""The engine's log-probabilities are transformers', for every family and kind of rope, however chunked."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import tiny_config, tiny_params

from jpaged import LLM, SamplingParams
from jpaged.config import ModelConfig
from jpaged.models.transformer import forward, logits
from jpaged.ops.layers import linear, rms_norm

BASE = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    rms_norm_eps=1e-6,
    initializer_range=0.4,
    torch_dtype="float32",
)
LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
MODELS = {
    "llama": ("LlamaConfig", {}),
    "llama tied, biased, one KV head": (
        "LlamaConfig",
        dict(tie_word_embeddings=True, attention_bias=True, mlp_bias=True, num_key_value_heads=1),
    ),
    "llama linear": ("LlamaConfig", dict(rope_scaling=dict(rope_type="linear", factor=4.0))),
    "llama dynamic": ("LlamaConfig", dict(rope_scaling=dict(rope_type="dynamic", factor=4.0))),
    "llama llama3": ("LlamaConfig", dict(rope_scaling=LLAMA3)),
    "llama yarn": ("LlamaConfig", dict(rope_parameters=dict(YARN, rope_theta=5000.0))),
    "mistral window": ("MistralConfig", dict(sliding_window=9)),
    "qwen2": ("Qwen2Config", {}),
    "qwen2 windows from layer 1": (
        "Qwen2Config",
        dict(use_sliding_window=True, sliding_window=8, max_window_layers=1),
    ),
    "qwen3 wide heads": ("Qwen3Config", dict(head_dim=24)),
}


@pytest.fixture(scope="module", params=MODELS, ids=str)
def case(request, tmp_path_factory):
    """A random model of transformers as a directory, 40 ids, and its log-probabilities of them."""
    torch = pytest.importorskip("torch")
    import transformers

    name, changes = MODELS[request.param]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**(BASE | changes))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    ids = np.random.default_rng(0).integers(0, 96, 40)
    with torch.no_grad():
        wanted = torch.log_softmax(model(torch.tensor(ids)[None]).logits[0].double(), -1).numpy()
    return path, ids.tolist(), wanted


@pytest.mark.parametrize("chunk", [40, 7, 1])
def test_logprobs_are_those_of_transformers(case, chunk):
    path, ids, wanted = case
    sizes = dict(max_model_len=48, max_num_seqs=1, max_num_batched_tokens=chunk)
    llm = LLM(path, dtype="float32", **sizes)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=20, logprobs=20)
    (output,) = llm.generate([ids], params, use_tqdm=False)
    entries = [*output.prompt_logprobs[1:], output.outputs[0].logprobs[0]]
    assert len(entries) == 40
    assert llm.engine.stats()["num_steps"] == -(-40 // chunk)
    for position, entry in enumerate(entries):
        assert len(entry) >= 20
        for token, value in entry.items():
            assert abs(value.logprob - wanted[position, token]) < 1e-4, (position, token)


def test_dynamic_rope_is_refused_where_its_base_would_change():
    hf = BASE | dict(architectures=["LlamaForCausalLM"], rope_scaling=dict(rope_type="dynamic", factor=4.0))
    config = ModelConfig.from_hf(hf)
    assert config.max_supported_len == 64
    with pytest.raises(ValueError, match="max_model_len=65 must be at most 64"):
        LLM(config=config, params=tiny_params(config), max_model_len=65)


def test_forward_can_be_differentiated():
    config = tiny_config(num_layers=1)
    params = tiny_params(config)
    tokens = jnp.arange(5, 15, dtype=jnp.int32)
    causal = jnp.tril(jnp.ones((10, 10), bool))

    def attend(layer, qkv):
        del layer
        q, k, v = qkv[:, :, :-2], qkv[:, :, -2], qkv[:, :, -1]
        scores = jnp.einsum("tkgd,skd->kgts", q, k) * config.head_dim**-0.5
        weights = jax.nn.softmax(jnp.where(causal[None, None], scores, -jnp.inf), axis=-1)
        return jnp.einsum("kgts,skd->tkgd", weights, v).reshape(10, -1, config.head_dim)

    def loss(params):
        hidden = forward(params, config, tokens, jnp.arange(10, dtype=jnp.int32), attend)
        return -jnp.mean(jax.nn.log_softmax(logits(params, hidden))[jnp.arange(9), tokens[1:]])

    gradient = jax.jit(jax.grad(loss))(params)
    direction = jax.tree.map(lambda g: g / jnp.linalg.norm(g.ravel()).clip(1e-12), gradient)

    def along(step):
        return loss(jax.tree.map(lambda p, d: p + step * d, params, direction))

    numeric = (jax.jit(along)(1e-2) - jax.jit(along)(-1e-2)) / 2e-2
    exact = sum(jnp.vdot(g, d) for g, d in zip(*map(jax.tree.leaves, (gradient, direction)), strict=True))
    assert exact > 0.1
    np.testing.assert_allclose(numeric, exact, rtol=2e-2)


def test_values_pass_by_the_rotation_and_the_norms_as_they_are():
    config = tiny_config(num_layers=1, qk_norm=True, qkv_bias=True)
    K, G, D = config.num_kv_heads, config.group_size, config.head_dim
    params = tiny_params(config)
    layer = params.layers[0]
    bias = np.array(layer.bqkv).reshape(K, G + 2, D)
    bias[:, -1, 3], bias[:, -1, D - 2] = np.nan, np.inf
    layer = dataclasses.replace(layer, bqkv=jnp.asarray(bias.ravel()))
    params = dataclasses.replace(params, layers=(layer,))
    tokens = jnp.arange(5, 10, dtype=jnp.int32)
    seen = []

    def attend(layer, qkv):
        seen.append(qkv)
        return jnp.zeros((5, K * G, D))

    forward(params, config, tokens, jnp.arange(5, dtype=jnp.int32), attend)
    normed = rms_norm(params.embed[tokens], layer.attn_norm, config.rms_norm_eps)
    product = linear(normed, layer.wqkv, layer.bqkv).reshape(5, K, G + 2, D)
    np.testing.assert_array_equal(seen[0][:, :, -1], product[:, :, -1])
    assert np.isfinite(seen[0][:, :, :-1]).all()
