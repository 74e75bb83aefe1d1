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
