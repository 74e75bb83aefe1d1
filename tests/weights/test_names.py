"""The geometry: the tensors of a checkpoint tile every leaf, each element exactly once."""

from __future__ import annotations

import numpy as np
import pytest

from jpaged.config import ModelConfig
from jpaged.models.transformer import abstract_params
from jpaged.weights.names import is_ignored, targets

VARIANTS = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    ("mistral", {"num_key_value_heads": 1}),
    ("qwen2", {"num_key_value_heads": 4}),
    ("qwen3", {"tie_word_embeddings": True}),
]


@pytest.mark.parametrize("source", ["hf", "gguf"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("family", "changes"), VARIANTS)
def test_every_element_of_every_leaf_has_exactly_one_source(lab, family, changes, source, interleaved):
    config = ModelConfig.from_hf(lab.tiny(family, **changes).config)
    counts = {name: np.zeros(spec.shape, int) for name, spec in _specs(lab, config).items()}
    for target in targets(config, source, rotary_interleaved=interleaved).values():
        if not target.compare:
            target.view(counts[target.leaf])[...] += 1
    for name, count in counts.items():
        assert (count == 1).all(), name


@pytest.mark.parametrize(("family", "changes"), VARIANTS)
def test_names_and_shapes_are_those_of_hugging_face(lab, family, changes):
    model = lab.tiny(family, **changes)
    found = targets(ModelConfig.from_hf(model.config), "hf")
    assert {name: t.shape for name, t in found.items() if not t.compare} == {
        name: value.shape for name, value in model.tensors.items()
    }


def test_a_tied_output_matrix_is_compared_with_the_embedding(lab):
    config = ModelConfig.from_hf(lab.tiny(tie_word_embeddings=True).config)
    assert [t.leaf for t in targets(config, "hf").values() if t.compare] == ["embed"]
    assert targets(config, "gguf")["output.weight"].compare


def test_only_what_the_config_already_says_is_ignored():
    assert is_ignored("model.layers.3.self_attn.rotary_emb.inv_freq")
    assert is_ignored("model.rotary_emb.inv_freq")
    assert is_ignored("rope_freqs.weight")
    assert not is_ignored("model.layers.3.self_attn.q_proj.weight")
    assert not is_ignored("model.layers.3.self_attn.rotary_emb.weight")


def _specs(lab, config):
    import jax

    flat, _ = jax.tree_util.tree_flatten_with_path(abstract_params(config))
    return {jax.tree_util.keystr(path, simple=True, separator="."): spec for path, spec in flat}
