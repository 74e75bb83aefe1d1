"""Model and engine configuration: frozen, hashable values that never change after construction.

Owns what a model *is* (`ModelConfig`) and how an engine is sized (`EngineConfig`). Every quirk of
a Hugging Face `config.json` ends in `ModelConfig.from_hf`; nothing downstream looks at one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

Dtype = Literal["float32", "bfloat16", "float16"]
DTYPES: tuple[str, ...] = ("float32", "bfloat16", "float16")

LARGEST = {"int8": 127.0, "fp8_e4m3": 448.0, "int4": 7.0}
"""Quantized formats of the KV cache, and the magnitude that the largest of a token's values is mapped to."""

QUANTIZATIONS = ("int8", "int4")
"""What the matrices of a model's layers can be rounded to when it is loaded."""

AS_STORED = "gguf"
"""The `quantization` that keeps the quantized matrices of a GGUF file as they are."""

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding. Fields that a kind does not use keep their defaults.

    Attributes:
      kind: `default`, `linear` (positions divided by `factor`), `dynamic` (NTK; equal to `default`
        up to `original_max_position`, beyond which requests are refused), `llama3`, or `yarn`.
      theta: base of the frequencies.
      factor: context extension factor.
      original_max_position: context length, in tokens, that the model was first trained with.
      attention_factor: yarn's scale of cos and sin; `None` derives it from `factor`.
      truncate: whether yarn rounds its correction range to whole dimensions.
    """

    kind: RopeKind = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer with grouped-query attention. Families differ by these flags.

    Attributes:
      layer_windows: per layer, the sliding window in tokens (a query sees itself and the
        `window - 1` tokens before it), or `None` for full attention.
      qkv_bias, out_bias, mlp_bias: whether the projections have a bias.
      qk_norm: whether queries and keys are RMS-normalized per head before rope (Qwen3).
      max_position_embeddings: longest sequence, in tokens, that the positions are defined for.
      dtype: the checkpoint's own dtype.
      eos_token_ids: ids that end a sequence.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    layer_windows: tuple[int | None, ...] = ()
    dtype: Dtype = "float32"
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    architecture: str = "LlamaForCausalLM"

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            check_int(name, getattr(self, name), low=1)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads=} must be a multiple of {self.num_kv_heads=}")
        if self.head_dim % 2:
            raise ValueError(f"{self.head_dim=} must be even: rope rotates pairs")
        if self.dtype not in DTYPES:
            raise ValueError(f"{self.dtype=} must be one of {DTYPES}")
        if not self.layer_windows:
            object.__setattr__(self, "layer_windows", (None,) * self.num_layers)
        if len(self.layer_windows) != self.num_layers:
            raise ValueError(f"{len(self.layer_windows)=} must equal {self.num_layers=}")
        for window in self.layer_windows:
            if window is not None:
                check_int("layer_windows", window, low=1)

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def max_supported_len(self) -> int:
        """Longest sequence, in tokens, that rope computes without changing its base."""
        if self.rope.kind == "dynamic":
            return min(self.max_position_embeddings, self.rope.original_max_position)
        return self.max_position_embeddings

    def replace(self, **changes: Any) -> ModelConfig:
        """A new config with some fields changed."""
        return dataclasses.replace(self, **changes)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Reads a Hugging Face `config.json` (as a mapping).

        Raises:
          ValueError: the architecture, rope kind, activation or another feature is not supported,
            or a required field is missing; the message names it.
        """
        return _from_hf(dict(config))


def check_int(name: str, value: Any, *, low: int | None = None, high: int | None = None) -> None:
    """Raises `ValueError` naming field, value and limit unless `value` is an int in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name}={value!r} must be an int")
    if low is not None and value < low:
        raise ValueError(f"{name}={value} must be at least {low}")
    if high is not None and value > high:
        raise ValueError(f"{name}={value} must be at most {high}")


# ---------------------------------------------------------------------------------------------
# Hugging Face configs


_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}

# What transformers assumes where config.json is silent: differs by family.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": dict(
        tie_word_embeddings=False, rope_theta=10000.0, max_position_embeddings=2048, attention_bias=False,
        rms_norm_eps=1e-6, sliding_window=None, use_sliding_window=None, eos_token_id=2, bos_token_id=1,
    ),
    "mistral": dict(
        tie_word_embeddings=False, rope_theta=10000.0, max_position_embeddings=131072, attention_bias=False,
        rms_norm_eps=1e-6, sliding_window=4096, use_sliding_window=None, eos_token_id=2, bos_token_id=1,
    ),
    "qwen2": dict(
        tie_word_embeddings=False, rope_theta=10000.0, max_position_embeddings=32768, attention_bias=True,
        rms_norm_eps=1e-6, sliding_window=4096, use_sliding_window=False, eos_token_id=None,
        bos_token_id=None,
    ),
    "qwen3": dict(
        tie_word_embeddings=False, rope_theta=10000.0, max_position_embeddings=32768, attention_bias=False,
        rms_norm_eps=1e-6, sliding_window=4096, use_sliding_window=False, eos_token_id=None,
        bos_token_id=None,
    ),
}  # fmt: skip

# KV heads where config.json has no such field; where it says null, as many as there are heads.
_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}


def _from_hf(hf: dict[str, Any]) -> ModelConfig:
    architecture = _architecture(hf)
    family = _ARCHITECTURES[architecture]
    defaults = _DEFAULTS[family]

    def get(name: str) -> Any:
        return hf.get(name, defaults[name])

    _refuse_unsupported(hf, architecture)
    hidden, heads = _required(hf, "hidden_size"), _required(hf, "num_attention_heads")
    head_dim = hf.get("head_dim") or (128 if family == "qwen3" and "head_dim" not in hf else hidden // heads)
    num_layers = _required(hf, "num_hidden_layers")
    max_position = get("max_position_embeddings")
    # Qwen2 has the bias on q, k and v whatever its config says; Llama and Qwen3 on o as well.
    bias = bool(get("attention_bias"))
    return ModelConfig(
        vocab_size=_required(hf, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_required(hf, "intermediate_size"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=hf.get("num_key_value_heads", _KV_HEADS.get(family)) or heads,
        head_dim=head_dim,
        max_position_embeddings=max_position,
        rms_norm_eps=float(get("rms_norm_eps")),
        rope=_rope(hf, float(defaults["rope_theta"]), max_position, architecture),
        tie_word_embeddings=bool(get("tie_word_embeddings")),
        qkv_bias=True if family == "qwen2" else bias if family != "mistral" else False,
        out_bias=bias if family in ("llama", "qwen3") else False,
        mlp_bias=bool(hf.get("mlp_bias", False)) if family == "llama" else False,
        qk_norm=family == "qwen3",
        layer_windows=_layer_windows(hf, family, num_layers, get),
        dtype=_dtype(hf),
        eos_token_ids=_token_ids(get("eos_token_id")),
        bos_token_id=get("bos_token_id"),
        architecture=architecture,
    )


def _required(hf: dict[str, Any], name: str) -> int:
    value = hf.get(name)
    if value is None:
        raise ValueError(f"config.json has no {name}")
    check_int(name, value, low=1)
    return value


def _architecture(hf: dict[str, Any]) -> str:
    names = list(hf.get("architectures") or [])
    if not names and hf.get("model_type"):
        by_type = {family: name for name, family in _ARCHITECTURES.items()}
        names = [by_type.get(hf["model_type"], str(hf["model_type"]))]
    for name in names:
        if name in _ARCHITECTURES:
            return name
    raise ValueError(f"architecture {names or None} is not supported; supported: {', '.join(_ARCHITECTURES)}")


def _refuse_unsupported(hf: dict[str, Any], architecture: str) -> None:
    act = hf.get("hidden_act", "silu")
    if act not in ("silu", "swish"):
        raise ValueError(f"hidden_act={act!r} is not supported; supported: silu")
    for name in ("num_local_experts", "num_experts", "quantization_config"):
        if hf.get(name):
            raise ValueError(f"{architecture} with {name}={hf[name]!r} is not supported")
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"):
        if hf.get(name) is not None:
            raise ValueError(f"{architecture} with {name}={hf[name]!r} is not supported")
    if hf.get("partial_rotary_factor", 1.0) not in (None, 1.0):
        raise ValueError(
            f"partial_rotary_factor={hf['partial_rotary_factor']!r} is not supported; supported: 1.0"
        )
    if hf.get("auto_map"):
        raise ValueError("config.json has auto_map (remote code), which is never run")


def _dtype(hf: dict[str, Any]) -> Dtype:
    name = str(hf.get("dtype") or hf.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"dtype={name!r} is not supported; supported: {', '.join(DTYPES)}")
    return name  # type: ignore[return-value]


def _token_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (list, tuple)) else (int(value),)


def _layer_windows(hf: dict[str, Any], family: str, num_layers: int, get: Any) -> tuple[int | None, ...]:
    if family == "llama":
        return (None,) * num_layers
    window = get("sliding_window")
    if family == "mistral":
        return (window,) * num_layers
    if not get("use_sliding_window"):
        return (None,) * num_layers
    types = hf.get("layer_types")
    if types is None:
        full = hf.get("max_window_layers", 28)
        types = ["sliding_attention" if i >= full else "full_attention" for i in range(num_layers)]
    for kind in types:
        if kind not in ("sliding_attention", "full_attention"):
            raise ValueError(f"layer_types has {kind!r}; supported: full_attention, sliding_attention")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


_ROPE_KEYS = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {"factor"},
}


def _rope(hf: dict[str, Any], default_theta: float, max_position: int, architecture: str) -> RopeConfig:
    """Both spellings: `rope_scaling` beside `rope_theta`, and `rope_parameters` holding both."""
    scaling = dict(hf.get("rope_scaling") or {}) | dict(hf.get("rope_parameters") or {})
    if any(isinstance(value, Mapping) for value in scaling.values()):
        raise ValueError(f"{architecture} with rope parameters per layer type is not supported")
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in _ROPE_KEYS:
        raise ValueError(f"rope kind {kind!r} is not supported; supported: {', '.join(_ROPE_KEYS)}")
    missing = _ROPE_KEYS[kind] - scaling.keys()
    if missing:
        raise ValueError(f"rope kind {kind!r} needs {', '.join(sorted(missing))}")
    if scaling.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"partial_rotary_factor={scaling['partial_rotary_factor']!r} is not supported")
    theta = scaling.get("rope_theta") or hf.get("rope_theta") or default_theta
    original = (
        scaling.get("original_max_position_embeddings")
        or hf.get("original_max_position_embeddings")
        or max_position
    )
    factor = scaling.get("factor")
    if kind == "yarn" and scaling.get("original_max_position_embeddings"):
        factor = factor or max_position / original
    floats = {name: float(scaling[name]) for name in _ROPE_FLOATS if scaling.get(name) is not None}
    return RopeConfig(
        kind=kind,  # type: ignore[arg-type]
        theta=float(theta),
        factor=float(factor or 1.0),
        original_max_position=int(original),
        truncate=bool(scaling.get("truncate", True)),
        **floats,
    )


_ROPE_FLOATS = (
    "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow",
    "attention_factor", "mscale", "mscale_all_dim",
)  # fmt: skip


# ---------------------------------------------------------------------------------------------
# Engine


_CHOICES: dict[str, tuple[str, ...]] = {
    "dtype": ("auto", *DTYPES),
    "kv_cache_dtype": ("auto", *DTYPES, *LARGEST),
    "attention_backend": ("auto", "xla", "cpu", "pallas", "pallas_interpret", "mosaic", "jax_triton"),
    "prefix_cache": ("radix", "hash", "off"),
    "eviction_policy": ("lru", "lfu", "fifo"),
    "schedule_policy": ("fcfs", "lpm", "dfs"),
}


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """How an engine is sized and what it promises. `None` means: derived at start-up.

    Attributes:
      dtype: of the weights; `auto` keeps that of `params`. (`LLM` chooses one when it loads.)
      kv_cache_dtype: how keys and values are stored; `auto` is the weights' dtype. `int8`, `fp8_e4m3` and
        `int4` have a 16-bit scale for each token and head; `docs/quantization.md` has what they cost.
      kv_cache_skip_layers: layers whose keys and values stay in the weights' dtype.
      max_model_len: longest sequence in tokens, prompt and output together.
      max_num_seqs: most sequences that run at once (rows of the device arrays).
      max_num_batched_tokens: most tokens computed in one step.
      block_size: tokens per KV block.
      num_kv_blocks: usable KV blocks in the pool (the null block comes on top).
      kv_cache_memory_bytes: size of the pool when `num_kv_blocks` is not given. On a CPU the
        default is the smaller of 2 GiB and what `max_num_seqs` sequences of `max_model_len` need.
      gpu_memory_utilization: share of the GPU's memory that weights, temporaries and pool may use.
      attention_backend: `xla` runs anywhere; `cpu` is compiled for one; `pallas` are the GPU
        kernels; `pallas_interpret` runs those in an interpreter, slowly; `mosaic` (Hopper) and `jax_triton`
        have other kernels for decode; `auto` takes `pallas` or `cpu` where it can run, else `xla`. What is
        chosen by name never falls back.
      prefix_cache: `radix` finds the longest cached prefix to the token, `hash` to the block, `off`
        computes every prompt.
      eviction_policy: which unused cached blocks go first: `lru`, `lfu` or `fifo`.
      schedule_policy: who is admitted first: `fcfs` by arrival, `lpm` with the longest cached prefix,
        `dfs` depth first over the tree of the waiting prompts.
      deterministic: bitwise equal results whatever runs beside a request; see
        `docs/architecture.md` for what it costs.
      overlap: dispatch the next step before the tokens of this one are read; results are the same.
      seed: where unseeded requests take their seeds from, with their arrival index.
    """

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16", "int8", "fp8_e4m3", "int4"] = "auto"
    kv_cache_skip_layers: tuple[int, ...] = ()
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int = 16
    num_kv_blocks: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    attention_backend: Literal["auto", "xla", "cpu", "pallas", "pallas_interpret", "mosaic", "jax_triton"] = (
        "auto"
    )
    prefix_cache: Literal["radix", "hash", "off"] = "radix"
    eviction_policy: Literal["lru", "lfu", "fifo"] = "lru"
    schedule_policy: Literal["fcfs", "lpm", "dfs"] = "fcfs"
    deterministic: bool = False
    overlap: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {choices}")
        for name in (
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "num_kv_blocks",
            "kv_cache_memory_bytes",
        ):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), low=1)
        if not isinstance(self.kv_cache_skip_layers, (list, tuple)):
            raise ValueError(
                f"kv_cache_skip_layers={self.kv_cache_skip_layers!r} must be a list or tuple of ints"
            )
        for layer in self.kv_cache_skip_layers:
            check_int("kv_cache_skip_layers", layer, low=0)
        object.__setattr__(self, "kv_cache_skip_layers", tuple(self.kv_cache_skip_layers))
        check_int("block_size", self.block_size, low=1)
        check_int("seed", self.seed, low=0, high=2**63 - 1)
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization={self.gpu_memory_utilization} must be in (0, 1]")
