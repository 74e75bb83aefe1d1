"""What a model takes of a device's memory, before anything is loaded: weights, temporaries, KV cache.

Counts from the declarations that an engine allocates by (`abstract_params`, `KVLayout`), so that the plan and
the arrays cannot differ. Nothing touches a device.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax

from jpaged.batch import init_row_state
from jpaged.config import LARGEST, QUANTIZATIONS, ModelConfig, check_int
from jpaged.kv_cache import KVLayout, bytes_per_block, bytes_per_token
from jpaged.models.transformer import Params, abstract_params
from jpaged.pallas.common import addressable_blocks

WEIGHTS = ("bfloat16", "float16", "float32", *QUANTIZATIONS)
KV_FORMATS = ("bfloat16", "float16", "float32", *LARGEST)


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """An account of device memory; sizes in bytes.

    Attributes:
      memory_bytes: of the device; `usable_bytes` is the share of it that an engine takes.
      weight_parts: bytes of the embedding, attention, MLP, norms and output head.
      row_state_bytes: masks, counts and bias of `max_num_seqs` rows.
      temporary_bytes: of the largest step; `is_estimate` if no compiled step was asked.
      kv_bytes_per_token, kv_bytes_per_block: K and V of every layer, scales included.
      full_heads_bytes_per_token: the same if every query head had K and V of its own.
      kv_blocks, kv_tokens: that fit.
      max_sequences: of `context` tokens each that fit, in whole blocks; `max_num_seqs` does not limit it.
      contiguous_max_sequences: that would fit if each reserved the model's longest sequence.
    """

    memory_bytes: int
    usable_bytes: int
    weight_parts: dict[str, int]
    row_state_bytes: int
    temporary_bytes: int
    is_estimate: bool
    kv_bytes_per_token: int
    full_heads_bytes_per_token: int
    kv_bytes_per_block: int
    kv_blocks: int
    kv_tokens: int
    context: int
    max_sequences: int
    reserved_len: int
    contiguous_max_sequences: int

    @property
    def weight_bytes(self) -> int:
        return sum(self.weight_parts.values())

    @property
    def kv_bytes(self) -> int:
        """Of the pool, the null block included."""
        return (self.kv_blocks + 1) * self.kv_bytes_per_block


def plan_memory(
    config: ModelConfig,
    memory_bytes: int,
    *,
    weights: str = "bfloat16",
    kv: str = "bfloat16",
    context: int = 8192,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int = 2048,
    block_size: int = 16,
    utilization: float = 0.9,
    temporary_bytes: int | None = None,
) -> MemoryPlan:
    """Plans the memory of an engine on a GPU.

    Args:
      weights: one of `WEIGHTS`; quantized weights compute in bfloat16.
      kv: one of `KV_FORMATS`.
      context: tokens of each sequence.
      temporary_bytes: of the largest compiled step; by default `estimate_temporaries`.

    Raises:
      ValueError: a value is out of range, or weights and temporaries leave no room for a block.
    """
    for name, value, allowed in (("weights", weights, WEIGHTS), ("kv", kv, KV_FORMATS)):
        if value not in allowed:
            raise ValueError(f"{name}={value!r} must be one of {allowed}")
    check_int("memory_bytes", memory_bytes, low=1)
    check_int("context", context, low=1, high=config.max_supported_len)
    check_int("max_num_seqs", max_num_seqs, low=1)
    dtype, quantization = ("bfloat16", weights) if weights in QUANTIZATIONS else (weights, None)
    parts = _weight_parts(abstract_params(config, dtype, quantization))
    state = jax.eval_shape(lambda: init_row_state(max_num_seqs, config.vocab_size))
    state_bytes = sum(map(_bytes, jax.tree.leaves(state)))
    is_estimate = temporary_bytes is None
    if temporary_bytes is None:
        temporary_bytes = estimate_temporaries(config, max_num_seqs, max_num_batched_tokens)
    layout = KVLayout.of(config, dtype, kv)
    token, block = bytes_per_token(config, layout), bytes_per_block(config, block_size, layout)
    usable = int(memory_bytes * utilization)
    left = usable - sum(parts.values()) - state_bytes - temporary_bytes
    blocks = min(left // block, addressable_blocks(config, block_size)) - 1  # less the null block
    if blocks < 1:
        raise ValueError(
            f"memory_bytes={memory_bytes} leaves no room for a KV block of {block} bytes: {usable} usable, "
            f"{sum(parts.values())} of weights, {state_bytes} of row state, {temporary_bytes} of temporaries"
        )
    reserved = config.max_supported_len
    return MemoryPlan(
        memory_bytes=memory_bytes,
        usable_bytes=usable,
        weight_parts=parts,
        row_state_bytes=state_bytes,
        temporary_bytes=temporary_bytes,
        is_estimate=is_estimate,
        kv_bytes_per_token=token,
        full_heads_bytes_per_token=token * config.group_size,
        kv_bytes_per_block=block,
        kv_blocks=blocks,
        kv_tokens=blocks * block_size,
        context=context,
        max_sequences=blocks // math.ceil(context / block_size),
        reserved_len=reserved,
        contiguous_max_sequences=blocks * block_size // reserved,
    )


def _weight_parts(params: Params) -> dict[str, int]:
    """Bytes of a model's weights by part."""
    parts = dict.fromkeys(("embedding", "attention", "mlp", "norms", "output head"), 0)
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        field = path[2] if path[0].name == "layers" else path[0]
        parts[_part(field.name)] += _bytes(leaf)
    return parts


def _part(name: str) -> str:
    if name.endswith("norm"):
        return "norms"
    if name in ("embed", "lm_head"):
        return "embedding" if name == "embed" else "output head"
    return "attention" if name in ("wqkv", "bqkv", "wo", "bo") else "mlp"


def estimate_temporaries(config: ModelConfig, max_num_seqs: int, max_num_batched_tokens: int) -> int:
    """Bytes that a prefill step needs beside its arguments: an estimate, where no compiler is at hand.

    Float32 activations of a layer (residual, normed, Q, K, V, gate and up, gated) for every token, and four
    float32 arrays of logits for every sequence.
    """
    qkv = config.num_kv_heads * (config.group_size + 2) * config.head_dim
    per_token = 2 * config.hidden_size + qkv + 3 * config.intermediate_size
    return 4 * (max_num_batched_tokens * per_token + 4 * max_num_seqs * config.vocab_size)


def _bytes(array: Any) -> int:
    return int(array.size) * int(array.dtype.itemsize)
