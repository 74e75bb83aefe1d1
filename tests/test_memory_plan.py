"""The plan's bytes are those that an engine allocates, and its arithmetic is that of published models."""

from __future__ import annotations

import jax
import pytest
from conftest import tiny_config, tiny_params

from jpaged.engine.engine import Engine
from jpaged.memory_plan import plan_memory
from jpaged.presets import preset


def size(tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize(("head_dim", "kv_heads"), [(64, 1), (80, 3), (96, 5), (128, 7)])
@pytest.mark.parametrize("kv", ["float32", "bfloat16", "int8", "fp8_e4m3", "int4"])
def test_an_engine_allocates_what_is_planned(head_dim, kv_heads, kv):
    config = tiny_config(  # of matrices that fill whole panels on a CPU: as wide as a multiple of 32
        head_dim=head_dim, num_kv_heads=kv_heads, num_heads=2 * kv_heads, vocab_size=96, hidden_size=64
    )
    engine = Engine(
        config, tiny_params(config), kv_cache_dtype=kv, num_kv_blocks=8, max_num_seqs=4, max_model_len=64
    )
    plan = plan_memory(config, 1 << 30, weights="float32", kv=kv, context=64, max_num_seqs=4)
    assert size(engine.runner.cache) == 9 * plan.kv_bytes_per_block
    assert size(engine.runner.params) == plan.weight_bytes
    assert plan.kv_bytes_per_block == 16 * plan.kv_bytes_per_token


def test_llama3_8b_on_24_gib():
    plan = plan_memory(preset("llama3-8b"), 24 << 30, weights="bfloat16", temporary_bytes=1 << 30)
    assert plan.weight_bytes == 2 * 8_030_261_248
    assert plan.kv_bytes_per_token == 2 * 32 * 8 * 128 * 2
    assert plan.full_heads_bytes_per_token == 4 * plan.kv_bytes_per_token
    left = int((24 << 30) * 0.9) - plan.weight_bytes - plan.row_state_bytes - (1 << 30)
    assert plan.kv_blocks == left // plan.kv_bytes_per_block - 1
    assert plan.max_sequences == plan.kv_tokens // 8192


def test_short_contexts_hold_more_sequences_than_contiguous_reservation():
    plan = plan_memory(preset("mistral-7b"), 80 << 30, context=1000)
    assert plan.max_sequences == plan.kv_blocks // 63
    assert plan.contiguous_max_sequences == plan.kv_tokens // 32768


def test_bytes_of_quantized_matrices():
    config = tiny_config(hidden_size=256, intermediate_size=96, num_layers=1)
    columns = 2 * 5 * 16  # of wqkv; wo has 96 rows and 256 columns
    int8 = plan_memory(config, 1 << 30, weights="int8", context=64).weight_parts
    assert int8["attention"] == 256 * columns + 4 * columns + 96 * 256 + 4 * 256
    int4 = plan_memory(config, 1 << 30, weights="int4", context=64).weight_parts
    assert int4["attention"] == 128 * columns + 5 * 2 * columns + 48 * 256 + 5 * 3 * 256


def test_a_model_that_does_not_fit_is_refused_with_the_account():
    with pytest.raises(ValueError, match="leaves no room for a KV block"):
        plan_memory(preset("qwen2.5-32b"), 24 << 30)
