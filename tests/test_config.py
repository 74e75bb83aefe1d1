"""`ModelConfig.from_hf` against transformers' own configuration classes, and its refusals."""

from __future__ import annotations

import pytest

from jpaged.config import EngineConfig, ModelConfig, RopeConfig

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
BASE = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
}


def hf(family: str, **changes) -> dict:
    return BASE | {"architectures": [ARCHITECTURES[family]], "model_type": family} | changes


def reference(config: dict) -> dict:
    """What transformers makes of a config, in our names."""
    transformers = pytest.importorskip("transformers")
    name = config["architectures"][0].removesuffix("ForCausalLM")
    theirs = getattr(transformers, f"{name}Config")(**config)
    eos = theirs.eos_token_id
    return {
        "num_kv_heads": theirs.num_key_value_heads,
        "head_dim": getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads,
        "max_position_embeddings": theirs.max_position_embeddings,
        "rms_norm_eps": theirs.rms_norm_eps,
        "tie_word_embeddings": theirs.tie_word_embeddings,
        "bos_token_id": theirs.bos_token_id,
        "eos_token_ids": () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        "theta": theirs.rope_parameters["rope_theta"],
        "kind": theirs.rope_parameters["rope_type"],
    }


def ours(config: dict) -> dict:
    made = ModelConfig.from_hf(config)
    names = reference(config).keys() - {"theta", "kind"}
    return {name: getattr(made, name) for name in names} | {"theta": made.rope.theta, "kind": made.rope.kind}


@pytest.mark.parametrize("family", ARCHITECTURES)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_key_value_heads": 16},
        {"head_dim": 32},
        {"tie_word_embeddings": True},
        {"rms_norm_eps": 1e-5},
        {"max_position_embeddings": 123},
        {"eos_token_id": [3, 4], "bos_token_id": 9},
        {"eos_token_id": None},
        {"rope_theta": 5e5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 7e5}},
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 3e4},
        {"rope_scaling": None, "rope_theta": 1e6},
    ],
    ids=lambda changes: "-".join(changes) or "silent",
)
def test_fields_and_defaults_are_those_of_transformers(family, changes):
    config = hf(family, **changes)
    assert ours(config) == reference(config)


def test_kv_heads_that_are_null_are_as_many_as_heads():
    assert ModelConfig.from_hf(hf("llama", num_key_value_heads=None)).num_kv_heads == 32
    assert ModelConfig.from_hf(hf("qwen2", num_key_value_heads=None)).num_kv_heads == 32


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
def test_head_dim_that_is_null_or_absent_is_the_quotient(family):
    assert ModelConfig.from_hf(hf(family, head_dim=None)).head_dim == 2
    assert ModelConfig.from_hf(hf(family)).head_dim == 2
    assert ModelConfig.from_hf(hf(family, head_dim=32)).head_dim == 32


def test_qwen3_head_dim_defaults_to_128():
    assert ModelConfig.from_hf(hf("qwen3")).head_dim == 128
    assert ModelConfig.from_hf(hf("qwen3", head_dim=16)).head_dim == 16


def test_biases_and_norms_by_family():
    flags = ("qkv_bias", "out_bias", "mlp_bias", "qk_norm")

    def of(family, **changes):
        made = ModelConfig.from_hf(hf(family, **changes))
        return tuple(getattr(made, flag) for flag in flags)

    assert of("llama") == (False, False, False, False)
    assert of("llama", attention_bias=True, mlp_bias=True) == (True, True, True, False)
    assert of("mistral", attention_bias=True, mlp_bias=True) == (False, False, False, False)
    assert of("qwen2", attention_bias=False) == (True, False, False, False)
    assert of("qwen3") == (False, False, False, True)
    assert of("qwen3", attention_bias=True) == (True, True, False, True)


def test_architecture_is_taken_from_model_type_where_it_is_not_named():
    config = hf("qwen3")
    del config["architectures"]
    assert ModelConfig.from_hf(config).architecture == "Qwen3ForCausalLM"


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_both_spellings_of_rope_give_the_same(spelling):
    llama3 = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.5,
        "high_freq_factor": 5.0,
        "original_max_position_embeddings": 1024,
    }
    if spelling == "rope_scaling":
        config = hf("llama", rope_scaling=llama3, rope_theta=5e5, max_position_embeddings=8192)
    else:
        config = hf("llama", rope_parameters=llama3 | {"rope_theta": 5e5}, max_position_embeddings=8192)
    assert ModelConfig.from_hf(config).rope == RopeConfig(
        kind="llama3",
        theta=5e5,
        factor=8.0,
        original_max_position=1024,
        low_freq_factor=1.5,
        high_freq_factor=5.0,
    )


def test_yarn_keeps_every_parameter():
    yarn = {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "beta_fast": 16,
        "beta_slow": 2,
        "attention_factor": 1.25,
        "truncate": False,
    }
    config = hf("qwen2", rope_scaling=yarn, max_position_embeddings=4096)
    assert ModelConfig.from_hf(config).rope == RopeConfig(
        kind="yarn",
        factor=4.0,
        original_max_position=1024,
        beta_fast=16.0,
        beta_slow=2.0,
        attention_factor=1.25,
        truncate=False,
    )


def test_dynamic_rope_is_supported_up_to_the_original_length():
    scaling = {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 512}
    config = hf("llama", rope_scaling=scaling, max_position_embeddings=1024)
    assert ModelConfig.from_hf(config).max_supported_len == 512


F, W = None, 8


@pytest.mark.parametrize(
    ("family", "changes", "windows"),
    [
        ("qwen2", {"use_sliding_window": False, "sliding_window": W}, (F, F, F, F)),
        ("qwen2", {"sliding_window": W, "max_window_layers": 0}, (F, F, F, F)),
        ("qwen2", {"use_sliding_window": True, "sliding_window": W, "max_window_layers": 0}, (W, W, W, W)),
        ("qwen2", {"use_sliding_window": True, "sliding_window": W, "max_window_layers": 1}, (F, W, W, W)),
        ("qwen2", {"use_sliding_window": True, "sliding_window": W, "max_window_layers": 4}, (F, F, F, F)),
        ("qwen3", {"use_sliding_window": True, "sliding_window": W}, (F, F, F, F)),
        ("qwen3", {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, (F, F, F, F)),
        (
            "qwen3",
            {
                "use_sliding_window": True,
                "sliding_window": W,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (W, F, W, F),
        ),
        ("mistral", {"sliding_window": W}, (W, W, W, W)),
        ("mistral", {"sliding_window": None}, (F, F, F, F)),
        ("mistral", {}, (4096, 4096, 4096, 4096)),
        ("llama", {"sliding_window": W}, (F, F, F, F)),
    ],
)
def test_sliding_windows_are_per_layer_and_only_where_switched_on(family, changes, windows):
    assert ModelConfig.from_hf(hf(family, **changes)).layer_windows == windows


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*supported: LlamaForCausalLM"),
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map"),
        ({"dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "'longrope'.*supported: default"),
        ({"rope_scaling": {"type": "linear"}}, "'linear' needs factor"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "high_freq_factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per layer type"),
        ({"hidden_size": None}, "no hidden_size"),
        ({"vocab_size": "100"}, "vocab_size='100'"),
        ({"num_key_value_heads": 5}, "num_kv_heads"),
        ({"head_dim": 3}, "head_dim"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_is_not_supported_is_refused_by_name(changes, words):
    with pytest.raises(ValueError, match=words):
        ModelConfig.from_hf(hf("llama") | changes)


@pytest.mark.parametrize("spelling", ["dtype", "torch_dtype"])
def test_dtype_is_the_checkpoints(spelling):
    assert ModelConfig.from_hf(hf("llama", **{spelling: "bfloat16"})).dtype == "bfloat16"
    assert ModelConfig.from_hf(hf("llama", **{spelling: "torch.float16"})).dtype == "float16"
    assert ModelConfig.from_hf(hf("llama")).dtype == "float32"


@pytest.mark.parametrize("layers", [0, "01", None, {0}, (True,), ("0",), (1.0,), (-1,)])
def test_layers_to_skip_are_a_list_or_tuple_of_ints(layers):
    with pytest.raises(ValueError, match="kv_cache_skip_layers="):
        EngineConfig(kv_cache_skip_layers=layers)
    assert EngineConfig(kv_cache_skip_layers=[0, 2]).kv_cache_skip_layers == (0, 2)
