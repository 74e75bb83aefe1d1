"""Presets are the models they are named after."""

from __future__ import annotations

import math

import jax
import pytest

from jpaged.models.transformer import abstract_params
from jpaged.presets import PRESETS, preset

# As published with the weights: parameters, head_dim, group size, layers, longest sequence.
PUBLISHED = {
    "llama3-8b": (8_030_261_248, 128, 4, 32, 8192),
    "qwen2.5-7b": (7_615_616_512, 128, 7, 28, 131072),
    "llama2-7b": (6_738_415_616, 128, 1, 32, 4096),
    "mistral-7b": (7_241_732_096, 128, 4, 32, 32768),
    "qwen2.5-14b": (14_770_033_664, 128, 5, 48, 131072),
    "qwen2.5-32b": (32_763_876_352, 128, 5, 64, 131072),
    "smollm2-135m": (134_515_008, 64, 3, 30, 8192),
}


@pytest.mark.parametrize("name", list(PRESETS))
def test_a_preset_has_the_published_number_of_parameters(name):
    config = preset(name)
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract_params(config)))
    sizes = (config.head_dim, config.group_size, config.num_layers, config.max_position_embeddings)
    assert (count, *sizes) == PUBLISHED[name]
    assert config.dtype == ("float16" if name == "llama2-7b" else "bfloat16")


def test_an_unknown_preset_is_refused_with_a_list_of_those_there_are():
    with pytest.raises(ValueError, match="'gpt2' must be one of llama3-8b, qwen2.5-7b"):
        preset("gpt2")
